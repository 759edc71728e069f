"""Parameters and the matrix product that all blocks share."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nemotron_jax.sharding import Layout


class Weight(nnx.Param):
    """A parameter with its :class:`~nemotron_jax.sharding.Layout` (metadata ``layout``): where its values come from.

    It is made without values; loading, restoring or random initialisation fills it. Checkpoint orientation is kept:
    a projection is (out, in).
    """


def weight(layout: Layout, dtype: Any) -> Weight:
    """An unfilled parameter. Its value is the global shape, so that a whole model can be described without memory."""
    return Weight(jax.ShapeDtypeStruct(layout.global_shape, jnp.dtype(dtype)), layout=layout)


def dot_precision(dtype: Any) -> lax.Precision | None:
    """float32 products are exact float32 (GPUs would use TF32); narrower types keep the hardware's own product."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def project(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ w.T + bias`` accumulated in float32 and rounded once to x's dtype.

    Args:
      x: [..., in].
      w: [out, in].
      bias: [out] or None, added before the rounding.

    Returns:
      [..., out] in x's dtype.
    """
    out = jnp.float32 if bias is not None else x.dtype
    y = lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=dot_precision(x.dtype), preferred_element_type=out
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)
