"""The part that all Mosaic GPU kernels share: one row of residual add and RMSNorm by the 128 threads of a block.

One warpgroup per block, always. Mosaic GPU gives every warpgroup of a block the same scratch memory for `jnp.sum`, so
with two of them the sums race and the norm comes out wrong by a per cent or so, differently on every run, on hardware
only. More throughput comes from more blocks per multiprocessor.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rms_norm.windows import Window


def registers(window: Window) -> plgpu.Layout:
    """The layout of one window in the registers of a block."""
    return plgpu.Layout.WG_STRIDED((window.size,), vec_size=window.vec)


def part(window: Window) -> pl.Slice:
    """The window's place in a row."""
    return pl.ds(window.start, window.size)


def load(row: jax.Ref, window: Window) -> jax.Array:
    """One window of a row in global or shared memory, as it is stored."""
    return plgpu.load(row.at[part(window)], layout=registers(window))


def add_and_round(total: jax.Array, residual: jax.Array) -> jax.Array:
    """residual + total (float32), rounded to the residual's dtype."""
    return (residual.astype(jnp.float32) + total).astype(residual.dtype)


def reciprocal_rms(rounded: Sequence[jax.Array], windows: Sequence[Window], *, hidden: int, eps: float) -> jax.Array:
    """1 / sqrt(mean of squares + eps) of a whole row, given its windows: one reduction over the block."""
    squares = None
    for y, window in zip(rounded, windows, strict=True):
        y = y.astype(jnp.float32)
        square = y * y
        if window.overlap:
            index = plgpu.broadcasted_iota(jnp.int32, (window.size,), 0, layout=registers(window))
            square = jnp.where(index >= window.overlap, square, jnp.float32(0))
        squares = square if squares is None else squares + square
    return lax.rsqrt(jnp.sum(squares) / jnp.float32(hidden) + jnp.float32(eps))


def scale(y: jax.Array, rstd: jax.Array, weight: jax.Array, *, unit_offset: bool, out_dtype: jnp.dtype) -> jax.Array:
    """One window of the normed row: multiplied in float32, cast once."""
    weight = weight.astype(jnp.float32)
    if unit_offset:
        weight = weight + jnp.float32(1)
    return (y.astype(jnp.float32) * rstd * weight).astype(out_dtype)


def each_row(rows_per_block: int, body) -> None:
    """Run `body(i)` for i = 0 .. rows_per_block - 1; a single row is not wrapped in a loop."""
    if rows_per_block == 1:
        body(jnp.int32(0))
    else:
        lax.fori_loop(jnp.int32(0), jnp.int32(rows_per_block), lambda i, _: body(i), None)


def compiler_params(**kwargs) -> plgpu.CompilerParams:
    """Warpgroup semantics: one program per 128 threads."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **kwargs)
