"""Causal attention of new tokens over the old and new ones of their row, in plain JAX. It defines what the kernel
computes.

Letters: b rows, t tokens, k KV heads, r query heads of a KV head, h head_dim, s slots.
"""

import jax
import jax.numpy as jnp
from jax import lax


def prefill_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, new: jax.Array, *, q_heads: int
) -> jax.Array:
    """See `api.prefill_attention` for the arguments. All arithmetic is in float32; the result is rounded once."""
    rows, tokens, _, h = q.shape
    slots, kv_heads = k.shape[1:3]
    token, slot = jnp.arange(tokens), jnp.arange(slots)
    real = token < new[:, None]  # [b, t]
    seen = (slot <= (start[:, None] + token)[..., None]) & real[..., None]  # [b, t, s]
    filled = slot < (start + new)[:, None]

    queries = q[:, :, :q_heads].astype(jnp.float32).reshape(rows, tokens, kv_heads, q_heads // kv_heads, h)
    values = jnp.where(filled[:, :, None, None], v, 0).astype(jnp.float32)
    exact = lax.Precision.HIGHEST
    score = jnp.einsum("btkrh,bskh->bkrts", queries, k.astype(jnp.float32), precision=exact) * h**-0.5
    score = jnp.where(seen[:, None, None], score, -jnp.inf)
    largest = jnp.max(score, -1, keepdims=True, initial=-1e38)
    weight = jnp.exp(score - largest)
    total = jnp.moveaxis(jnp.sum(weight, -1), 3, 1)[..., None]
    y = jnp.einsum("bkrts,bskh->btkrh", weight, values, precision=exact) / jnp.where(total > 0, total, 1)
    return y.reshape(rows, tokens, q_heads, h).astype(q.dtype)
