"""Conversions that are kept: a quantised checkpoint is dequantised once, and later starts restore the result.

Off unless asked for. A plain import already streams each rank's bytes from the files, and restoring is no faster
(benchmarks/import.md has both), so an entry pays where a conversion computes something: for quantised checkpoints.
The environment variable, which speaks of every model, therefore concerns those alone; the argument of ``load``, which
speaks of one, converts any.

An entry is a folder as ``convert`` writes it: independent of mesh and of the dtype that is loaded, since it holds the
checkpoint's own numbers, quantised ones as bfloat16. Beside the arrays stands ``.conversion.json``: what the source's
files were, and what the entry's own are. An entry is used only where both are still so.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.weights import orbax
from nemotron_jax.weights.huggingface import INDEX
from nemotron_jax.weights.quantized import FILE, read_scheme
from nemotron_jax.weights.source import Source, listed
from nemotron_jax.weights.writing import ORBAX, write

logger = logging.getLogger("nemotron_jax")

SWITCH = "NEMOTRON_JAX_CONVERSION_CACHE"
STAMP = ".conversion.json"  # a name with a dot: it does not travel along when an entry is itself converted
VERSION = 1  # goes up when dequantising comes to mean other numbers: entries of before are converted anew
ATTEMPTS = 3
_OFF, _ON = ("", "off", "0", "no", "false"), ("on", "1", "yes", "true")


def cache_folder(asked: bool | str | Path | None, folder: Path, config: NemotronHConfig) -> Path | None:
    """Where the conversion of a checkpoint is kept; None: nowhere.

    Args:
      asked: True or ``on``: in ``nemotron_jax/converted`` in the user's cache folder; a folder; False or ``off``: not
        at all. None: the environment variable NEMOTRON_JAX_CONVERSION_CACHE decides (``on``, a folder, ``off``; unset
        is off), for quantised checkpoints.
      folder: of the checkpoint. One in Orbax layout needs no conversion.

    Raises:
      ValueError: if the folder cannot hold a cache: it is a file, or itself a checkpoint.
    """
    if asked is None:
        asked = os.environ.get(SWITCH, "")
        if asked.lower() in _OFF or orbax.is_orbax(folder) or read_scheme(folder, config) is None:
            return None
    if isinstance(asked, str) and asked.lower() in (*_OFF, *_ON):  # a folder of such a name is written ./on
        asked = asked.lower() in _ON
    if asked is False:
        return None
    if orbax.is_orbax(folder):
        logger.info("%s is an Orbax checkpoint: there is nothing to convert, and nothing is kept", folder)
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = base / "nemotron_jax" / "converted" if asked is True else Path(asked)
    if where.exists() and not where.is_dir():
        raise ValueError(f"conversion_cache: found the file {where}, accepted a folder")
    if (where / "config.json").exists():
        raise ValueError(f"conversion_cache: found the checkpoint {where}, accepted a folder for conversions alone")
    return where


def source_name(path: str | Path | None, folder: Path, revision: str | None) -> str:
    """What a source is called whatever it holds today: the folder's own path, or OWNER/NAME@REVISION of the hub."""
    if path is None or Path(path).exists():
        return str(folder.resolve())
    hub_id, _, named = str(path).partition("@")
    return f"{hub_id}@{revision or named or 'main'}"


