"""XLA's all_gather, then residual and norm over the gathered partials on every device."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.allreduce_rms_norm.reference import sum_in_rank_order
from pallas_kernels.rms_norm.reference import add_rms_norm


def gather(
    partial: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    axis_name: str,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Exact, on any platform and any mesh; the wire carries world - 1 times the message."""
    gathered = lax.all_gather(partial, axis_name, to="invarying")
    return add_rms_norm(
        sum_in_rank_order(gathered), residual, weight, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype
    )
