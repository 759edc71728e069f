"""Residual add + RMSNorm in one launch: a block per row, the row in the registers of its 128 threads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rms_norm import rows
from pallas_kernels.rms_norm.windows import windows as cut


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.add_rms_norm`; x and residual are [tokens, hidden] with tokens >= 1."""
    tokens, hidden = x.shape
    windows = cut(hidden)

    def kernel(x_ref, residual_ref, weight_ref, normed_ref, new_residual_ref):
        row = lax.axis_index("block")
        pieces = [
            tuple(rows.load(ref, window) for ref in (x_ref.at[row], residual_ref.at[row], weight_ref))
            for window in windows
        ]
        rounded = [rows.add_and_round(value.astype(jnp.float32), old) for value, old, _ in pieces]
        rstd = rows.reciprocal_rms(rounded, windows, hidden=hidden, eps=eps)
        for window, y, (_, _, scale) in zip(windows, rounded, pieces, strict=True):
            new_residual_ref[row, rows.part(window)] = y
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
        grid_names=("block",),
        compiler_params=rows.compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, residual, weight)
