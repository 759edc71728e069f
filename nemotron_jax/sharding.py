"""Mesh and axis names, the logical-axis table, how a parameter is cut over the tensor axis, and the model's small
collectives.

A projection of this family mixes sections that must be cut one by one (``in_proj`` holds z, x, B, C and dt; ``conv1d``
holds x, B and C; q, k and v are separate tensors that run as one product). A :class:`Layout` says which rows of which
checkpoint tensor each rank of the tensor axis holds. Everything that touches weights (import, export, random values,
checks) reads it.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nemotron_jax.config import NemotronHConfig

DATA, TENSOR = "data", "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis as a block sees it: its name and size. Size 1 means that nothing is ever sent over it."""

    name: str = TENSOR
    size: int = 1


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis (``"tensor"``), or None for a dimension that every rank holds whole.

    One table, so that a sharding experiment is ``dataclasses.replace(rules, q_heads=None, kv_heads=None)``.

    Attributes:
      vocab: rows of the embedding and of the head.
      q_heads, kv_heads: attention heads; they are cut together or not at all. KV heads repeat where there are too few.
      mamba_heads, mamba_groups: Mamba-2 heads and B/C groups; cut together. Groups repeat where there are too few.
      mlp: width of the dense MLP and of the shared expert.
      experts: whole experts per rank.
      expert_mlp: a slice of every expert per rank. At most one of ``experts`` and ``expert_mlp`` is cut.
    """

    vocab: str | None = TENSOR
    q_heads: str | None = TENSOR
    kv_heads: str | None = TENSOR
    mamba_heads: str | None = TENSOR
    mamba_groups: str | None = TENSOR
    mlp: str | None = TENSOR
    experts: str | None = None
    expert_mlp: str | None = TENSOR

    def __post_init__(self):
        faults = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == "none":
                object.__setattr__(self, field.name, None)
            elif value not in (None, TENSOR):
                faults.append(f"{field.name}: found {value!r}, accepted {TENSOR!r} or 'none'")
        for a, b in (("q_heads", "kv_heads"), ("mamba_heads", "mamba_groups")):
            if getattr(self, a) != getattr(self, b):
                faults.append(f"{a} and {b} are cut together: found {getattr(self, a)!r} and {getattr(self, b)!r}")
        if self.experts and self.expert_mlp:
            faults.append("experts and expert_mlp: at most one is cut (whole experts per rank, or a slice of each)")
        if faults:
            raise ValueError("sharding rules: " + "; ".join(faults))

    @classmethod
    def from_dict(cls, overrides: dict[str, str | None]) -> "ShardingRules":
        """The default table with ``overrides``; asking for ``experts`` turns ``expert_mlp`` off unless it is named."""
        names = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(overrides) - set(names))
        if unknown:
            raise ValueError(f"sharding rules: unknown logical axes {unknown}, known are {names}")
        if overrides.get("experts") == TENSOR and "expert_mlp" not in overrides:
            overrides = {**overrides, "expert_mlp": None}
        return cls(**overrides)

    def cuts(self, kind: str) -> bool:
        """Whether a block of ``kind`` ("M", "*", "-", "E") leaves a partial sum on each rank."""
        if kind == "E":
            return bool(self.experts or self.expert_mlp or self.mlp)
        return bool({"M": self.mamba_heads, "*": self.q_heads, "-": self.mlp}[kind])


def make_mesh(tensor: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A ``data`` x ``tensor`` mesh over the first ``data * tensor`` devices, in row-major order (the order that Mosaic
    GPU needs)."""
    devices = list(jax.devices() if devices is None else devices)
    if tensor < 1 or data < 1 or tensor * data > len(devices):
        raise ValueError(f"mesh data={data} x tensor={tensor} needs {data * tensor} devices, found {len(devices)}")
    chosen = devices[: data * tensor]
    idle = {d.process_index for d in devices} - {d.process_index for d in chosen}
    if idle and jax.process_count() > 1:
        raise ValueError(
            f"mesh data={data} x tensor={tensor} leaves processes {sorted(idle)} without a device; accepted a mesh in "
            f"which every process has a part of the {len(devices)} devices"
        )
    grid = np.array(chosen, dtype=object).reshape(data, tensor)
    return Mesh(grid, (DATA, TENSOR))


def axis_size(mesh: Mesh, name: str) -> int:
    return mesh.shape.get(name, 1)


