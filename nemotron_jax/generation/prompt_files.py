"""Prompts from a file, and answers into a file that a killed run goes on with."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from nemotron_jax.files import named

ANSWERS = "a file for the answers, on a disk that has room"


@dataclasses.dataclass(frozen=True)
class FilePrompt:
    """One prompt of a file.

    Attributes:
      prompt: text, token ids, or chat messages.
      extra: other fields of its JSON line (an id, say); they are copied to the answer.
      seed: of its own, or None.
    """

    prompt: Any
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None


def read_prompts(file: str | Path) -> list[FilePrompt]:
    """Prompts of a file: one a line, or with the suffix .jsonl one JSON object a line.

    An object has one of ``prompt`` (text or ids), ``tokens`` and ``messages``, and may have ``seed``. Blank lines hold
    no prompt.

    Raises:
      OSError: if the file cannot be read.
      ValueError: naming every line that holds no prompt; or if there is none.
    """
    file = Path(file)
    try:
        with named(file, "a text file with one prompt a line, or .jsonl with one object a line"):
            lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from error
    found, faults = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            found.append(FilePrompt(line.rstrip("\r")))
            continue
        try:
            found.append(_from_json(line))
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    if faults:
        raise ValueError(f"{file}: " + "; ".join(faults))
    if not found:
        raise ValueError(f"{file}: found no prompt, accepted one a line")
    return found


def _from_json(line: str) -> FilePrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    keys = [k for k in ("prompt", "tokens", "messages") if isinstance(entry, dict) and k in entry]
    if len(keys) != 1:
        raise ValueError(f"found {line.strip()[:60]!r}, accepted an object with one of 'prompt', 'tokens', 'messages'")
    seed = entry.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ValueError(f"seed: found {seed!r}, accepted an integer")
    return FilePrompt(entry.pop(keys[0]), entry, seed)


class Answers:
    """A JSONL file of answers in the order of the prompts, written line by line.

    Every line names the settings it came from. Opening the file again takes over the whole lines that are there; a
    line that was cut off in the middle is removed.
    """

    def __init__(self, file: str | Path, settings: str, prompts: list[FilePrompt]):
        """Open for going on.

        Args:
          settings: stands for everything that the answers depend on.

        Raises:
          OSError: if the file cannot be opened.
          ValueError: if the file holds answers to other prompts or from other settings: it is left as it is.
        """
        self._file, self._settings = Path(file), settings
        self.done: list[dict[str, Any]] = []
        whole = b""
        with named(self._file, ANSWERS):
            if self._file.exists():
                whole = self._file.read_bytes()
                whole = whole[: whole.rfind(b"\n") + 1]
                self.done = [self._check(i, line, prompts) for i, line in enumerate(whole.splitlines())]
            self._handle = open(self._file, "ab")
            self._handle.truncate(len(whole))

    def _check(self, index: int, line: bytes, prompts: list[FilePrompt]) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            same = (
                entry["settings"] == self._settings
                and index < len(prompts)
                and entry["prompt"] == prompts[index].prompt
            )
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self._file}: line {index + 1} is no answer of an earlier run; give another file"
            ) from None
        if not same:
            what = "settings" if entry["settings"] != self._settings else "a prompt"
            raise ValueError(
                f"{self._file}: line {index + 1} comes from {what} that this run does not have; give another file"
            )
        return entry

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Append answers; they are on disk when this returns."""
        with named(self._file, ANSWERS):
            for entry in entries:
                self.done.append({**entry, "settings": self._settings})
                self._handle.write(json.dumps(self.done[-1], ensure_ascii=False).encode() + b"\n")
            self._handle.flush()
            os.fsync(self._handle.fileno())

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()
