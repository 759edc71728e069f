"""From rows of named tensors to sharded arrays: each device gets only what its rank holds."""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nemotron_jax.sharding import TENSOR, Layout, Section

# Host memory that reading ahead may take. With it goes the largest single parameter's share of this process, once.
READ_AHEAD = 512 << 20
SUBMITTED = 4 << 20  # bytes of reading that one task does: small tensors go together
THREADS = min(16, 2 * (os.cpu_count() or 1))


class Reader(Protocol):
    """Where parameter values come from."""

    def __call__(self, tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Any:
        """Rows [start, stop) along ``dim`` of the tensor called ``tensor``, of the whole shape ``shape``; any array."""
        ...


class Cut(NamedTuple):
    """Rows [start, stop) of a tensor along a dimension, and the memory where they go (cast to its dtype)."""

    start: int
    stop: int
    out: np.ndarray


@runtime_checkable
class BulkReader(Protocol):
    """A reader that fills memory given to it, in pieces that may run at the same time."""

    def jobs(self, name: str, dim: int, cuts: Sequence[Cut]) -> Iterable[tuple[int, Callable[[], None]]]:
        """(bytes filled, call) for each piece of the work of filling ``cuts``."""
        ...


class Piece(NamedTuple):
    """Rows of one checkpoint tensor, and where in a rank's array they stand.

    Attributes:
      tensor: canonical name.
      shape: of the whole tensor in the checkpoint.
      dim: dimension of the tensor along which [start, stop) is taken.
      index: selects the place in the rank's array; the selection has the shape of the rows.
    """

    tensor: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    index: tuple[int | slice, ...]


def pieces(layout: Layout, rank: int) -> Iterator[Piece]:
    """What ``rank`` holds of a parameter, tensor by tensor. Rows that no piece covers are zero."""
    shapes = section_shapes(layout)
    offset = 0
    for s in layout.sections:
        start, stop = s.rows(rank, layout.ranks)
        before, shape = (slice(None),) * layout.dim, shapes[s.tensor]
        place = slice(offset, offset + stop - start)
        offset += s.width()
        if stop == start:
            continue
        if not stacked(s):
            yield Piece(s.tensor, shape, layout.dim, start, stop, (*before, place))
        elif layout.dim == 0:
            for i in range(start, stop):
                yield Piece(s.tensor.format(i), shape[1:], 0, 0, shape[1], (place.start + i - start,))
        else:
            for i in range(shape[0]):
                yield Piece(s.tensor.format(i), shape[1:], layout.dim - 1, start, stop, (i, *before[1:], place))


def stacked(section: Section) -> bool:
    """Whether a section's rows come from many tensors, one per index of the first dimension (experts)."""
    return "{}" in section.tensor


def section_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a layout, by the name that its sections give it; a stacked one's with the stack first."""
    rows: dict[str, int] = {}
    for s in layout.sections:
        rows[s.tensor] = max(rows.get(s.tensor, 0), s.start + s.size)
    return {name: (*layout.shape[: layout.dim], n, *layout.shape[layout.dim + 1 :]) for name, n in rows.items()}


def local_values(layout: Layout, rank: int, read: Reader, dtype: Any) -> np.ndarray:
    """What ``rank`` holds of a parameter: its rows of every section, one after the other, cast to ``dtype``."""
    out = np.zeros(layout.local_shape, dtype)
    for piece in pieces(layout, rank):
        out[piece.index] = read(*piece[:5]).astype(dtype)
    return out


def device_ranks(mesh: Mesh) -> dict[jax.Device, int]:
    """Index along the tensor axis of each device of the mesh."""
    if TENSOR not in mesh.axis_names:
        return {d: 0 for d in mesh.devices.flat}
    along = mesh.axis_names.index(TENSOR)
    return {mesh.devices[i]: i[along] for i in np.ndindex(mesh.devices.shape)}


class Described(Protocol):
    """A parameter: how it is cut, and its dtype."""

    @property
    def layout(self) -> Layout: ...

    @property
    def dtype(self) -> Any: ...


def planned_bytes(parameters: Iterable[Described], mesh: Mesh) -> int:
    """Bytes that this process fills when it assembles ``parameters``: each rank's share once."""
    total = 0
    for p in parameters:
        share = math.prod(p.layout.local_shape) * jnp.dtype(p.dtype).itemsize
        total += share * len(_devices_by_rank(p.layout, mesh))
    return total


def assemble(
    parameters: Sequence[Described], mesh: Mesh, read: Reader, done: Callable[[int], None] = lambda filled: None
) -> tuple[jax.Array, ...]:
    """Parameters over ``mesh``: every rank's rows are read once, for all of this process's devices of that rank.

    No collective runs and nothing is compiled. A :class:`BulkReader` is read on several threads, READ_AHEAD bytes
    ahead of the device; the host holds those and the shares of one more parameter.

    Args:
      parameters: what to assemble.
      read: where values come from.
      done: called with the number of bytes filled, from this thread.
    """
    if isinstance(read, BulkReader):
        return tuple(_in_bulk(parameters, mesh, read, done))
    return tuple(_one_by_one(p.layout, jnp.dtype(p.dtype), mesh, read, done) for p in parameters)


def _devices_by_rank(layout: Layout, mesh: Mesh) -> dict[int, list[jax.Device]]:
    """This process's devices, by the rank whose rows they hold."""
    ranks = device_ranks(mesh)
    by_rank: dict[int, list[jax.Device]] = {}
    for device in NamedSharding(mesh, layout.spec).addressable_devices:
        by_rank.setdefault(0 if layout.replicated else ranks[device], []).append(device)
    return dict(sorted(by_rank.items()))


def _place(layout: Layout, mesh: Mesh, values: dict[int, Any], by_rank: dict[int, list[jax.Device]]) -> jax.Array:
    """The global array of the ranks' shares. On CPU devices an aligned NumPy share becomes the array without a copy."""
    arrays = [jax.device_put(values[r], device) for r, devices in by_rank.items() for device in devices]
    return jax.make_array_from_single_device_arrays(layout.global_shape, NamedSharding(mesh, layout.spec), arrays)


def _one_by_one(layout: Layout, dtype: Any, mesh: Mesh, read: Reader, done: Callable[[int], None]) -> jax.Array:
    by_rank, values = _devices_by_rank(layout, mesh), {}
    for r in by_rank:
        values[r] = local_values(layout, r, read, dtype)
        done(values[r].nbytes)
    return _place(layout, mesh, values, by_rank)


@dataclasses.dataclass
class _Filling:
    """A parameter whose shares are being read."""

    layout: Layout
    by_rank: dict[int, list[jax.Device]]
    shares: dict[int, np.ndarray]
    bytes: int
    tasks: list[Future] = dataclasses.field(default_factory=list)


def _in_bulk(
    parameters: Sequence[Described], mesh: Mesh, read: BulkReader, done: Callable[[int], None]
) -> Iterator[jax.Array]:
    with ThreadPoolExecutor(THREADS, "read-weights") as pool:
        filling: deque[_Filling] = deque()
        batch = _Batch(pool)
        try:
            for p in parameters:
                dtype, layout = jnp.dtype(p.dtype), p.layout
                by_rank = _devices_by_rank(layout, mesh)
                size = len(by_rank) * math.prod(layout.local_shape) * dtype.itemsize
                while filling and size + sum(f.bytes for f in filling) > READ_AHEAD:
                    batch.submit()
                    yield _finish(filling.popleft(), mesh, done)
                filling.append(
                    _Filling(layout, by_rank, {r: aligned(layout.local_shape, dtype) for r in by_rank}, size)
                )
                for name, dim, cuts in _cuts(filling[-1]):
                    for amount, job in read.jobs(name, dim, cuts):
                        batch.add(filling[-1], amount, job)
            batch.submit()
            while filling:
                yield _finish(filling.popleft(), mesh, done)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Batch:
    """Gathers small jobs, also of several parameters, so that handing them to a thread costs little each."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.jobs: list[Callable[[], None]] = []
        self.fillings: list[_Filling] = []
        self.bytes = 0

    def add(self, filling: _Filling, amount: int, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        if not self.fillings or self.fillings[-1] is not filling:
            self.fillings.append(filling)
        self.bytes += amount
        if self.bytes >= SUBMITTED:
            self.submit()

    def submit(self) -> None:
        if self.jobs:
            task = self.pool.submit(_run, self.jobs)
            for filling in self.fillings:
                filling.tasks.append(task)
        self.jobs, self.fillings, self.bytes = [], [], 0


def _run(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _finish(filling: _Filling, mesh: Mesh, done: Callable[[int], None]) -> jax.Array:
    for task in filling.tasks:
        task.result()
    array = _place(filling.layout, mesh, filling.shares, filling.by_rank)
    array.block_until_ready()  # a transfer that still runs would hold the share's memory beyond READ_AHEAD
    done(filling.bytes)
    return array


def _cuts(filling: _Filling) -> Iterator[tuple[str, int, list[Cut]]]:
    """Each tensor once, with the cuts of all ranks of this process: a row that several want columns of is read once."""
    if not filling.by_rank:
        return
    layout = filling.layout
    by_tensor: dict[tuple[str, int], list[Cut]] = {}
    for r, share in filling.shares.items():
        if (
            sum(stop - start for start, stop in (s.rows(r, layout.ranks) for s in layout.sections))
            < layout.local_shape[layout.dim]
        ):
            share[...] = 0
        for piece in pieces(layout, r):
            cut = Cut(piece.start, piece.stop, share[piece.index])
            by_tensor.setdefault((piece.tensor, piece.dim), []).append(cut)
    for (name, dim), cuts in by_tensor.items():
        yield name, dim, cuts


def aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Uninitialised memory that starts at a multiple of 64 bytes: a CPU device takes it as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
