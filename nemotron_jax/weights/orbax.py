"""Orbax checkpoints: one plain array per section, independent of any mesh.

``in_proj`` is stored as z, x, B, C and dt, ``conv1d`` as x, B and C, all experts of a block as one array with the
expert first, everything else as the checkpoint has it. Repeated groups and heads, zero rows and the packing of a rank
are not stored: each array can be restored with any NamedSharding, by Orbax itself too. ``nemotron_jax.json`` beside
the arrays says which checkpoint tensors they are, so that the way back to Hugging Face layout loses nothing.
"""

import asyncio
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src.serialization import tensorstore_utils  # what its own handlers use has no public name

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.parameters import THREADS, Cut
from nemotron_jax.weights.companions import MANIFEST
from nemotron_jax.weights.source import DTYPE_NAMES, DTYPES, Source, Tensor, listed

logger = logging.getLogger("nemotron_jax")

FORMAT, VERSION = "nemotron-jax-orbax", 1
ARRAYS = "arrays"  # the folder that Orbax writes
CHUNK = 16 << 20  # largest bytes of a piece that is stored, and read, as a whole
CUTS = 8  # chunks end where a cut of a dimension into so many parts does, where the size allows
IN_FLIGHT = 256 << 20  # bytes of host memory for pieces on their way to the files
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_LAYER = re.compile(r"(mtp\.)?layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One stored array.

    Attributes:
      tensor: the checkpoint tensor that it is rows of; with ``{}`` for the index of a stack.
      dtype, shape: of the array.
      start: first row in the tensor.
      stack: number of tensors stacked along the first dimension; 0: none.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stack: int = 0


def stored_arrays(config: NemotronHConfig, tensors: dict[str, Tensor]) -> dict[str, Stored]:
    """How checkpoint tensors are stored: {array name: Stored}. Names are canonical, with the section's at the end."""
    arrays: dict[str, Stored] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, t in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}{{}}{match[3]}", {})[int(match[2])] = t
            continue
        start = 0
        for section, rows in sections_of(config, name, t):
            arrays[f"{name}.{section}" if section else name] = Stored(name, t.dtype, (rows, *t.shape[1:]), start)
            start += rows
    for name, of in experts.items():
        kinds = {(t.dtype, t.shape) for t in of.values()}
        if sorted(of) != list(range(len(of))) or len(kinds) > 1:
            raise ValueError(
                f"tensors {name}: experts {min(of)} to {max(of)}, of {len(kinds)} kinds; accepted: all of one kind"
            )
        dtype, shape = kinds.pop()
        arrays[name.replace(".{}", "")] = Stored(name, dtype, (len(of), *shape), stack=len(of))
    return arrays


def sections_of(config: NemotronHConfig, name: str, tensor: Tensor) -> list[tuple[str, int]]:
    """(section name, rows) of a tensor, in order; one section without a name where nothing is to be cut apart."""
    layer = _LAYER.match(name)
    if layer and int(layer[2]) < (config.num_mtp_layers if layer[1] else config.num_hidden_layers):
        c = config.mtp_layer(int(layer[2])) if layer[1] else config.layer(int(layer[2]))
        groups = c.n_groups * c.ssm_state_size
        if ".mixer.in_proj." in name:
            rows = [("z", c.inner_size), ("x", c.inner_size), ("B", groups), ("C", groups), ("dt", c.mamba_num_heads)]
            return _checked(rows, name, tensor)
        if ".mixer.conv1d." in name:
            return _checked([("x", c.inner_size), ("B", groups), ("C", groups)], name, tensor)
    return [("", tensor.shape[0] if tensor.shape else 1)]


def _checked(rows: list[tuple[str, int]], name: str, tensor: Tensor) -> list[tuple[str, int]]:
    total = sum(n for _, n in rows)
    if not tensor.shape or tensor.shape[0] != total:
        raise ValueError(
            f"{name} has shape {tensor.shape}, accepted {total} rows: " + ", ".join(f"{s} {n}" for s, n in rows)
        )
    return rows


