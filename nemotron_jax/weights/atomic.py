"""A folder that is replaced as a whole or not at all, whenever the process ends.

Everything is written into a folder beside the wanted one, ``.NAME.saving-XXXX``, which then takes its place: by one
rename where nothing is there yet, by one exchange of two names where something is. Where the system cannot exchange,
the old folder steps aside as ``.NAME.previous`` and :func:`recover` puts it back if the process ended in between.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

logger = logging.getLogger("nemotron_jax")

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new folder to write into: ``path`` when the block has ended without an error, gone when it ended with one.

    What interrupted saves of the same path left behind is removed first, with one line that says so.

    Raises:
      ValueError: if another process is saving to the same path.
    """
    path = Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    for left in leftovers(path):
        with _locked(left) as free:
            if not free:
                raise ValueError(f"another process is saving to {path}: it writes {left}")
            logger.warning("a save to %s was interrupted; what it left in %s is removed", path, left.name)
            shutil.rmtree(left)
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.saving-", dir=path.parent))
    new.chmod(0o777 & ~_umask())
    with _locked(new):
        try:
            yield new
            _sync(new)
            old = _put(new, path)
            _sync(path.parent, inside=False)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    if old is not None:
        shutil.rmtree(old)


def leftovers(path: Path) -> list[Path]:
    """Folders of saves to ``path`` that have not ended, or never will."""
    path = Path(os.path.abspath(path))
    return sorted(path.parent.glob(f".{_literal(path.name)}.saving-*")) if path.parent.is_dir() else []


def recover(path: Path) -> None:
    """Say what an interrupted save to ``path`` left, and put the previous folder back where it had stepped aside."""
    path = Path(os.path.abspath(path))
    aside = path.parent / f".{path.name}.previous"
    if aside.exists() and not path.exists():
        os.rename(aside, path)
        logger.warning("a save to %s was interrupted between two renames; the previous checkpoint is put back", path)
    for left in leftovers(path):
        with _locked(left) as free:
            if free:
                state = "is whole" if path.exists() else "was not written"
                logger.warning(
                    "a save to %s was interrupted: %s %s; %s is a leftover", path, path.name, state, left.name
                )


def _put(new: Path, path: Path) -> Path | None:
    """Give ``new`` the name ``path``; returns where the folder that had it is now."""
    if not path.exists():
        os.rename(new, path)
        return None
    if _exchange(new, path):
        return new
    aside = path.parent / f".{path.name}.previous"
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    os.rename(new, path)
    return aside


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[bool]:
    """Holds the lock of a folder, which ends with the process; yields whether it was free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _sync(path: Path, inside: bool = True) -> None:
    """Have a folder, and what is in it, on the disk: a power cut after the rename then finds it whole."""
    for folder, _, files in os.walk(path):
        for name in [*(files if inside else ()), "."]:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if not inside:
            return


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
