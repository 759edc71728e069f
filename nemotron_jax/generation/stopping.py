"""When a row ends: end tokens, stop strings (also across token borders), and the reasons."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.generation.text import TextStream, Tokenizer

logger = logging.getLogger("nemotron_jax")

EOS, STOP, LENGTH = (
    "eos",
    "stop",
    "length",
)  # finish reasons: an end token, a stop string, max_new_tokens or the last position


def eos_of(config: NemotronHConfig, folder: str | Path | None) -> tuple[int, ...]:
    """The end tokens of a checkpoint: those of ``generation_config.json`` where it names any, otherwise the config's.

    Either file may name one, several or none.

    Raises:
      ValueError: if generation_config.json holds something else.
    """
    own = config.eos_token_ids
    file = None if folder is None else Path(folder) / "generation_config.json"
    if file is None or not file.is_file():
        return own
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    if found is None:
        return own
    ids = check_eos(found, config.vocab_size, f"{file}: eos_token_id")
    if set(ids) != set(own):
        logger.info("end tokens %s are those of %s; config.json says %s", ids, file.name, own)
    return ids


def check_eos(found: int | Sequence[int] | None, vocab_size: int, name: str = "eos") -> tuple[int, ...]:
    """End tokens as a tuple.

    Raises:
      ValueError: for anything but an id, several ids, or none.
    """
    ids = () if found is None else (found,) if isinstance(found, int) else tuple(found)
    if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]:
        raise ValueError(f"{name}: found {bad}, accepted ids 0 to {vocab_size - 1}, several of them, or none")
    return tuple(dict.fromkeys(ids))


class RowText:
    """The text of one row as it grows, cut before the first stop string.

    Text that might be the beginning of a stop string is held back until that is decided.

    Attributes:
      stopped: a stop string was completed; nothing more is given out.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._stream = TextStream(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Text that is certain after further tokens, and how many of them that took: a stop string may end it."""
        if not self._stops:
            return self._stream.push(tokens), len(tokens)
        text = ""
        for n, token in enumerate(tokens, 1):
            text += self._settle(self._stream.push([token]))
            if self.stopped:
                return text, n
        return text, len(tokens)

    def finish(self) -> str:
        """The rest, when no further token comes."""
        if self.stopped:
            return ""
        text = self._settle(self._stream.finish())
        rest, self._held = self._held, ""
        return text + ("" if self.stopped else rest)

    def _settle(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        places = [p for p in (text.find(s) for s in self._stops) if p >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        hold = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
