"""Everything a sequence has behind it, as one pytree: KV, convolution window and SSM state of each layer, and the
lengths.

Rows of a batch are independent: each has its own length, and new tokens of a row are written behind its own old ones.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.sharding import DATA, TENSOR, Axis, ShardingRules, axis_size, bytes_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Which of the new tokens of a call are real. Layers see every row packed to the left, pads on the right.

    Attributes:
      start: [batch] int32, tokens each row already has in the cache.
      new: [batch] int32, real new tokens of each row.
      valid: [batch, tokens] bool, or None when every token is real.
      every: keep the recurrent states behind every token, not only behind the last: MambaCache leaves are then
        [batch, tokens, ...]. For a few tokens of which some may be taken back.
      clean: the slots of the KV cache that hold no token hold numbers, see :func:`cleaned`.
    """

    start: jax.Array
    new: jax.Array
    valid: jax.Array | None
    every: bool = dataclasses.field(default=False, metadata={"static": True})
    clean: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AttentionCache:
    """Keys and values, [batch, capacity, kv_heads, head_dim] in the model's dtype; slot j holds token j of the row."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MambaCache:
    """State of a Mamba-2 block.

    Attributes:
      conv: [batch, conv_kernel - 1, conv channels], the last raw inputs of the convolution, newest last, model dtype.
      ssm: [batch, heads, head_dim, state], float32 unless chosen otherwise.
    """

    conv: jax.Array
    ssm: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """State of a batch of sequences after some tokens.

    Attributes:
      layers: one entry per block: AttentionCache, MambaCache, or None where the block keeps nothing.
      length: [batch] int32, tokens seen by each row.
      longest: the length of the longest row where the host knows it (None inside a compiled program).
    """

    layers: tuple[AttentionCache | MambaCache | None, ...]
    length: jax.Array
    longest: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def capacity(self) -> int | None:
        """Slots for tokens, or None where no block needs any (a model without attention)."""
        sizes = [layer.k.shape[1] for layer in self.layers if isinstance(layer, AttentionCache)]
        return min(sizes) if sizes else None

    @property
    def batch(self) -> int:
        return self.length.shape[0]


@dataclasses.dataclass(frozen=True)
class CacheShapes:
    """Global shapes, dtypes and specs of a cache: what allocation, programs and reports are made from.

    Attributes:
      tree: a Cache of jax.ShapeDtypeStruct.
      specs: a Cache of PartitionSpec.
    """

    tree: Cache
    specs: Cache

    def bytes_by_kind(self) -> dict[str, int]:
        """Global bytes of each kind of state: ``kv``, ``conv``, ``ssm``."""
        total = {"kv": 0, "conv": 0, "ssm": 0}
        for layer in self.tree.layers:
            if isinstance(layer, AttentionCache):
                total["kv"] += bytes_of(layer.k.shape, layer.k.dtype) + bytes_of(layer.v.shape, layer.v.dtype)
            elif isinstance(layer, MambaCache):
                total["conv"] += bytes_of(layer.conv.shape, layer.conv.dtype)
                total["ssm"] += bytes_of(layer.ssm.shape, layer.ssm.dtype)
        return total


def repeated(heads: int, axis: Axis) -> int:
    """Heads (or groups) over all ranks, where those fewer than the ranks repeat."""
    return max(heads, axis.size)


def cache_shapes(
    config: NemotronHConfig,
    pattern: str,
    *,
    batch: int,
    capacity: int,
    mesh: Mesh,
    rules: ShardingRules,
    dtype,
    state_dtype=jnp.float32,
) -> CacheShapes:
    """Shapes of the cache of ``batch`` rows with room for ``capacity`` tokens each.

    Raises:
      ValueError: if the data axis does not divide the batch, or a size is negative.
    """
    data, tensor = axis_size(mesh, DATA), Axis(TENSOR, axis_size(mesh, TENSOR))
    if batch % data:
        raise ValueError(f"batch = {batch} is not a multiple of the mesh's data axis, {data}")
    if batch < 0 or capacity < 0:
        raise ValueError(f"batch = {batch} and capacity = {capacity} must not be negative")
    rows = DATA if data > 1 else None

    def axis_of(rule: str | None) -> Axis:
        return tensor if rule else Axis()

    def cut(axis: Axis) -> str | None:
        return axis.name if axis.size > 1 else None

    shapes: list[Any] = []
    specs: list[Any] = []
    for kind in pattern:
        if kind == "*":
            axis = axis_of(rules.kv_heads)
            kv = jax.ShapeDtypeStruct(
                (batch, capacity, repeated(config.num_key_value_heads, axis), config.head_dim), dtype
            )
            spec = P(rows, None, cut(axis))
            shapes.append(AttentionCache(kv, kv))
            specs.append(AttentionCache(spec, spec))
        elif kind == "M":
            axis = axis_of(rules.mamba_heads)
            channels = config.inner_size + 2 * repeated(config.n_groups, axis) * config.ssm_state_size
            conv = jax.ShapeDtypeStruct((batch, config.conv_kernel - 1, channels), dtype)
            heads = (batch, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
            shapes.append(MambaCache(conv, jax.ShapeDtypeStruct(heads, state_dtype)))
            specs.append(MambaCache(P(rows, None, cut(axis)), P(rows, cut(axis))))
        else:
            shapes.append(None)
            specs.append(None)
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return CacheShapes(Cache(tuple(shapes), length), Cache(tuple(specs), P(rows)))


def cleaned(cache: Cache) -> Cache:
    """``cache`` with zero values in the slots that hold no token: what may be there is no longer looked at.

    Attention multiplies empty slots by zero, so it needs numbers in them. A program of many steps looks after that
    once instead of in every step. Keys need nothing: their scores are replaced.
    """

    def zeroed(layer: AttentionCache) -> AttentionCache:
        filled = jnp.arange(layer.v.shape[1], dtype=jnp.int32) < cache.length[:, None]
        return AttentionCache(layer.k, jnp.where(filled[:, :, None, None], layer.v, 0))

    layers = tuple(zeroed(layer) if isinstance(layer, AttentionCache) else layer for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


def allocate(shapes: CacheShapes, mesh: Mesh) -> Cache:
    """An empty cache: zero states, zero lengths, each array laid out on ``mesh``.

    KV slots are zero too, but nothing depends on it: a slot that was not written is never read.
    """

    def zeros(leaf, spec):
        sharding = NamedSharding(mesh, spec)
        local = np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda _: local)

    cache = jax.tree.map(zeros, shapes.tree, shapes.specs)
    return dataclasses.replace(cache, longest=0)
