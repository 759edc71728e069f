"""Gated grouped RMSNorm on Hopper, one pass over memory: a warp holds whole rows of a group in its registers.

A block of four warps takes a tile of rows of one group. Each warp's rows are its own, so the sum of squares is a few
shuffles inside the warp: no shared memory and no barrier, and a warp that waits for memory holds up no other. All of a
tile is asked for before anything of it is used, 16 bytes of y and the same channels of z by each thread at a time, and
4 to 6 blocks fit on a multiprocessor.

The last tile is moved back to end with the rows: what it has in common with the one before is computed twice, to the
same bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.narrow import store

WARPS, LANES = 4, 32
VALUES = 4  # neighbours of a thread: 16 bytes of float32
MOST_VALUES = 40  # of y that a thread holds at once, where its warp has rows to choose how many
MOST_ROWS = 16  # of a tile


def tile_of(width: int) -> tuple[int, Any]:
    """(rows of a block's tile, layout of [rows, width] in its registers)."""
    lanes = next(n for n in (32, 16, 8) if width % (n * VALUES) == 0)  # that share a row
    rows = LANES // lanes  # of a warp at a time
    tiling = Tiling(((WARPS * rows, lanes * VALUES), (rows, lanes * VALUES), (1, VALUES)))
    layout = mgpu.TiledLayout(tiling, (-6,), (-4, -3), -1, _check_canonical=False).canonicalize()
    times = max(1, min(MOST_VALUES * lanes // width, MOST_ROWS // (WARPS * rows)))
    return WARPS * rows * times, plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )


def gated_norm(
    y: jax.Array,
    packed: jax.Array,
    weight: jax.Array,
    *,
    groups: int,
    eps: float,
    start: int = 0,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.gated_norm`; api.py has said that the shapes fit."""
    shape, inner = y.shape, y.shape[-1]
    width = inner // groups
    rows = math.prod(shape[:-1])
    tile, layout = tile_of(width)
    square, by_row, by_channel = (tile, width), layout.reduce(1), layout.reduce(0)

    def along(value, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(value, square, [axis]), layout)

    def kernel(y_ref, packed_ref, weight_ref, out_ref):
        first = jnp.minimum(lax.axis_index("tile") * tile, rows - tile)
        channel = pl.multiple_of(lax.axis_index("group") * width, width)
        here = (pl.ds(first, tile), pl.ds(channel, width))
        value = plgpu.load(y_ref.at[here], layout=layout, optimized=False)
        gate = plgpu.load(
            packed_ref.at[pl.ds(first, tile), pl.ds(start + channel, width)], layout=layout, optimized=False
        )
        scale = plgpu.load(weight_ref.at[pl.ds(channel, width)], layout=by_channel, optimized=False)
        gate = gate.astype(jnp.float32)
        value = value * (gate * sigmoid(gate))
        squares = jnp.sum(value * value, axis=1)
        inverse = lax.rsqrt(plgpu.layout_cast(squares, by_row) * jnp.float32(1 / width) + jnp.float32(eps))
        value = value * along(inverse, 0) * along(scale, 1)
        store(out_ref.at[here], value.astype(packed.dtype))

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, inner), packed.dtype),
        grid=(pl.cdiv(rows, tile), groups),
        grid_names=("tile", "group"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(y.reshape(rows, inner), packed.reshape(rows, packed.shape[-1]), weight.astype(jnp.float32))
    return out.reshape(shape)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) as a square of an inverse root, which is one instruction where a quotient is a dozen."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * jnp.float32(-math.log2(math.e))))
    return root * root
