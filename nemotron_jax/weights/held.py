"""A model's own arrays as a :class:`Source`: checkpoint tensors put together again from what each rank holds."""

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_jax.parameters import Cut, Piece, device_ranks, pieces
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import Layout
from nemotron_jax.weights.source import DTYPE_NAMES, DTYPES, Source, Tensor, listed


class Origin:
    """Where a model's arrays came from: enough to write them as they stood there.

    Attributes:
      folder: the folder they were loaded from.
      tensors: what its files call each tensor.
      metadata: of each file.
      quantized: whether the folder stores weights quantised.
    """

    def __init__(self, model: NemotronH, folder: Path, source: Source):
        self.folder, self.tensors, self.metadata = folder, source.tensors, dict(getattr(source, "metadata", {}))
        self.quantized = source.quantized
        self._loaded = [weakref.ref(array) for array in model.weights or ()]

    def untouched(self, index: int, array: jax.Array) -> bool:
        """Whether a parameter is still the array that was loaded."""
        return index < len(self._loaded) and self._loaded[index]() is array


class Held(Source):
    """The tensors that a model's arrays hold.

    A tensor keeps the file's dtype where the model holds it in one that has every value of that; otherwise it has the
    model's.
    """

    def __init__(self, model: NemotronH):
        """
        Raises:
          ValueError: if the model is abstract.
        """
        if model.weights is None:
            raise ValueError("this model is abstract: it has no weights to write")
        self.where = f"{model!r}"
        self.model, self.arrays = model, model.weights
        origin: Origin | None = model.origin
        self._places: dict[str, tuple[int, list[tuple[int, Piece]]]] = {}
        self.tensors = {}
        for index, (p, array) in enumerate(zip(model.parameters, model.weights, strict=True)):
            for name, shape in p.layout.tensors():
                file = origin.tensors.get(name) if origin else None
                dtype = DTYPE_NAMES[np.dtype(p.dtype)]
                if (
                    origin
                    and file is not None
                    and origin.untouched(index, array)
                    and _holds(p.dtype, DTYPES[file.dtype])
                ):
                    dtype = file.dtype
                prefix = "" if name.startswith(("lm_head.", "mtp.")) else "backbone."
                self.tensors[name] = Tensor(
                    file.name if file else prefix + name, dtype, shape, file.file if file else ""
                )
            for r in _distinct_ranks(p.layout):
                for piece in pieces(p.layout, r):
                    self._places.setdefault(piece.tensor, (index, []))[1].append((r, piece))
        for name, (index, placed) in self._places.items():
            self._places[name] = (index, _once(placed))
        if origin:  # the order of the files
            order = {name: i for i, name in enumerate(origin.tensors)}
            self.tensors = dict(sorted(self.tensors.items(), key=lambda item: order.get(item[0], len(order))))
        self.ranks = device_ranks(model.mesh)
        self._host: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()
        self.metadata = origin.metadata if origin else {}
        self.quantized = bool(origin and origin.quantized)

    def share(self, index: int, rank: int) -> np.ndarray:
        """What ``rank`` holds of a parameter, on the host; the last few are kept."""
        with self._lock:
            return self._share(index, rank)

    def _share(self, index: int, rank: int) -> np.ndarray:
        if (index, rank) not in self._host:
            known = {i for i, _ in self._host} | {index}
            if len(known) > 2:  # experts' up and down matrices alternate, so two parameters are kept
                oldest = next(iter(self._host))[0]
                self._host = {key: value for key, value in self._host.items() if key[0] != oldest}
            array, layout = self.arrays[index], self.model.parameters[index].layout
            for shard in array.addressable_shards:
                if layout.replicated or self.ranks[shard.device] == rank:
                    self._host[index, rank] = np.asarray(shard.data)
                    break
        return self._host[index, rank]

    def part(self, name: str, place: int, window: Sequence[tuple[int, int]]) -> np.ndarray:
        """Values of one of the places where a tensor stands, [start, stop) of it in each dimension, in its dtype."""
        index, placed = self._places[name]
        rank, piece = placed[place]
        values = self.share(index, rank)[piece.index][tuple(slice(*w) for w in window)]
        return values.astype(DTYPES[self.tensors[name].dtype])

    def read_block(self, name: str, dim: int, lo: int, hi: int, cuts: Sequence[Cut]) -> None:
        _, placed = self._places[name]
        for cut in cuts:
            window = [(0, n) for n in self.tensors[name].shape]
            window[0] = (lo, hi)
            if dim:
                window[dim] = (cut.start, cut.stop)
            out = cut.out[lo - cut.start : hi - cut.start] if dim == 0 else cut.out[lo:hi]
            for place, (_, piece) in enumerate(placed):
                a, b = max(window[piece.dim][0], piece.start), min(window[piece.dim][1], piece.stop)
                if a >= b:
                    continue
                selected = list(window)
                selected[piece.dim] = (a - piece.start, b - piece.start)
                target = [slice(None)] * out.ndim
                target[piece.dim] = slice(a - window[piece.dim][0], b - window[piece.dim][0])
                out[tuple(target)] = self.part(name, place, selected)


def _distinct_ranks(layout: Layout) -> range:
    return range(1 if layout.replicated else layout.ranks)


def _once(placed: list[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    """Without the repeats of neighbouring ranks."""
    seen: dict[tuple[int, int, int], tuple[int, Piece]] = {}
    for r, piece in placed:
        seen.setdefault((piece.dim, piece.start, piece.stop), (r, piece))
    return list(seen.values())


def _holds(dtype: Any, narrow: Any) -> bool:
    """Whether every value of ``narrow`` is one of ``dtype``."""
    return jnp.promote_types(dtype, narrow) == dtype


def verify(model: NemotronH, source: Source, done: Callable[[int], None] = lambda compared: None) -> None:
    """Compare a model with the files byte for byte, both ways.

    Every rank's copy on every device of this process must be the file's rows cast to the parameter's dtype, and zero
    elsewhere; and every tensor put together again from the ranks must be the file's tensor (cast where the model
    holds another dtype).

    Raises:
      ValueError: naming each tensor that differs, with the device.
    """
    faults: dict[str, None] = {}
    ranks = device_ranks(model.mesh)
    for p, array in zip(model.parameters, model.weights or (), strict=True):
        expected: dict[int, np.ndarray] = {}
        for shard in array.addressable_shards:
            r = 0 if p.layout.replicated else ranks[shard.device]
            if r not in expected:
                expected[r] = np.zeros(p.layout.local_shape, p.dtype)
                for piece in pieces(p.layout, r):
                    expected[r][piece.index] = source.rows(piece.tensor, piece.start, piece.stop, piece.dim)
            found = np.asarray(shard.data)
            if not _same_bytes(found, expected[r]):
                differ = [
                    piece.tensor
                    for piece in pieces(p.layout, r)
                    if not _same_bytes(found[piece.index], expected[r][piece.index])
                ]
                for name in differ or [f"rows of {'.'.join(map(str, p.path))} that must be zero"]:
                    faults[f"{name} on {shard.device}"] = None
        done(sum(e.nbytes for e in expected.values()))
    if model.weights and all(array.is_fully_addressable for array in model.weights):
        held = Held(model)
        for name, tensor in held.tensors.items():
            if not _same_bytes(held.rows(name), source.rows(name).astype(DTYPES[tensor.dtype])):
                faults[name] = None
    if faults:
        raise ValueError(f"{source.where}: what was loaded differs from the file: {listed(list(faults))}")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = f"u{a.dtype.itemsize}"
    return np.array_equal(np.ascontiguousarray(a).view(unsigned), np.ascontiguousarray(b).view(unsigned))