def check_degree(config: NemotronHConfig, tensor: int, rules: ShardingRules, mtp: bool = False) -> None:
    """Refuse a tensor-parallel degree that the model cannot be cut by; say which ones work.

    Only dimensions of block kinds that are present count, those of the MTP layers only with ``mtp``.

    Raises:
      ValueError: naming each dimension, both numbers, and the degrees up to 64 that work.
    """
    faults = _degree_faults(config, tensor, rules, mtp)
    if faults:
        works = [n for n in range(1, 65) if not _degree_faults(config, n, rules, mtp)]
        raise ValueError(
            f"tensor parallel degree {tensor} does not fit this model: {'; '.join(faults)}. Degrees that work: {works}"
        )


def _degree_faults(config: NemotronHConfig, n: int, rules: ShardingRules, mtp: bool) -> list[str]:
    faults = []

    def divides(name: str, size: int) -> None:
        if size % n:
            faults.append(f"{name} = {size} is not a multiple of {n}")

    def divides_or_repeats(name: str, size: int) -> None:
        if size % n and n % size:
            faults.append(f"{name} = {size} neither divides {n} nor is a multiple of it")

    layers = [(kind, config.layer(i)) for i, kind in enumerate(config.hybrid_override_pattern)]
    if mtp:
        pattern = config.mtp_hybrid_override_pattern
        layers += [(pattern[i % len(pattern)], config.mtp_layer(i)) for i in range(config.num_mtp_layers)]
    for kind, layer in dict.fromkeys(layers):
        if kind == "M" and rules.mamba_heads:
            divides("mamba_num_heads", layer.mamba_num_heads)
            divides_or_repeats("n_groups", layer.n_groups)
        elif kind == "*" and rules.q_heads:
            divides("num_attention_heads", layer.num_attention_heads)
            divides_or_repeats("num_key_value_heads", layer.num_key_value_heads)
        elif kind == "-" and rules.mlp:
            divides("intermediate_size", layer.intermediate_size)
        elif kind == "E":
            if rules.mlp:
                divides("moe_shared_expert_intermediate_size", layer.moe_shared_expert_intermediate_size)
            if rules.experts:
                divides("n_routed_experts", layer.n_routed_experts)
            if rules.expert_mlp:
                divides("moe_intermediate_size", layer.moe_intermediate_size)
    return list(dict.fromkeys(faults))


