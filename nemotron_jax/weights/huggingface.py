"""Checkpoints in Hugging Face layout: what tensors a folder holds, and any rows of any of them without reading the rest.

Files are mapped into memory and sliced as raw bytes: safetensors' own NumPy path knows no float8 and no rows of it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FLOATS = ("F64", "F32", "F16", "BF16")
PREFIXES = ("language_model.backbone.", "language_model.model.", "language_model.", "backbone.", "model.")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


class Checkpoint:
    """The tensors of a folder, by canonical name (the file's prefix taken off, ``embedding.`` read as ``embeddings.``)."""

    def __init__(self, folder: str | Path):
        """Read the headers, and nothing else.

        Raises:
          FileNotFoundError: the folder holds no safetensors file, or the index names one that is missing.
          ValueError: a header or the index is damaged, or two files disagree; all faults are listed.
        """
        self.folder = Path(folder)
        self.names: dict[str, str] = {}  # canonical -> in the file
        self.tensors: dict[str, Tensor] = {}
        self._maps: dict[Path, np.memmap] = {}
        faults: list[str] = []
        files, expected = self._files()
        seen: dict[str, Path] = {}
        for file in files:
            for name, tensor in _header(file, faults):
                if name in seen:
                    faults.append(f"tensor {name} stands in both {seen[name].name} and {file.name}")
                seen[name] = file
                canonical = canonical_name(name)
                if canonical in self.tensors and name not in self.names.values():
                    faults.append(f"tensors {self.names[canonical]} and {name} are the same parameter {canonical}")
                self.names[canonical], self.tensors[canonical] = name, tensor
        if expected is not None:
            for name, file in expected.items():
                if name not in seen:
                    faults.append(f"{INDEX} lists tensor {name} in {file}, which does not hold it")
                elif seen[name].name != file:
                    faults.append(f"{INDEX} lists tensor {name} in {file}, found it in {seen[name].name}")
            faults += [f"tensor {name} of {file.name} is not in {INDEX}" for name, file in seen.items() if name not in expected]
        if faults:
            raise ValueError(f"checkpoint {self.folder}: " + "; ".join(faults))

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        index = self.folder / INDEX
        if index.exists():
            try:
                expected = json.loads(index.read_text())["weight_map"]
                files = sorted({self.folder / file for file in expected.values()})
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} is no safetensors index: {error!r}") from error
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
            return files, expected
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.folder} holds no *.safetensors file")
        if len(files) > 1:
            raise ValueError(f"{self.folder} holds {len(files)} safetensors files and no {INDEX} that says what belongs together")
        return files, None

    def bytes(self, names: Iterable[str] | None = None) -> int:
        return sum(t.stop - t.start for n, t in self.tensors.items() if names is None or n in names)

    def raw(self, name: str) -> np.ndarray:
        """The whole tensor as a read-only view of the mapped file."""
        t = self.tensors[name]
        if t.file not in self._maps:
            self._maps[t.file] = np.memmap(t.file, np.uint8, mode="r")
        return self._maps[t.file][t.start : t.stop].view(DTYPES[t.dtype]).reshape(t.shape)

    def __call__(self, tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along ``dim``: what :func:`nemotron_jax.parameters.assemble` reads."""
        return self.raw(tensor)[(slice(None),) * dim + (slice(start, stop),)]


def canonical_name(name: str) -> str:
    """``backbone.layers.0.norm.weight`` -> ``layers.0.norm.weight``; ``mtp.`` and ``lm_head.`` stay where they are."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return "embeddings." + name.removeprefix("embedding.") if name.startswith("embedding.") else name


def _header(file: Path, faults: list[str]) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="numpy"):  # the library's own checks of the header and of the file's length
            pass
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        faults.append(f"{file.name} cannot be read: {error}")
        return
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            faults.append(f"{file.name}: tensor {name} has dtype {entry['dtype']}, accepted {', '.join(DTYPES)}")
        elif end - begin != math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
            faults.append(f"{file.name}: tensor {name} spans {end - begin} bytes, its shape and dtype need another number")
        else:
            yield name, Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + size + begin, 8 + size + end)
