"""From rows of named tensors to sharded arrays: each device gets only what its rank holds. Also random values, equal at every degree."""

import math
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nemotron_jax.sharding import TENSOR, Layout


class Reader(Protocol):
    """Where parameter values come from."""

    def __call__(self, tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Any:
        """Rows [start, stop) along ``dim`` of the tensor called ``tensor``, whose whole shape is ``shape``. NumPy or jax array."""
        ...


def local_values(layout: Layout, rank: int, read: Reader, dtype: Any) -> Any:
    """What ``rank`` holds of a parameter: its rows of every section, one after the other, cast to ``dtype``."""
    dtype = jnp.dtype(dtype)
    parts = []
    for s in layout.sections:
        start, stop = s.rows(rank, layout.ranks)
        if stop > start:
            parts.append(_read_section(layout, s, start, stop, read, dtype))
        if missing := s.width() - (stop - start):
            shape = (*layout.shape[: layout.dim], missing, *layout.shape[layout.dim + 1 :])
            parts.append(np.zeros(shape, dtype))
    if len(parts) == 1:
        return parts[0]
    stack = jnp if any(isinstance(p, jax.Array) for p in parts) else np
    return stack.concatenate(parts, axis=layout.dim)


def _read_section(layout: Layout, s, start: int, stop: int, read: Reader, dtype) -> Any:
    shapes = dict(layout.tensors())
    if "{}" not in s.tensor:
        return read(s.tensor, shapes[s.tensor], layout.dim, start, stop).astype(dtype)
    indices = range(start, stop) if layout.dim == 0 else range(layout.shape[0])
    pieces = []
    for i in indices:
        name = s.tensor.format(i)
        bounds = (0, 0, shapes[name][0]) if layout.dim == 0 else (layout.dim - 1, start, stop)
        pieces.append(read(name, shapes[name], *bounds).astype(dtype))
    return (jnp if isinstance(pieces[0], jax.Array) else np).stack(pieces)


def device_ranks(mesh: Mesh) -> dict[jax.Device, int]:
    """Index along the tensor axis of each device of the mesh."""
    if TENSOR not in mesh.axis_names:
        return {d: 0 for d in mesh.devices.flat}
    along = mesh.axis_names.index(TENSOR)
    return {mesh.devices[i]: i[along] for i in np.ndindex(mesh.devices.shape)}


def assemble(layout: Layout, dtype: Any, mesh: Mesh, read: Reader, done: Callable[[int], None] = lambda bytes_read: None) -> jax.Array:
    """A parameter over ``mesh``: every rank's rows are read once and placed on each of this process's devices of that rank.

    No collective runs; host memory holds one rank's share of one parameter at a time.
    """
    sharding = NamedSharding(mesh, layout.spec)
    ranks = device_ranks(mesh)
    by_rank: dict[int, list[jax.Device]] = {}
    for device in sharding.addressable_devices:
        by_rank.setdefault(0 if layout.replicated else ranks[device], []).append(device)
    arrays = {}
    for r, devices in sorted(by_rank.items()):
        with jax.default_device(devices[0]):
            values = local_values(layout, r, read, dtype)
        done(values.nbytes)
        for device in devices:
            arrays[device] = jax.device_put(values, device)
    return jax.make_array_from_single_device_arrays(
        layout.global_shape, sharding, [arrays[d] for d in sharding.addressable_devices]
    )


def random_reader(seed: int) -> Reader:
    """Random values as a :class:`Reader`: row i of a tensor depends on the seed, its name and i alone, so every cut sees the same model.

    Projections are normal with variance 1 / fan_in; A_log, dt_bias, D, norms and router biases get values that trained models have.
    Values are made on the device that holds them.
    """

    def read(tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(tensor.encode()) & 0x7FFFFFFF)
        others = tuple(n for i, n in enumerate(shape) if i != dim)
        fan_in = shape[-1] if len(shape) > 1 else 1
        return _random_rows(key, tensor.rsplit(".", 2)[-2:], others, dim, fan_in, start, stop - start)

    return read


def _random_rows(key, leaf, others, dim, fan_in, start, rows):
    values = _rows_kernel(key, start, rows=rows, others=others, uniform=leaf[-1] in ("A_log", "dt_bias"))
    if leaf[-1] == "A_log":  # A in [-16, -1]
        values = jnp.log(1.0 + 15.0 * values)
    elif leaf[-1] == "dt_bias":  # softplus(dt_bias) log-uniform in [1e-3, 0.1]
        dt = jnp.exp(math.log(1e-3) + values * math.log(100.0))
        values = dt + jnp.log(-jnp.expm1(-dt))
    elif leaf[-1] == "D" or leaf[0] in ("norm", "norm_f", "enorm", "hnorm", "final_layernorm"):
        values = 1.0 + 0.1 * values
    elif leaf[-1] in ("bias", "e_score_correction_bias"):
        values = 0.1 * values
    elif leaf[0] == "embeddings":
        values = 0.5 * values
    else:
        values = values / math.sqrt(fan_in)
    return jnp.moveaxis(values, 0, dim)


def _rows(key, start, *, rows, others, uniform):
    draw = jax.random.uniform if uniform else jax.random.normal
    return jax.vmap(lambda i: draw(jax.random.fold_in(key, i), others))(start + jnp.arange(rows))


_rows_kernel = jax.jit(_rows, static_argnames=("rows", "others", "uniform"))
