"""One new token of each row through an attention block, between its two projections, in plain JAX. It defines what the
kernel computes.

Letters: b rows, k KV heads, r query heads of a KV head, h head_dim, s slots.
"""

import jax
import jax.numpy as jnp
from jax import lax


def decode_attention(
    qkv: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, alive: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.decode_attention` for the arguments. All arithmetic is in float32; y is rounded once."""
    rows, slots, kv_heads, h = k.shape
    q_heads = qkv.shape[1] - 2 * kv_heads
    q, new_k, new_v = jnp.split(qkv, (q_heads, q_heads + kv_heads), axis=1)
    writes = length < slots
    if alive is not None:
        writes = writes & (alive > 0)
    at = (jnp.arange(rows), jnp.where(writes, length, slots))  # out of range: dropped
    k = k.at[at].set(new_k.astype(k.dtype), mode="drop", unique_indices=True)
    v = v.at[at].set(new_v.astype(v.dtype), mode="drop", unique_indices=True)

    seen = jnp.arange(slots) < (length + writes)[:, None]
    q = q.astype(jnp.float32).reshape(rows, kv_heads, q_heads // kv_heads, h)
    values = jnp.where(seen[:, :, None, None], v, 0).astype(jnp.float32)
    exact = lax.Precision.HIGHEST
    score = jnp.einsum("bkrh,bskh->bkrs", q, k.astype(jnp.float32), precision=exact) * h**-0.5
    score = jnp.where(seen[:, None, None], score, -jnp.inf)
    largest = jnp.max(score, -1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(largest), largest, 0))
    total = jnp.sum(weight, -1)[..., None]
    y = jnp.einsum("bkrs,bskh->bkrh", weight, values, precision=exact) / jnp.where(total > 0, total, 1)
    return y.reshape(rows, q_heads, h).astype(qkv.dtype), k, v
