"""Rows times the transpose of a matrix in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp
from jax import lax


def matvec(x: jax.Array, w: jax.Array, *, out_dtype: jnp.dtype, squared_relu: bool = False) -> jax.Array:
    """See `api.matvec` for the arguments. Accumulates in float32 and rounds to out_dtype, and where asked takes relu^2
    of what was rounded, in float32, and rounds again."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=out_dtype)
    return jnp.square(jax.nn.relu(y.astype(jnp.float32))).astype(out_dtype) if squared_relu else y


def chosen_matvec(x: jax.Array, w: jax.Array, chosen: jax.Array, *, squared_relu: bool = False) -> jax.Array:
    """See `api.chosen_matvec` for the arguments. Each choice's product is rounded as `matvec` rounds."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    rows = x if x.ndim == 3 else jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[-1]))
    taken = jnp.take(w, chosen, axis=0, mode="clip")
    y = lax.dot_general(
        rows, taken, (((2,), (3,)), ((0, 1), (0, 1))), precision=precision, preferred_element_type=x.dtype
    )
    return jnp.square(jax.nn.relu(y.astype(jnp.float32))).astype(x.dtype) if squared_relu else y
