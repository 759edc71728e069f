"""The meaning of all-reduce + residual + RMSNorm, and the two forms of it that leave communication to XLA.

exact:  total = partial[0] + partial[1] + ... in float32, in rank order; total + residual in float32, rounded once to
        the residual's dtype; RMSNorm of what was rounded; multiplied by the weight in float32; one cast.
psum:   the same, but the sum is `lax.psum` in the partial's own dtype, so it rounds (and orders) as XLA or NCCL likes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rms_norm.reference import add_rms_norm


def sum_in_rank_order(gathered: jax.Array) -> jax.Array:
    """Sum [world, ...] over the first dimension in float32, strictly from rank 0 upwards."""
    total = gathered[0].astype(jnp.float32)
    for rank in range(1, gathered.shape[0]):
        total = total + gathered[rank].astype(jnp.float32)
    return total


def exact(
    partial: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    axis_name: str,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Gather the partials [tokens, hidden] of all ranks and do the rest on every device alike."""
    gathered = lax.all_gather(partial, axis_name, to="invarying")
    return add_rms_norm(
        sum_in_rank_order(gathered), residual, weight, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype
    )


def psum(
    partial: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    axis_name: str,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """`lax.psum` in the partial's dtype, then residual and norm: what a model without this operation would do."""
    total = lax.psum(partial, axis_name).astype(jnp.float32)
    return add_rms_norm(total, residual, weight, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype)
