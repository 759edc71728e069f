"""Sum of several sources + residual + RMSNorm on one device as one kernel: a block per row, each byte moved once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rms_norm import rows
from pallas_kernels.rms_norm.windows import windows as cut


def sum_add_rms_norm(
    sources: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Add [n, tokens, hidden] over n in float32 in order, then residual and norm as `reference.add_rms_norm`.

    Needs tokens >= 1 and rows that `windows.row_fault` accepts.

    Returns:
        (normed [tokens, hidden] in out_dtype, new residual [tokens, hidden] in the residual's dtype).
    """
    count, tokens, hidden = sources.shape
    windows = cut(hidden)

    def kernel(sources_ref, residual_ref, weight_ref, normed_ref, new_residual_ref):
        row = lax.axis_index("row")
        residuals = [rows.load(residual_ref.at[row], window) for window in windows]
        weights = [rows.load(weight_ref, window) for window in windows]
        rounded = []
        for window, old in zip(windows, residuals, strict=True):
            total = None
            for source in range(count):
                value = rows.load(sources_ref.at[source, row], window).astype(jnp.float32)
                total = value if total is None else total + value
            y = rows.add_and_round(total, old)
            new_residual_ref[row, rows.part(window)] = y
            rounded.append(y)
        rstd = rows.reciprocal_rms(rounded, windows, hidden=hidden, eps=eps)
        for window, y, scale in zip(windows, rounded, weights, strict=True):
            normed_ref[row, rows.part(window)] = rows.scale(
                y, rstd, scale, unit_offset=unit_offset, out_dtype=out_dtype
            )

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, hidden), out_dtype),
            jax.ShapeDtypeStruct((tokens, hidden), residual.dtype),
        ),
        grid=(tokens,),
        grid_names=("row",),
        compiler_params=rows.compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(sources, residual, weight)
