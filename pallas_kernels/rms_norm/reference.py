"""Residual add and RMSNorm of one device in plain JAX. It defines the meaning that the kernels are tested against."""

import jax
import jax.numpy as jnp
from jax import lax


def round_once(total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round a float32 value to `dtype` and return it as float32, exactly representable in `dtype`.

    XLA may drop the pair of casts float32 -> bfloat16 -> float32 (it counts as excess precision), and then what is
    normalised is no longer what is stored. `reduce_precision` is never dropped. It would flush float16's subnormals, so
    for that type a barrier keeps the casts apart instead.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return total
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
    return lax.optimization_barrier(total.astype(dtype)).astype(jnp.float32)


def scale_of(weight: jax.Array, unit_offset: bool) -> jax.Array:
    """The factor of the norm in float32: the weight, or one plus the weight."""
    weight = weight.astype(jnp.float32)
    return weight + 1.0 if unit_offset else weight


def normalise(y: jax.Array, weight: jax.Array, *, eps: float, unit_offset: bool, out_dtype: jnp.dtype) -> jax.Array:
    """RMSNorm of the float32 rows `y` [..., hidden]: everything in float32, one cast at the end."""
    rstd = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * rstd * scale_of(weight, unit_offset)).astype(out_dtype)


def add_rms_norm(
    total: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, unit_offset: bool, out_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """`total` [..., hidden] (float32) + residual, rounded once to the residual's dtype, and the RMSNorm of what was
    rounded.

    Returns:
        (normed in `out_dtype`, new residual in the residual's dtype).
    """
    y = round_once(residual.astype(jnp.float32) + total, residual.dtype)
    return normalise(y, weight, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype), y.astype(residual.dtype)