@dataclasses.dataclass(frozen=True)
class Section:
    """A run of rows of one checkpoint tensor, and how it is cut over the tensor axis.

    Attributes:
      tensor: canonical tensor name (no file prefix); ``{}`` is the index of a stacked tensor (an expert).
      size: rows of the section along the layout's cut dimension.
      start: first row in the checkpoint tensor.
      parts: number of distinct parts. The axis size: an ordinary cut. Fewer: each part repeats on neighbouring ranks.
        1: whole.
      name: what the section is called where it is stored by itself ("z", "x", "B", "C", "dt", "q", "k", "v").
      stack: how many tensors ``tensor`` stands for (0: one, unstacked).
      once: only rank 0 holds the values, the others hold zeros (the bias of a product whose outputs are summed).
      padded: rows including zero rows at the end, so that ``parts`` divides them (0: ``size``).
    """

    tensor: str
    size: int
    start: int = 0
    parts: int = 1
    name: str = ""
    stack: int = 0
    once: bool = False
    padded: int = 0

    def width(self) -> int:
        """Rows per rank."""
        return (self.padded or self.size) // self.parts

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """Rows [start, stop) of the checkpoint tensor that ``rank`` holds; fewer than :meth:`width` means zero rows
        follow."""
        if self.once and rank:
            return self.start, self.start
        first = (rank * self.parts // ranks) * self.width()
        return self.start + min(first, self.size), self.start + min(first + self.width(), self.size)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shape of a parameter, and which checkpoint rows each rank of the tensor axis holds.

    Attributes:
      shape: the parameter as one rank would hold it uncut (the entry at ``dim`` is the sum of the section sizes).
      dim: the dimension that is cut, and along which the sections follow each other.
      sections: what is stored along ``dim``, in order.
      ranks: size of the tensor axis.
    """

    shape: tuple[int, ...]
    dim: int
    sections: tuple[Section, ...]
    ranks: int = 1

    def __post_init__(self):
        for s in self.sections:
            if (s.padded or s.size) % s.parts or self.ranks % s.parts:
                raise ValueError(
                    f"{s.tensor}: {s.padded or s.size} rows, {s.parts} parts, {self.ranks} ranks do not fit"
                )

    @property
    def replicated(self) -> bool:
        return self.ranks == 1 or all(s.parts == 1 and not s.once for s in self.sections)

    @property
    def local_shape(self) -> tuple[int, ...]:
        rows = sum(s.width() for s in self.sections)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the jax array over the mesh: the ranks' local rows one after the other."""
        local = self.local_shape
        rows = local[self.dim] * (1 if self.replicated else self.ranks)
        return (*local[: self.dim], rows, *local[self.dim + 1 :])

    @property
    def spec(self) -> P:
        return P() if self.replicated else P(*[None] * self.dim, TENSOR)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Checkpoint tensors this parameter is made of, each with the shape it must have in the file."""
        rows: dict[str, int] = {}
        for s in self.sections:
            rows[s.tensor] = max(rows.get(s.tensor, 0), s.start + s.size)
        for s in {s.tensor: s for s in self.sections}.values():
            full = (*self.shape[: self.dim], rows[s.tensor], *self.shape[self.dim + 1 :])
            if "{}" in s.tensor:
                for i in range(full[0]):
                    yield s.tensor.format(i), full[1:]
            else:
                yield s.tensor, full


def cut_rows(tensor: str, shape: Sequence[int], axis: Axis, dim: int = 0, **section) -> Layout:
    """The whole of one tensor, cut evenly along ``dim``."""
    return Layout(tuple(shape), dim, (Section(tensor, shape[dim], parts=axis.size, **section),), axis.size)


def whole(tensor: str, shape: Sequence[int]) -> Layout:
    """The whole of one tensor on every rank."""
    return Layout(tuple(shape), 0, (Section(tensor, shape[0]),))


def row_parallel_bias(tensor: str, size: int, axis: Axis) -> Layout:
    """The bias of a product whose outputs are summed over ``axis``: on rank 0 only, so that it is counted once."""
    return Layout((size,), 0, (Section(tensor, size, once=axis.size > 1),), axis.size)


def padded_vocab(vocab_size: int, axis: Axis) -> int:
    """Rows of the embedding and head including zero rows, so that the axis divides them."""
    return -(-vocab_size // axis.size) * axis.size


# ---------------------------------------------------------------------------------------------- inside shard_map
def varies(x: jax.Array, axis: Axis) -> bool:
    """Whether ``x`` may differ between the ranks of ``axis``, by its type."""
    return axis.size > 1 and axis.name in _varying(x)


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """``x`` with the varying type of ``others``: what a scan's initial carry needs. Emits no code."""
    axes = frozenset().union(*(_varying(o) for o in others)) - _varying(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def rank(axis: Axis) -> jax.Array | int:
    """This device's index along ``axis``."""
    return lax.axis_index(axis.name) if axis.size > 1 else 0


def sum_over(x: jax.Array, axis: Axis) -> jax.Array:
    """All-reduce of a value that differs between the ranks; a value that does not is a doubled sum and refused.

    Raises:
      TypeError: if ``x`` does not vary over the axis (jax itself would multiply it by the axis size without a word).
    """
    if axis.size == 1:
        return x
    if not varies(x, axis):
        raise TypeError(
            f"sum over mesh axis {axis.name!r}: found {jax.typeof(x)}, which is already the same on every rank"
        )
    return lax.psum(x, axis.name)


def gather_over(x: jax.Array, axis: Axis) -> jax.Array:
    """Each rank's value along a new leading dimension, the same on every rank."""
    if axis.size == 1:
        return x[None]
    return lax.all_gather(x, axis.name, to="invarying")


def arg_max_over(logits: jax.Array, axis: Axis) -> jax.Array:
    """Index of the largest entry of vocabulary-sharded logits; ties take the lower index.

    Each rank sends one (value, index) pair a row, in one collective.

    Args:
      logits: [batch, local vocab] float32, rank r holding ids [r * local, (r + 1) * local).

    Returns:
      [batch] int32, the same on every rank.
    """
    local = logits.shape[-1]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if axis.size == 1:
        return best
    value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0].astype(jnp.float32)
    ids = best + rank(axis) * local
    pair = gather_over(jnp.stack([lax.bitcast_convert_type(value, jnp.int32), ids], -1), axis)  # [ranks, batch, 2]
    values = lax.bitcast_convert_type(pair[..., 0], jnp.float32)
    winner = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(pair[..., 1], winner[None], axis=0)[0]


def bytes_of(shape: Sequence[int], dtype) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize
