"""Gated grouped RMSNorm in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp
from jax import lax


def gated_norm(
    y: jax.Array, packed: jax.Array, weight: jax.Array, *, groups: int, eps: float, start: int = 0
) -> jax.Array:
    """See `api.gated_norm`. All arithmetic is in float32, with one cast at the end."""
    z = lax.slice_in_dim(packed, start, start + y.shape[-1], axis=-1)
    gated = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    grouped = gated.reshape(*y.shape[:-1], groups, y.shape[-1] // groups)
    scale = lax.rsqrt(jnp.mean(jnp.square(grouped), -1, keepdims=True) + eps)
    return ((grouped * scale).reshape(y.shape) * weight.astype(jnp.float32)).astype(packed.dtype)
