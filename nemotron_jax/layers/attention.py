"""Attention block ("*"): grouped-query, causal, no position embedding, scale head_dim ** -0.5."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nemotron_jax.cache import AttentionCache, Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import dot_precision, project, weight
from nemotron_jax.sharding import Axis, Layout, Section, cut_rows

# Scores of one block of queries are held in float32; queries are taken in blocks so that they stay below this many
# entries.
MAX_SCORES = 1 << 28


class Attention(nnx.Module):
    """Heads cut over the tensor axis: q, k and v rows run as one product per rank, o columns leave a summand on each
    rank.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
    """

    def __init__(self, config: NemotronHConfig, prefix: str, *, axis: Axis, dtype):
        h, d = config.head_dim, config.hidden_size
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        kv_parts = min(kv_heads, axis.size)
        sections = (
            Section(f"{prefix}q_proj.weight", q_heads * h, parts=axis.size, name="q"),
            Section(f"{prefix}k_proj.weight", kv_heads * h, parts=kv_parts, name="k"),
            Section(f"{prefix}v_proj.weight", kv_heads * h, parts=kv_parts, name="v"),
        )
        self.head_dim = h
        self.q_heads, self.kv_heads = q_heads // axis.size, kv_heads // kv_parts
        self.qkv = weight(Layout(((q_heads + 2 * kv_heads) * h, d), 0, sections, axis.size), dtype)
        self.out = weight(cut_rows(f"{prefix}o_proj.weight", (d, q_heads * h), axis, dim=1), dtype)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], cache: AttentionCache | None, rows: Rows
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache | None]:
        b, t, _ = x.shape
        q, k, v = jnp.split(
            project(x, self.qkv[...]).reshape(b, t, self.q_heads + 2 * self.kv_heads, self.head_dim),
            (self.q_heads, self.q_heads + self.kv_heads),
            axis=2,
        )
        if cache is not None:
            cache = write(cache, k, v, rows)
            k, v = cache.k, cache.v
        y = attend(q, k, v, rows)
        return project(y.reshape(b, t, self.q_heads * self.head_dim), self.out[...]), cache


def write(cache: AttentionCache, k: jax.Array, v: jax.Array, rows: Rows) -> AttentionCache:
    """Put the new tokens of each row behind its old ones; pads are dropped.

    Args:
      k, v: [batch, tokens, kv_heads, head_dim].
    """
    b, t = k.shape[:2]
    slot = rows.start[:, None] + jnp.arange(t, dtype=jnp.int32)
    if rows.valid is not None:
        slot = jnp.where(rows.valid, slot, cache.k.shape[1])  # out of range: dropped
    row = jnp.arange(b)[:, None]

    def put(buffer, new):
        return buffer.at[row, slot].set(new.astype(buffer.dtype), mode="drop", unique_indices=rows.valid is None)

    return AttentionCache(put(cache.k, k), put(cache.v, v))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> jax.Array:
    """Causal attention of new tokens over the row's old and new ones. Scores and softmax in float32.

    Query t of a row sees slots 0 .. start + t; slots that hold nothing are neither scored nor multiplied (they may
    hold NaN).

    Args:
      q: [batch, tokens, q_heads, head_dim].
      k, v: [batch, slots, kv_heads, head_dim].

    Returns:
      [batch, tokens, q_heads, head_dim] in q's dtype.
    """
    b, t, q_heads, h = q.shape
    slots, kv_heads = k.shape[1], k.shape[2]
    if t == 0 or b == 0:
        return q
    slot = jnp.arange(slots, dtype=jnp.int32)
    filled = slot[None] < (rows.start + rows.new)[:, None]  # [batch, slots]
    # Scores of empty slots are replaced below whatever they are; values are multiplied by 0, so they must be numbers.
    k, v = k.astype(q.dtype), jnp.where(filled[:, :, None, None], v, 0).astype(q.dtype)
    q = q.reshape(b, t, kv_heads, q_heads // kv_heads, h)
    precision = dot_precision(q.dtype)

    def block(q, first):
        # letters: b batch, t query, k KV head, r query heads of a KV head, h head_dim, s slot
        score = jnp.einsum("btkrh,bskh->bkrts", q, k, precision=precision, preferred_element_type=jnp.float32) * h**-0.5
        seen = slot <= (rows.start[:, None] + first + jnp.arange(q.shape[1], dtype=jnp.int32))[:, :, None]
        seen = seen & filled[:, None]
        score = jnp.where(seen[:, None, None], score, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bkrts,bskh->btkrh", jax.nn.softmax(score, -1).astype(v.dtype), v, precision=precision)

    rows_per_block = max(1, MAX_SCORES // (b * q_heads * slots))
    if t <= rows_per_block:
        y = block(q, 0)
    else:
        n = -(-t // rows_per_block)
        padded = jnp.pad(q, ((0, 0), (0, n * rows_per_block - t)) + ((0, 0),) * 3)
        parts = jnp.moveaxis(padded.reshape(b, n, rows_per_block, *q.shape[2:]), 1, 0)
        y = jax.lax.map(lambda a: block(a[0], a[1] * rows_per_block), (parts, jnp.arange(n, dtype=jnp.int32)))
        y = jnp.moveaxis(y, 0, 1).reshape(b, n * rows_per_block, *q.shape[2:])[:, :t]
    return y.reshape(b, t, q_heads, h)
