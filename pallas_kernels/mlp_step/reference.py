"""An MLP without a gate in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp

from pallas_kernels.matvec.reference import matvec


def mlp_step(x: jax.Array, up: jax.Array, down: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.mlp_step` for the arguments. Each product is accumulated in float32 and rounded once; what is between
    them, relu^2 of what was rounded, is taken in float32 and rounded again."""
    return matvec(matvec(x, up, out_dtype=x.dtype, squared_relu=True), down, out_dtype=out_dtype)