class Entry:
    """The kept conversion of one source.

    Attributes:
      path: the folder of it.
    """

    def __init__(self, cache: Path, name: str, folder: Path, config: NemotronHConfig):
        """
        Args:
          cache: the folder of all entries.
          name: of the source, see :func:`source_name`.
          folder: the source.
          config: its configuration.
        """
        short = re.sub(r"[^\w.-]+", "-", Path(name).name).strip(".-") or "model"
        self.path = cache / f"{short[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        self.folder, self.config = folder, config

    @contextlib.contextmanager
    def opened(
        self, original: Callable[[], Source], check: Callable[[Source], Any], *, progress: bool | None = None
    ) -> Generator[Source]:
        """The converted tensors, after converting them where there is no entry that can be used.

        Nothing replaces the entry while the block runs: other processes that load it go on at the same time, one that
        wants to convert anew waits.

        Args:
          original: opens the source.
          check: called with the opened source before anything is written; raises to refuse it.
          progress: a progress bar on stderr.

        Raises:
          ValueError: if the entry cannot be written or locked, or if the source changes while it is converted.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"conversion_cache: {self.path.parent} cannot be made: {error}") from error
        for _ in range(ATTEMPTS):
            with self._locked(fcntl.LOCK_SH):
                found = self._usable(fingerprint(self.folder))
                if isinstance(found, Source):
                    logger.info("restoring the conversion of %s from %s", self.folder, self.path)
                    yield found
                    return
            with self._locked(fcntl.LOCK_EX):
                wanted = fingerprint(self.folder)
                found = self._usable(wanted)  # again: another process may have converted meanwhile
                if isinstance(found, str):
                    self._convert(wanted, found, original, check, progress)
        raise ValueError(f"conversion_cache: {self.path} was replaced {ATTEMPTS} times while this process wanted it")

    def _convert(self, wanted, reason: str, original, check, progress: bool | None) -> None:
        if reason:
            logger.warning("%s is converted anew: %s", self.folder, reason)
        else:
            logger.info("converting %s to %s", self.folder, self.path)
        with contextlib.closing(original()) as source:
            check(source)

            def finish(new: Path) -> None:
                if changed := _changed(wanted, fingerprint(self.folder)):
                    raise ValueError(f"{self.folder} changed while it was converted: {changed}")
                stamp = {"source": wanted, "entry": _own_files(new), "quantized": source.quantized}
                (new / STAMP).write_text(json.dumps(stamp))

            write(self.path, ORBAX, source, self.config, self.folder, progress=progress, finish=finish)

    def _usable(self, wanted: dict[str, Any]) -> Source | str:
        """The opened entry; or why it cannot be used, "" where there is none."""
        if not self.path.exists():
            return ""
        try:
            stamp = json.loads((self.path / STAMP).read_text())
            source, own, quantized = stamp["source"], stamp["entry"], stamp["quantized"]
            if changed := _changed(source, wanted):
                return f"{changed}, since {self.path} was written"
            if changed := _changed(own, _own_files(self.path)):
                return f"{self.path} is damaged: {changed}"
            opened = orbax.OrbaxCheckpoint(self.path, self.config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{self.path} is damaged: {error!r}"
        opened.quantized = quantized
        return opened

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Generator[None]:
        """Holds the entry's lock, shared to read it or alone to replace it; it ends with the process."""
        file = self.path.parent / f".{self.path.name}.lock"  # never removed: who waits for it has it open
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(f"conversion_cache: {file} cannot be opened: {error}") from error
        try:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another process that uses %s", self.path)
                fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)


def fingerprint(folder: Path) -> dict[str, Any]:
    """What tells a checkpoint from an earlier one in its place, without reading weights.

    Size, time of the last change, and a digest: of the whole file for config, quantisation and index, of the header
    for safetensors files. Bytes changed behind an unchanged time, size and header are not noticed. A hub revision is
    part of the folder's path.

    Raises:
      ValueError: if a file cannot be read.
    """
    found: dict[str, Any] = {
        "format": [VERSION, orbax.FORMAT, orbax.VERSION],
        "folder": str(folder.resolve()),
    }
    try:
        for file in sorted(folder.iterdir()):
            weights = file.name.endswith(".safetensors")
            if not (weights or file.name in ("config.json", FILE, INDEX)):
                continue
            with open(file, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                head = f.read(8) if weights else b""
                head += f.read(min(int.from_bytes(head, "little"), size) if weights else size)
                digest = hashlib.sha256(head).hexdigest()
                found[file.name] = [size, os.fstat(f.fileno()).st_mtime_ns, digest]
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return found


def _own_files(folder: Path) -> dict[str, list[int]]:
    """Size and time of the last change of every file of an entry but the stamp."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != STAMP:
            status = file.stat()
            found[str(file.relative_to(folder))] = [status.st_size, status.st_mtime_ns]
    return found


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two descriptions of files, in words; "" for nothing."""
    faults = [f"{name} is gone" for name in before if name not in now]
    faults += [f"{name} is new" for name in now if name not in before]
    faults += [f"{name} has changed" for name, what in before.items() if name in now and now[name] != what]
    return listed(faults, most=4)
