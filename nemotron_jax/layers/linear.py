"""Parameters and the matrix product that all blocks share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nemotron_jax.sharding import Layout
from pallas_kernels import matvec


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


def squared_relu(x: jax.Array) -> jax.Array:
    """relu(x)^2, in float32, returned in x's dtype."""
    return jnp.square(jax.nn.relu(x.astype(jnp.float32))).astype(x.dtype)


def product(x: jax.Array, w: jax.Array, out_dtype: Any, *, squared: bool = False) -> jax.Array:
    """``x @ w.T`` accumulated in float32 and rounded once to ``out_dtype``: x's dtype or float32.

    A few rows take the kernel that reads ``w`` at the memory's rate, where it is asked for and can run.

    Args:
      x: [..., in].
      w: [out, in], of x's dtype for the kernel.
      squared: take `squared_relu` of the result.
    """
    rows, (outputs, inputs) = math.prod(x.shape[:-1]), w.shape
    if w.dtype == x.dtype and matvec.declined(rows=rows, outputs=outputs, inputs=inputs, dtype=x.dtype) is None:
        y = matvec.matvec(
            x.reshape(rows, inputs), w, out_dtype=out_dtype, squared_relu=squared, implementation="mosaic_gpu"
        )
        return y.reshape(*x.shape[:-1], outputs)
    y = lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=dot_precision(x.dtype), preferred_element_type=out_dtype
    )
    return squared_relu(y) if squared else y


def project(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, squared: bool = False) -> jax.Array:
    """``x @ w.T + bias`` accumulated in float32 and rounded once to x's dtype.

    Args:
      x: [..., in].
      w: [out, in].
      bias: [out] or None, added before the rounding.
      squared: take `squared_relu` of the rounded result.

    Returns:
      [..., out] in x's dtype.
    """
    if bias is None:
        return product(x, w, x.dtype, squared=squared)
    y = (product(x, w, jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
    return squared_relu(y) if squared else y
