"""Causal convolution and SiLU on Hopper, one pass over memory.

A block takes `size` channels of a tile of tokens of a row, each thread `vec` neighbouring channels: 16 bytes at a time
where the columns are aligned so. The tile is copied to shared memory as a whole, so that a block waits for memory once,
and threads walk over it with few registers: some five blocks fit on a multiprocessor, of which some wait while others
work. The few tokens before the tile, which may be those of the window, each thread puts in front of it for itself: a
thread reads of shared memory its own channels alone, so there is no barrier but that of the copy. Blocks of the same
tokens run side by side, so what a tile needs of the one before comes from the second-level cache.

The last tile of tokens is moved back to end with the row, and so is the last span of channels: what two blocks share is
computed twice, to the same bits.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.narrow import store

THREADS = 128
BOX = 256  # channels of a copy, at most
TILE_BYTES = 32 << 10
MOST_TILE = 32  # tokens


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is shared out.

    Attributes:
        vec: neighbouring channels of a thread.
        tile: tokens of a block.
        step: tokens that a thread works on at once, a divisor of tile.
    """

    vec: int
    tile: int
    step: int


def cut(*, tokens: int, channels: int, alignment: int, itemsize: int) -> Cut:
    """For shapes that `api.supported` admits.

    Args:
        alignment: number of values of which every row and span starts at a multiple.
    """
    widest = min(16 // itemsize, channels // THREADS)
    widths = [vec for vec in (8, 4, 2, 1) if vec <= widest and alignment % vec == 0]

    def computed(vec):
        return pl.cdiv(channels, THREADS * vec) * THREADS * vec

    fewest = min(map(computed, widths))
    vec = next(vec for vec in widths if computed(vec) <= 1.1 * fewest)
    tile = min(tokens, MOST_TILE, TILE_BYTES // (THREADS * vec * itemsize))
    return Cut(vec, tile, 1 if tile % 2 else 2)


def causal_conv(
    packed: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    window: jax.Array,
    *,
    start: int = 0,
    how: Cut | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.causal_conv`; api.py has said that the shapes fit.

    Args:
        how: the cut to use instead of the chosen one.
    """
    batch, tokens, columns = packed.shape
    channels, _, taps = weight.shape
    past = taps - 1
    alignment = math.gcd(columns, channels, start)
    how = how or cut(tokens=tokens, channels=channels, alignment=alignment, itemsize=packed.dtype.itemsize)
    vec, tile, size = how.vec, how.tile, THREADS * how.vec
    box = min(BOX, size)
    boxes = size // box
    in_boxes = plgpu.Layout.WG_STRIDED((boxes, box), vec_size=vec)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vec)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    def kernel(packed_ref, weight_ref, window_ref, *rest, shared, arrived):
        *bias_ref, out_ref = rest
        row = lax.axis_index("row")
        first = jnp.minimum(lax.axis_index("tile") * tile, tokens - tile)
        channel = pl.multiple_of(jnp.minimum(lax.axis_index("span") * size, channels - size), vec)
        span = pl.ds(channel, size)
        for i in range(boxes):
            columns = pl.ds(start + channel + i * box, box)
            source = packed_ref.at[row, pl.ds(first, tile), columns]
            plgpu.copy_gmem_to_smem(source, shared.at[i, pl.ds(past, tile)], arrived)

        def earlier(k):
            """The input k - past tokens from the first: a token of this row or one of the window."""
            i = first + (k - past)
            old = load(window_ref.at[row, jnp.minimum(first + k, past - 1), span])
            return jnp.where(i >= 0, load(packed_ref.at[row, jnp.maximum(i, 0), pl.ds(start + channel, size)]), old)

        before = [earlier(k) for k in range(past)]
        scales = [load(weight_ref.at[k, span]) for k in range(taps)]
        shift = load(bias_ref[0].at[span]) if bias_ref else None
        for k, value in enumerate(before):
            store(shared.at[:, k], value.reshape(boxes, box))
        plgpu.barrier_wait(arrived)

        def some_tokens(number, _):
            at = number * how.step

            def token(i):
                value = plgpu.load(shared.at[:, at + i], layout=in_boxes, optimized=False)
                return value.reshape(size).astype(jnp.float32)

            inputs = [token(i) for i in range(past + how.step)]
            for i in range(how.step):
                y = inputs[i] * scales[0]
                for k in range(1, taps):
                    y = y + inputs[i + k] * scales[k]
                if shift is not None:
                    y = y + shift
                store(out_ref.at[row, first + at + i, span], (y * sigmoid(y)).astype(packed.dtype))

        lax.fori_loop(jnp.int32(0), jnp.int32(tile // how.step), some_tokens, None)

    operands = [packed, weight[:, 0].astype(jnp.float32).T, window.astype(packed.dtype)]
    operands += [] if bias is None else [bias.astype(jnp.float32)]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, tokens, channels), packed.dtype),
        grid=(batch, pl.cdiv(tokens, tile), pl.cdiv(channels, size)),
        grid_names=("row", "tile", "span"),
        scratch_types=dict(
            shared=plgpu.SMEM((boxes, past + tile, box), packed.dtype), arrived=plgpu.Barrier(num_arrivals=boxes)
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) as a square of an inverse root, which is one instruction where a quotient is a dozen."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * jnp.float32(-math.log2(math.e))))
    return root * root
