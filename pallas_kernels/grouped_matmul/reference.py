"""Rows in tiles, each tile times the matrix of its group, in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(
    x: jax.Array, matrices: jax.Array, tile_group: jax.Array, used: jax.Array, *, squared_relu: bool
) -> jax.Array:
    """See `api.grouped_matmul` for the arguments. Accumulates in float32, rounds to x's dtype, and where asked takes
    relu^2 of what was rounded, in float32, and rounds again. Rows of tiles that are not used are zero."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def one(tile):
        number, rows, group = tile
        y = lax.dot_general(
            rows, matrices[group], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if squared_relu:
            # not a cast there and back, which XLA leaves out
            y = lax.reduce_precision(y, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
            y = jnp.square(jnp.maximum(y, 0.0))
        return jnp.where(number < used[0], y.astype(x.dtype), 0)

    tiles = tile_group.shape[0]
    y = lax.map(one, (jnp.arange(tiles), x.reshape(tiles, -1, x.shape[1]), tile_group))
    return y.reshape(x.shape[0], matrices.shape[1])
