"""Text to token ids and back: the checkpoint's tokenizer, its chat template, and text that grows token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

INCOMPLETE = "\ufffd"  # what a decoder puts in the place of bytes that are no whole character (yet)


class Tokenizer:
    """A checkpoint's ``tokenizer.json``, with the settings beside it.

    Attributes:
      chat_template: Jinja source, or None where the checkpoint has none.
    """

    def __init__(self, folder: str | Path):
        """Read ``tokenizer.json``, and where present ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
          FileNotFoundError: if the folder has no tokenizer.json.
          ValueError: if a file cannot be read as what it should be.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json: give token ids, or a folder with a tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.settings = _json(folder / "tokenizer_config.json")
        self.chat_template = self._find_template(folder)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._specials = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    def _find_template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {t["name"]: t["template"] for t in template}
            template = named.get("default", next(iter(named.values()), None))
        return template

    def special(self, name: str) -> str | None:
        """Text of a special token by its role, such as ``"bos_token"``."""
        token = self.settings.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Args:
          specials: let the tokenizer add its own (such as a first ``<s>``); off for text that goes on an earlier one.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=specials).ids
        if specials and self.settings.get("add_bos_token"):
            bos = self.id_of(self.special("bos_token"))
            if bos is not None and ids[:1] != [bos]:
                ids = [bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_specials)

    def is_special(self, token: int) -> bool:
        return token in self._specials

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation by the chat template.

        Args:
          messages: dicts with ``role`` and ``content``.
          add_generation_prompt: end with what makes the model answer.
          variables: further variables of the template, such as ``enable_thinking``.

        Raises:
          ValueError: if there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template: give text instead of messages")
        faults = [
            f"message {i}: found {m!r}, accepted a dict with 'role' and 'content'"
            for i, m in enumerate(messages)
            if not isinstance(m, dict) or not isinstance(m.get("role"), str) or "content" not in m
        ]
        if faults:
            raise ValueError("; ".join(faults))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)

        def refuse(message):
            raise jinja2.TemplateError(message)

        names = {n: self.special(n) or "" for n in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                raise_exception=refuse,
                tools=None,
                **{**names, **variables},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error


class TextStream:
    """Text of tokens that arrive one by one. A character is given out once all its bytes are there.

    The pieces joined are the decoding of all tokens together.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = (
            0  # tokens from here on are decoded together with the new one: decoders look at their left neighbours
        )
        self._read = 0  # tokens before this one have been given out

    def push(self, tokens: Sequence[int]) -> str:
        """Text that further tokens complete; none where the last character is not whole."""
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        text = self._tokenizer.decode(self._tokens[self._start :])
        if len(text) <= len(before) or text.endswith(INCOMPLETE):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left: bytes that never became a character, as replacement characters."""
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        text = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._read = len(self._tokens)
        return text[len(before) :]


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: found {type(found).__name__}, accepted a JSON object")
    return found