def chunk_shape(stored: Stored) -> tuple[int, ...]:
    """Shape of the pieces that an array is stored in.

    They are of one expert, have at most CHUNK bytes, and where they are large a cut of a dimension over 2, 4 or 8
    ranks cuts none.
    """
    chunk, itemsize = list(stored.shape), DTYPES[stored.dtype].itemsize
    if stored.stack:
        chunk[0] = 1
    if math.prod(chunk) * itemsize > CHUNK // CUTS:
        for i in range(1 if stored.stack else 0, len(chunk)):
            chunk[i] //= next(n for n in (CUTS, 4, 2, 1) if chunk[i] % n == 0)
    while math.prod(chunk) * itemsize > CHUNK:
        i = max(range(len(chunk)), key=lambda i: chunk[i])
        chunk[i] = -(-chunk[i] // 2)
    return tuple(max(1, n) for n in chunk)


# ------------------------------------------------------------------------------------------------- writing
class _Streamed:
    """A leaf of the tree that Orbax saves, whose values are read while it is written."""

    def __init__(self, stored: Stored, source: Source):
        self.stored, self.source = stored, source
        self.shape, self.dtype = stored.shape, DTYPES[stored.dtype]
        self.size, self.ndim = math.prod(self.shape), len(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.chunk = chunk_shape(stored)

    def __deepcopy__(self, memo):  # Orbax copies arrays before it writes them; there is nothing here yet
        return self

    def rows(self, lo: int, hi: int) -> np.ndarray:
        if not self.stored.stack:
            return self.source.rows(self.stored.tensor, self.stored.start + lo, self.stored.start + hi)
        out = np.empty((hi - lo, *self.shape[1:]), self.dtype)
        for i in range(lo, hi):
            name = self.stored.tensor.format(i)
            for _, job in self.source.jobs(name, 0, [Cut(0, self.shape[1], out[i - lo])]):
                job()
        return out


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes :class:`_Streamed` leaves as Orbax writes NumPy arrays, piece by piece."""

    def __init__(self, done: Callable[[int], None]):
        super().__init__()
        self.done = done
        self.pool = ThreadPoolExecutor(THREADS, "write-weights")
        self.free = IN_FLIGHT
        self.waiting: list[asyncio.Event] = []
        self.error: Exception | None = None

    async def _background_serialize(self, values, infos, args=None) -> None:
        """As NumPyHandler's, which writes in process 0 alone: here whichever process saves does."""
        writes = []
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            shape = {"global_shape": value.shape, "local_shape": value.shape, "dtype": value.dtype}
            spec = tensorstore_utils.build_array_write_spec(info, **shape, use_ocdbt=True, process_index=0)
            writes.append(self._open_and_write(value, spec.json, info.ts_context))
        await asyncio.gather(*writes)

    async def _open_and_write(self, value: _Streamed, tspec: dict[str, Any], ts_context: ts.Context) -> None:
        tspec["metadata"]["chunks"] = list(value.chunk)
        row = value.nbytes // max(1, value.shape[0])
        step = value.chunk[0] * max(1, CHUNK // max(1, value.chunk[0] * row))
        try:
            store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            pieces = [(lo, min(lo + step, value.shape[0])) for lo in range(0, value.shape[0], step)]
            await asyncio.gather(*(self._write(store, value, lo, hi, row) for lo, hi in pieces))
        except Exception as error:  # raised when Orbax is done: raising here would leave its other tasks behind
            self.error = self.error or error

    async def _write(self, store: ts.TensorStore, value: _Streamed, lo: int, hi: int, row: int) -> None:
        size = min((hi - lo) * row, IN_FLIGHT)
        while self.free < size:
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()
        self.free -= size
        try:
            if self.error is None:
                block = await asyncio.get_running_loop().run_in_executor(self.pool, value.rows, lo, hi)
                await store[lo:hi].write(block, can_reference_source_data_indefinitely=True)
                self.done(block.nbytes)
        except Exception as error:
            self.error = self.error or error
        finally:
            self.free += size
            waiting, self.waiting = self.waiting, []
            for event in waiting:
                event.set()


def write_arrays(folder: Path, source: Source, config: NemotronHConfig, done: Callable[[int], None]) -> None:
    """Write the tensors of ``source`` and the manifest into ``folder``.

    Host memory stays below about three times IN_FLIGHT (256 MiB; the pieces, and their copies on the way to the disk),
    however large the arrays are.
    """
    arrays = stored_arrays(config, source.tensors)
    tree: dict[str, Any] = {}
    for name, stored in arrays.items():
        *path, leaf = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = _Streamed(stored, source)
    handler = _Handler(done)
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Streamed, handler),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # no leaf is one; Orbax warns where there is no handler for them
    )
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})  # no other takes part
    options = {"use_ocdbt": True, "use_zarr3": False, "use_compression": False}  # weights do not compress
    options |= {"type_handler_registry": registry, "multiprocessing_options": alone}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options), multiprocessing_options=alone) as checkpointer:
            checkpointer.save(folder.absolute() / ARRAYS, args=ocp.args.PyTreeSave(item=tree))
    except Exception as error:
        raise handler.error or error from error
    finally:
        handler.pool.shutdown()
    if handler.error is not None:
        raise handler.error
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "layers": config.hybrid_override_pattern,
        "tensors": {name: [t.name, t.dtype, t.shape, t.file] for name, t in source.tensors.items()},
        "arrays": {name: [s.tensor, s.dtype, s.shape, s.start, s.stack] for name, s in arrays.items()},
        "metadata": getattr(source, "metadata", {}),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


# ------------------------------------------------------------------------------------------------- reading
def is_orbax(folder: Path) -> bool:
    """Whether a folder is one that :func:`write_arrays` wrote."""
    return (folder / MANIFEST).is_file()


