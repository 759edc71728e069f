"""Causal convolution and SiLU on Hopper: each input is fetched once by the thread that needs it, and kept in registers.

A block takes `size` channels of a tile of tokens of a row, each thread `vec` neighbouring channels: 16 bytes at a time
where the columns are aligned so. It asks for all of its tokens, and for the few before them, before it waits for any.
Blocks of the same tokens run side by side, so what a tile reads of the one before comes from the second-level cache.

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

THREADS = 128
TILE_BYTES = 256  # of inputs that a thread asks for at once
MOST_TILE = 32  # tokens


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is shared out.

    Attributes:
        vec: neighbouring channels of a thread.
        tile: tokens of a block.
    """

    vec: int
    tile: int


def cut(*, tokens: int, channels: int, alignment: int, itemsize: int) -> Cut:
    """For shapes that `api.supported` admits.

    Args:
        alignment: number of values of which every row and span starts at a multiple.
    """
    widths = [
        vec for vec in (8, 4, 2, 1) if vec * itemsize <= 16 and alignment % vec == 0 and THREADS * vec <= channels
    ]

    def computed(vec):
        return pl.cdiv(channels, THREADS * vec) * THREADS * vec

    fewest = min(map(computed, widths))
    vec = next(vec for vec in widths if computed(vec) <= 1.1 * fewest)
    return Cut(vec, min(tokens, MOST_TILE, TILE_BYTES // (vec * itemsize)))


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
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vec)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    def kernel(packed_ref, weight_ref, window_ref, *rest):
        *bias_ref, out_ref = rest
        row = lax.axis_index("row")
        first = jnp.minimum(lax.axis_index("tile") * tile, tokens - tile)
        channel = pl.multiple_of(jnp.minimum(lax.axis_index("span") * size, channels - size), vec)
        span = pl.ds(channel, size)

        def token(i):
            return load(packed_ref.at[row, i, pl.ds(start + channel, size)])

        def earlier(k):
            """The input k - past tokens from the first: a token of this row or one of the window."""
            i = first + (k - past)
            old = load(window_ref.at[row, jnp.minimum(first + k, past - 1), span])
            return jnp.where(i >= 0, token(jnp.maximum(i, 0)), old)

        inputs = [earlier(k) for k in range(past)] + [token(first + i) for i in range(tile)]
        scales = [load(weight_ref.at[k, span]) for k in range(taps)]
        shift = load(bias_ref[0].at[span]) if bias_ref else None
        wide = [value.astype(jnp.float32) for value in inputs]
        for i in range(tile):
            y = wide[i] * scales[0]
            for k in range(1, taps):
                y = y + wide[i + k] * scales[k]
            if shift is not None:
                y = y + shift
            _store(out_ref.at[row, first + i, span], (y * sigmoid(y)).astype(packed.dtype))

    operands = [packed, weight[:, 0].astype(jnp.float32).T, window.astype(packed.dtype)]
    operands += [] if bias is None else [bias.astype(jnp.float32)]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, tokens, channels), packed.dtype),
        grid=(batch, pl.cdiv(tokens, tile), pl.cdiv(channels, size)),
        grid_names=("row", "tile", "span"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) as a square of an inverse root, which is one instruction where a quotient is a dozen."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * jnp.float32(-math.log2(math.e))))
    return root * root


def _store(ref: Any, value: jax.Array) -> None:
    """Store an array, whatever its layout: jax 0.12 wants to be told that a narrow store is meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
