"""Errors of the file system in words: which file it is, and what was expected there."""

import contextlib
from collections.abc import Generator
from pathlib import Path


def reason(error: BaseException) -> str:
    """An error in words; of one that the system made, the file and what is wrong with it, without the number."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def named(path: str | Path, accepted: str) -> Generator[None]:
    """A block that reads or writes one file.

    Raises:
      OSError: what the block raised, of the same kind, naming the file and what is ``accepted``.
    """
    try:
        yield
    except OSError as error:
        raise type(error)(f"{path}: {error.strerror or error}; accepted: {accepted}") from error


def make_folder(path: str | Path) -> None:
    """Make a folder for results, unless it is there."""
    with named(path, "a folder for the results"):
        Path(path).mkdir(parents=True, exist_ok=True)


def check_writable(path: str | Path, accepted: str) -> None:
    """Refuse a path that no file can be written to, before anything is made that would go there.

    Raises:
      ValueError: if it is a folder, or in none.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: found a folder; accepted: {accepted}")
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{path}: found no folder {path.absolute().parent}; accepted: {accepted}, in a folder that exists"
        )
