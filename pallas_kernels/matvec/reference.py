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
