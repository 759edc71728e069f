"""What every kind of stored weights looks like from outside: named tensors, and any rows of any of them.

A :class:`Source` is a folder in Hugging Face layout, a quantised one seen through its scales, an Orbax folder, or a
model's own arrays. Loading, converting, exporting and verifying are written once, against it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

from nemotron_jax.parameters import Cut

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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")
PREFIXES = ("language_model.backbone.", "language_model.model.", "language_model.", "backbone.", "model.")
BLOCK = 8 << 20  # bytes that one job reads


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor as its file names it.

    Attributes:
      name: in the file, prefix included.
      dtype: safetensors' word for it.
      shape: as stored.
      file: name of the file that holds it, where there is one.
      start: where its bytes begin there, counted from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Source:
    """Named tensors and their rows. ``tensors`` is keyed by canonical name, in the order of the files.

    Attributes:
      where: what errors call it.
      tensors: what there is.
      quantized: whether these are the plain values of what a folder stores quantised, and says so in its small files.
    """

    where: str
    tensors: dict[str, Tensor]
    quantized: bool = False

    def read_block(self, name: str, dim: int, lo: int, hi: int, cuts: Sequence[Cut]) -> None:
        """Fill part of ``cuts``, all of them along ``dim`` of the tensor ``name``.

        With dim 0 there is one cut, and [lo, hi) are rows inside it. With dim > 0, [lo, hi) are rows along dimension
        0 and every cut gets its columns of them.

        Raises:
          OSError, ValueError: naming the file, where the bytes are not there.
        """
        raise NotImplementedError

    def jobs(self, name: str, dim: int, cuts: Sequence[Cut]) -> Iterator[tuple[int, Callable[[], None]]]:
        """The work of filling ``cuts``, in pieces of about BLOCK bytes for any order and any thread: (bytes, call)."""
        tensor = self.tensors[name]
        if dim and len(cuts) == 1 and cuts[0].stop - cuts[0].start == tensor.shape[dim]:
            dim, cuts = 0, [Cut(0, tensor.shape[0], cuts[0].out)]
        if dim == 0:
            for cut in cuts:
                yield from self._split(name, 0, cut.start, cut.stop, [cut], tensor)
        else:
            yield from self._split(name, dim, 0, tensor.shape[0], cuts, tensor)

    def _split(self, name, dim, start, stop, cuts, tensor):
        row = max(1, tensor.bytes // max(1, tensor.shape[0])) if tensor.shape else tensor.bytes
        step = max(1, BLOCK // row)
        written = sum(c.out.nbytes for c in cuts) / max(1, stop - start)
        for lo in range(start, stop, step):
            hi = min(lo + step, stop)
            yield int((hi - lo) * written), lambda lo=lo, hi=hi: self.read_block(name, dim, lo, hi, cuts)

    def rows(self, name: str, start: int = 0, stop: int | None = None, dim: int = 0) -> np.ndarray:
        """Rows [start, stop) along ``dim`` of a tensor, in its own dtype."""
        tensor = self.tensors[name]
        if not tensor.shape:
            out = np.empty((1,), DTYPES[tensor.dtype])
            self.read_block(name, 0, 0, 1, [Cut(0, 1, out)])
            return out.reshape(())
        stop = tensor.shape[dim] if stop is None else stop
        out = np.empty((*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :]), DTYPES[tensor.dtype])
        for _, job in self.jobs(name, dim, [Cut(start, stop, out)]):
            job()
        return out

    def __call__(self, tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> np.ndarray:
        """Makes a source a :class:`nemotron_jax.parameters.Reader`."""
        return self.rows(tensor, start, stop, dim)

    def bytes(self, names: Iterable[str] | None = None) -> int:
        return sum(self.tensors[name].bytes for name in (self.tensors if names is None else names))

    def close(self) -> None:
        """Give back open files."""


def canonical_name(name: str) -> str:
    """``backbone.layers.0.norm.weight`` -> ``layers.0.norm.weight``; ``mtp.`` and ``lm_head.`` stay where they are."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return "embeddings." + name.removeprefix("embedding.") if name.startswith("embedding.") else name


def listed(faults: list[str], most: int = 20) -> str:
    """Faults in one line; very many are counted."""
    return "; ".join(faults if len(faults) <= most else [*faults[:most], f"and {len(faults) - most} more"])
