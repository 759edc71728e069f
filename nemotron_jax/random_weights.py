"""Random values for a model without a checkpoint: tests, benchmarks, sharding experiments.

They depend on the seed, the tensor's name and the place in it alone. Projections are normal with variance 1 / fan_in;
A_log, dt_bias, D, norms and router biases get values that trained models have. Small parameters are drawn on the host.
Large ones are drawn where they lie, all ranks' rows at once in a program that parameters of the same shapes share.
There the rows of a tensor are drawn along the dimension that is cut: models that cut along the same dimensions are the
same model at every degree.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax.parameters import Described, Reader, assemble, planned_bytes, section_shapes, stacked
from nemotron_jax.sharding import TENSOR, Layout

# Parameters up to this many elements are drawn on the host: compiling a program for them costs more.
SMALL = 1 << 22
UNIFORM = ("A_log", "dt_bias")


def random_weights(
    parameters: Sequence[Described], mesh: Mesh, seed: int, done: Callable[[int], None] = lambda filled: None
) -> tuple[jax.Array, ...]:
    """Parameters over ``mesh``, as `parameters.assemble` makes them from a reader.

    Args:
      parameters: what to fill.
      seed: of all values.
      done: called with the number of bytes filled.
    """
    arrays, read = [], random_reader(seed)
    for p in parameters:
        if sum(map(math.prod, section_shapes(p.layout).values())) <= SMALL:
            arrays += assemble((p,), mesh, read, done)
        else:
            arrays.append(_draw(p.layout, jnp.dtype(p.dtype), mesh, seed))
            done(planned_bytes((p,), mesh))
    return tuple(arrays)


def random_reader(seed: int) -> Reader:
    """Random values as a :class:`~nemotron_jax.parameters.Reader`, drawn on the host a whole tensor at a time."""

    def read(tensor: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> np.ndarray:
        generator = np.random.default_rng((seed, _number(tensor)))
        draw = generator.random if _kind(tensor) in UNIFORM else generator.standard_normal
        values = _scaled(draw(shape, np.float32), _kind(tensor), _fan_in(shape), np)
        return values[(slice(None),) * dim + (slice(start, stop),)]

    return read


def _number(tensor: str) -> int:
    return zlib.crc32(tensor.encode()) & 0x7FFFFFFF


def _fan_in(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _kind(tensor: str) -> str:
    """Which range of values a tensor has in trained models."""
    owner, leaf = tensor.rsplit(".", 2)[-2:]
    if leaf in ("A_log", "dt_bias"):
        return leaf
    if leaf == "D" or owner in ("norm", "norm_f", "enorm", "hnorm", "final_layernorm"):
        return "scale"
    if leaf in ("bias", "e_score_correction_bias"):
        return "bias"
    return "embedding" if owner == "embeddings" else "projection"


def _scaled(values, kind, fan_in, xp):
    if kind == "A_log":  # A in [-16, -1]
        return xp.log(1.0 + 15.0 * values)
    if kind == "dt_bias":  # softplus(dt_bias) log-uniform in [1e-3, 0.1]
        dt = xp.exp(math.log(1e-3) + values * math.log(100.0))
        return dt + xp.log(-xp.expm1(-dt))
    if kind == "scale":
        return 1.0 + 0.1 * values
    return values * {"bias": 0.1, "embedding": 0.5, "projection": fan_in**-0.5}[kind]


class _Section(NamedTuple):
    """What the program of a section depends on: `rows` rows along `dim` of tensors of the shape `others` without it."""

    kind: str
    fan_in: int
    rows: int
    others: tuple[int, ...]
    dim: int
    stacked: bool


class _Places(NamedTuple):
    """Of each rank's tensors in a section, [ranks, tensors] each: rows from `stop` on are zero."""

    name: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def _draw(layout: Layout, dtype: jnp.dtype, mesh: Mesh, seed: int) -> jax.Array:
    shapes, ranks = section_shapes(layout), 1 if layout.replicated else layout.ranks
    sections, places = [], []
    for s in layout.sections:
        whole, rows = shapes[s.tensor], [s.rows(r, layout.ranks) for r in range(ranks)]
        if not stacked(s):
            shape, dim, width = whole, layout.dim, s.width()
            tensors = [[(_number(s.tensor), *own)] for own in rows]
        elif layout.dim == 0:  # whole tensors
            shape, dim, width = whole[1:], 0, whole[1]
            tensors = [
                [(_number(s.tensor.format(i)), 0, width if i < stop else 0) for i in range(start, start + s.width())]
                for start, stop in rows
            ]
        else:  # a part of each
            shape, dim, width = whole[1:], layout.dim - 1, s.width()
            tensors = [[(_number(s.tensor.format(i)), *own) for i in range(whole[0])] for own in rows]
        others = (*shape[:dim], *shape[dim + 1 :])
        sections.append(_Section(_kind(s.tensor), _fan_in(shape), width, others, dim, stacked(s)))
        places.append(_Places(*np.moveaxis(np.array(tensors, np.int32), -1, 0)))
    program = _program(tuple(sections), layout.dim, dtype, mesh, layout.spec)

    def everywhere(x):  # also where other processes have a part of the mesh
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), x.__getitem__)

    return program(everywhere(np.array(seed & 0xFFFFFFFF, np.uint32)), jax.tree.map(everywhere, places))


@functools.cache
def _program(sections: tuple[_Section, ...], dim: int, dtype: jnp.dtype, mesh: Mesh, spec: P) -> Callable[..., Any]:
    def tensor(key, section, name, start, stop):
        draw = jax.random.uniform if section.kind in UNIFORM else jax.random.normal
        key, row = jax.random.fold_in(key, name), start + jnp.arange(section.rows)
        values = jax.vmap(lambda i: draw(jax.random.fold_in(key, i), section.others))(row)
        values = _scaled(values, section.kind, section.fan_in, jnp)
        values = jnp.where((row < stop).reshape(-1, *[1] * len(section.others)), values, 0)
        return jnp.moveaxis(values, 0, section.dim).astype(dtype)

    def of_rank(seed, places):
        rank = lax.axis_index(TENSOR) if TENSOR in spec else 0
        parts = []
        for section, place in zip(sections, places, strict=True):
            # One tensor at a time: float32 values of a whole stack of experts would not fit.
            one = functools.partial(tensor, jax.random.key(seed), section)
            values = lax.map(lambda own, one=one: one(*own), jax.tree.map(lambda x: x[rank], tuple(place)))
            parts.append(values if section.stacked else values[0])
        return jnp.concatenate(parts, axis=dim)

    return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=(P(), P()), out_specs=spec, check_vma=False))