class OrbaxCheckpoint(Source):
    """The tensors of a converted folder, put together from the stored arrays."""

    def __init__(self, folder: str | Path, config: NemotronHConfig):
        """Open every array, read none.

        Raises:
          ValueError: if the manifest is damaged or of another version, or if arrays are missing, unknown, or of
            another shape or dtype than the manifest and ``config`` say; all faults are listed.
        """
        self.folder = Path(folder)
        self.where = f"checkpoint {self.folder}"
        manifest = _manifest(self.folder)
        try:
            self.tensors = {k: Tensor(n, d, tuple(s), f) for k, (n, d, s, f) in manifest["tensors"].items()}
            arrays = {k: Stored(t, d, tuple(s), start, n) for k, (t, d, s, start, n) in manifest["arrays"].items()}
            self.metadata = dict(manifest["metadata"])
            pattern = manifest["layers"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self.folder / MANIFEST} is damaged: {error!r}") from error
        faults = []
        if pattern != config.hybrid_override_pattern:
            faults.append(f"layers of its arrays are {pattern}, of its config {config.hybrid_override_pattern}")
        else:
            faults += _differences(stored_arrays(config, self.tensors), arrays)
        self._stores, found = _open(self.folder / ARRAYS, arrays, faults)
        faults += [f"unknown array {name}" for name in sorted(found - set(arrays))]
        if faults:
            raise ValueError(f"{self.where}: {listed(faults)}")
        self._parts: dict[str, list[tuple[str, Stored]]] = {}
        for name, stored in arrays.items():
            self._parts.setdefault(stored.tensor, []).append((name, stored))

    def read_block(self, name: str, dim: int, lo: int, hi: int, cuts: Sequence[Cut]) -> None:
        for array, stored, prefix in self._arrays_of(name):
            stored_shape = stored.shape[1:] if stored.stack else stored.shape
            a, b = max(lo, stored.start), min(hi, stored.start + stored_shape[0])
            if a >= b:
                continue
            rows = (*prefix, slice(a - stored.start, b - stored.start))
            for cut in cuts:
                if dim == 0:
                    out, index = cut.out[a - cut.start : b - cut.start], rows
                else:
                    out = cut.out[a:b]
                    index = (*rows, *[slice(None)] * (dim - 1), slice(cut.start, cut.stop))
                try:
                    out[...] = self._stores[array][index].read().result()
                except (ValueError, OSError) as error:
                    raise ValueError(f"{self.where}: array {array} cannot be read: {error}") from error

    def _arrays_of(self, name: str) -> Iterator[tuple[str, Stored, tuple[int, ...]]]:
        if match := _EXPERT.fullmatch(name):
            for array, stored in self._parts.get(f"{match[1]}{{}}{match[3]}", ()):
                yield array, stored, (int(match[2]),)
        for array, stored in self._parts.get(name, ()):
            yield array, stored, ()


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        kind, version = manifest["format"], manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be read: {error!r}") from error
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{folder / MANIFEST}: found format {kind!r} version {version!r}, accepted {FORMAT!r} version {VERSION}"
        )
    return manifest


def _differences(expected: dict[str, Stored], found: dict[str, Stored]) -> list[str]:
    faults = [f"missing array {name}" for name in expected if name not in found]
    faults += [f"unknown array {name}" for name in found if name not in expected]
    for name, stored in expected.items():
        if name in found and found[name] != stored:
            faults.append(f"array {name}: the manifest says {found[name]}, its config needs {stored}")
    return faults


def _open(folder: Path, arrays: dict[str, Stored], faults: list[str]) -> tuple[dict[str, ts.TensorStore], set[str]]:
    """Handles of the arrays, and the names of all arrays that are there."""
    base = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{folder.absolute()}/"},
        "cache_pool": "cache_pool#ocdbt",
    }
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
    try:
        keys = ts.KvStore.open(base, context=context).result().list().result()
    except (ValueError, OSError) as error:
        faults.append(f"{folder} cannot be read: {error}")
        return {}, set()
    found: dict[str, int] = {}
    for key in keys:
        name, _, item = key.decode().rpartition("/")
        found[name] = found.get(name, 0) + (item != ".zarray")
    if not found:
        faults.append(f"{folder} holds no arrays")
        return {}, set()
    opened = {
        name: ts.open(
            {
                "driver": "zarr",
                "kvstore": {**base, "path": f"{name}/"},
                "fill_missing_data_reads": False,
                "recheck_cached_data": False,
            },
            context=context,
            open=True,
            read=True,
        )
        for name in arrays
        if name in found
    }
    stores: dict[str, ts.TensorStore] = {}
    for name, stored in arrays.items():
        if name not in opened:
            faults.append(f"missing array {name}")
            continue
        try:
            store = stores[name] = opened[name].result()
        except (ValueError, OSError) as error:
            faults.append(f"array {name} cannot be read: {error}")
            continue
        dtype = DTYPE_NAMES.get(np.dtype(store.dtype.numpy_dtype), str(store.dtype))
        chunk: Any = store.chunk_layout.read_chunk.shape
        if (dtype, tuple(store.shape)) != (stored.dtype, stored.shape):
            faults.append(f"array {name} is {dtype} {tuple(store.shape)}, accepted {stored.dtype} {stored.shape}")
        elif found[name] != (whole := math.prod(-(-n // c) for n, c in zip(store.shape, chunk, strict=True))):
            faults.append(f"array {name} has {found[name]} of its {whole} pieces")
    return stores, set(found)
