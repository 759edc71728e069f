"""Attention block ("*"): grouped-query, causal, no position embedding, scale head_dim ** -0.5."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nemotron_jax.cache import AttentionCache, Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import dot_precision, project, weight
from nemotron_jax.sharding import Axis, Layout, Section, cut_rows
from pallas_kernels import decode_attention, prefill_attention

# Scores of one block of queries are held in float32; queries are taken in blocks so that they stay below this many
# entries.
MAX_SCORES = 1 << 28
# Up to so many query heads and tokens, all of them against each slot take the GPU less time than reading the slot.
FEW_QUERIES = 64


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
        qkv = project(x, self.qkv[...]).reshape(b, t, self.q_heads + 2 * self.kv_heads, self.head_dim)
        if t == 1 and cache is not None and self.kernel_fault(x.dtype, cache) is None:
            alive = None if rows.valid is None else rows.new
            y, k, v = decode_attention.decode_attention(qkv[:, 0], cache.k, cache.v, rows.start, alive)
            cache = AttentionCache(k, v)
        else:
            q, k, v = jnp.split(qkv, (self.q_heads, self.q_heads + self.kv_heads), axis=2)
            if cache is not None:
                cache = write(cache, k, v, rows)
                k, v = cache.k, cache.v
            if self.prefill_fault(t, x.dtype, k) is None:
                y = prefill_attention.prefill_attention(
                    qkv, k, v, rows.start, rows.new, q_heads=self.q_heads, clean=rows.clean
                )
            else:
                y = attend(q, k, v, rows)
        return project(y.reshape(b, t, self.q_heads * self.head_dim), self.out[...]), cache

    def kernel_fault(self, dtype, cache: AttentionCache) -> str | None:
        """Why a decode step does not run as one operation in the program being traced, or None."""
        return decode_attention.declined(cache.k, q_heads=self.q_heads, dtype=dtype)

    def prefill_fault(self, tokens: int, dtype, k: jax.Array) -> str | None:
        """Why many tokens do not attend in a kernel in the program being traced, or None."""
        return prefill_attention.declined(k, tokens=tokens, q_heads=self.q_heads, dtype=dtype)


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
    k, v = k.astype(q.dtype), (v if rows.clean else jnp.where(filled[:, :, None, None], v, 0)).astype(q.dtype)
    if t * q_heads <= FEW_QUERIES:
        behind = rows.start[:, None] + jnp.arange(t, dtype=jnp.int32)
        return few(q, k, v, (slot <= behind[:, :, None]) & filled[:, None])
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


def few(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of few new tokens, with the cache read where it lies.

    A product of several rows and several KV heads has two batch dimensions that are not neighbours in the cache's
    layout, for which XLA transposes the cache. So the KV heads of a slot become one long vector, and each query zeros
    outside its own head: more arithmetic, which costs nothing while memory is what the GPU waits for. What is not a
    number in a key that is seen reaches all heads of its row.

    Args:
      q: [batch, tokens, q_heads, head_dim].
      k, v: [batch, slots, kv_heads, head_dim]; of v all are numbers.
      seen: [batch, tokens, slots] bool.

    Returns:
      [batch, tokens, q_heads, head_dim].
    """
    # letters: b batch, t token, g group of KV heads that one product takes, n token and query head, s slot,
    # c channel of the group's KV heads
    b, t, q_heads, h = q.shape
    slots, kv_heads = k.shape[1:3]
    per_head = q.reshape(b, t, kv_heads, q_heads // kv_heads, h)
    own = jnp.eye(kv_heads, dtype=bool)[:, None, :, None]  # [KV head of the query, 1, KV head of the slot, 1]
    apart = b == 1
    if apart:
        queries = jnp.moveaxis(per_head, 2, 1).reshape(b, kv_heads, -1, h)
    else:
        queries = jnp.where(own, per_head[:, :, :, :, None], 0).reshape(b, 1, -1, kv_heads * h)
    groups, n, c = queries.shape[1:]
    k, v = (x.reshape(b, slots, groups, c) for x in (k, v))
    precision = dot_precision(q.dtype)
    score = jnp.einsum("bgnc,bsgc->bgns", queries, k, precision=precision, preferred_element_type=jnp.float32)
    score = (score * h**-0.5).reshape(b, groups, t, n // t, slots)
    score = jnp.where(seen[:, None, :, None], score, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(score, -1).astype(v.dtype).reshape(b, groups, n, slots)
    y = jnp.einsum("bgns,bsgc->bgnc", weights, v, precision=precision)
    if apart:
        y = jnp.moveaxis(y.reshape(b, kv_heads, t, -1, h), 2, 1)
    else:
        y = jnp.sum(jnp.where(own, y.reshape(b, t, kv_heads, -1, kv_heads, h), 0), 4)
    return y.reshape(q.shape)
