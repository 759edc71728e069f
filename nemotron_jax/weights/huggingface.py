"""Checkpoints in Hugging Face layout: which tensors a folder holds, and any rows of them without reading the rest.

Bytes are read at their offsets into the memory where they are wanted. safetensors' own NumPy path knows no float8; a
mapped file would count as this process's memory, and would end the process where the file is cut short while it is
read.
"""

import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from nemotron_jax.files import reason
from nemotron_jax.parameters import Cut
from nemotron_jax.weights.source import DTYPES, Source, Tensor, canonical_name, listed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Columns of a row are read by themselves where they are at least so many bytes, and the minority of the row.
SEGMENT = 512


class Checkpoint(Source):
    """The tensors of a folder, by canonical name (the file's prefix taken off, ``embedding.`` read as ``embeddings.``).

    Attributes:
      folder: the folder.
      metadata: the ``__metadata__`` of each file.
    """

    def __init__(self, folder: str | Path):
        """Read the headers, and nothing else.

        Raises:
          FileNotFoundError: the folder holds no safetensors file, or the index names one that is missing.
          ValueError: a header or the index is damaged, or two files disagree; all faults are listed.
        """
        self.folder = Path(folder)
        self.where = f"checkpoint {self.folder}"
        self.tensors = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        faults: list[str] = []
        files, expected = self._files()
        seen: dict[str, str] = {}
        for file in files:
            header = _header(file, faults)
            self.metadata[file.name] = header.pop("__metadata__", {})
            for name, tensor in header.items():
                if name in seen:
                    faults.append(f"tensor {name} stands in both {seen[name]} and {file.name}")
                    continue
                seen[name] = file.name
                canonical = canonical_name(name)
                if canonical in self.tensors:
                    faults.append(
                        f"tensors {self.tensors[canonical].name} and {name} are the same parameter {canonical}"
                    )
                self.tensors[canonical] = tensor
        if expected is not None and not faults:
            for name, file_name in expected.items():
                if name not in seen:
                    faults.append(f"{INDEX} lists tensor {name} in {file_name}, which does not hold it")
                elif seen[name] != file_name:
                    faults.append(f"{INDEX} lists tensor {name} in {file_name}, found it in {seen[name]}")
            faults += [
                f"tensor {name} of {file_name} is not in {INDEX}"
                for name, file_name in seen.items()
                if name not in expected
            ]
        if faults:
            raise ValueError(f"{self.where}: {listed(faults)}")

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        index = self.folder / INDEX
        if index.exists():
            try:
                expected = json.loads(index.read_text())["weight_map"]
                files = sorted({self.folder / file for file in expected.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} is no safetensors index: {error!r}") from error
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise FileNotFoundError(f"{index} names files that are missing: {listed(missing)}")
            return files, expected
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.folder} holds no *.safetensors file")
        if len(files) > 1:
            raise ValueError(
                f"{self.folder} holds {len(files)} safetensors files and no {INDEX} that says what belongs together"
            )
        return files, None

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self.folder / file, os.O_RDONLY)
            return self._descriptors[file]

    def close(self) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __del__(self):
        if hasattr(self, "_lock"):
            self.close()

    def _pread(self, tensor: Tensor, offset: int, out: np.ndarray) -> None:
        """Fill ``out`` (contiguous) with the tensor's bytes from ``offset`` on."""
        view = memoryview(out.reshape(-1).view(np.uint8))
        position, descriptor = tensor.start + offset, self._descriptor(tensor.file)
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                file = self.folder / tensor.file
                raise ValueError(f"{file} ends at byte {position}, inside tensor {tensor.name}: it was cut short")
            view, position = view[count:], position + count

    def read_block(self, name: str, dim: int, lo: int, hi: int, cuts: Sequence[Cut]) -> None:
        tensor = self.tensors[name]
        dtype, shape = DTYPES[tensor.dtype], tensor.shape
        row = math.prod(shape[1:]) * dtype.itemsize
        if dim == 0:
            (cut,) = cuts
            out = cut.out[lo - cut.start : hi - cut.start]
            if out.dtype == dtype and out.flags.c_contiguous:
                self._pread(tensor, lo * row, out)
            else:
                block = np.empty((hi - lo, *shape[1:]), dtype)
                self._pread(tensor, lo * row, block)
                out[...] = block
            return
        column = math.prod(shape[2:]) * dtype.itemsize
        wanted = sum(c.stop - c.start for c in cuts)
        if dim == 1 and 2 * wanted <= shape[1] and all((c.stop - c.start) * column >= SEGMENT for c in cuts):
            for cut in cuts:
                out = cut.out[lo:hi]
                direct = out.dtype == dtype and out[0].flags.c_contiguous
                block = out if direct else np.empty(out.shape, dtype)
                for i in range(hi - lo):
                    self._pread(tensor, (lo + i) * row + cut.start * column, block[i])
                if not direct:
                    out[...] = block
            return
        block = np.empty((hi - lo, *shape[1:]), dtype)
        self._pread(tensor, lo * row, block)
        for cut in cuts:
            cut.out[lo:hi] = block[(slice(None),) * dim + (slice(cut.start, cut.stop),)]


def _header(file: Path, faults: list[str]) -> dict[str, Any]:
    """{tensor name: Tensor} in the order of their bytes, and ``__metadata__``."""
    try:
        with safe_open(file, framework="numpy"):  # the library's own checks of the header and of the file's length
            pass
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size), object_pairs_hook=_without_repeats)
        found: dict[str, Any] = {"__metadata__": header.pop("__metadata__", {})}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                faults.append(f"{file.name}: tensor {name} has dtype {entry['dtype']}, accepted {', '.join(DTYPES)}")
            elif end - begin != math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
                faults.append(
                    f"{file.name}: tensor {name} spans {end - begin} bytes, its shape and dtype need another number"
                )
            else:
                found[name] = Tensor(name, entry["dtype"], tuple(entry["shape"]), file.name, 8 + size + begin)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        faults.append(f"{file.name} cannot be read: {reason(error)}")
        return {}


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands twice in the header")
        found[name] = value
    return found
