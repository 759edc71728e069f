"""Which experts a token goes to, in one launch: a block per row ranks all experts by counting and deals out the first.

A sort is many steps that wait for each other. Here each expert counts the experts in front of it: squares of 64 experts
against 64 others are compared at once, and the count is the expert's place. Places are a permutation whatever came in,
for what is compared are integers in the order of the numbers, NaN included. Then the slots ask all experts, again in
squares, which of them has the slot's number as its place.

Experts are rows of the squares in one step and columns in the next: places and scores change their layout in shared
memory. One warpgroup per block; all sums are along a square's rows, shuffles between four lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.narrow import load, store

TILE = 64  # experts, or slots
SQUARE = (TILE, TILE)

MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


def along(value: jax.Array, axis: int) -> jax.Array:
    """A vector repeated over a square, of which it is axis `axis`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, SQUARE, [axis]), MATRIX)


def number(axis: int) -> jax.Array:
    """A square of each place's number along `axis`."""
    return plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=MATRIX)


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def route(
    logits: jax.Array, bias: jax.Array, *, k: int, normalise: bool, scale: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.route`; api.py has said that the shapes fit. The weights' sum has another order of additions.

    The scores are the same bits as XLA's: both write the sigmoid as this quotient, and their compilers make the same
    instructions of it. Else experts next to each other could change places.
    """
    rows, experts = logits.shape
    tiles = experts // TILE

    def span(tile):
        return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)

    def kernel(logits_ref, bias_ref, chosen_ref, weights_ref, *, shared):
        scores_shared, keys, places, chosen_shared, weights_shared = shared
        row = lax.axis_index("row")
        whole = plgpu.Layout.WG_STRIDED((experts,), vec_size=1)
        score = 1.0 / (1.0 + jnp.exp(-load(logits_ref.at[row], layout=whole)))
        bits = lax.bitcast_convert_type(score + load(bias_ref, layout=whole), jnp.int32)
        store(keys, bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF)))
        store(scores_shared, score)
        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def rank(tile):
            mine = along(load(keys.at[span(tile)], layout=ROW), 0)

            def counted(before):
                """Of each square's experts in front, on top of those that were counted already."""

                def count(other, counts):
                    key = along(load(keys.at[span(other)], layout=COLUMN), 1)
                    return jnp.where(before(key), counts + jnp.float32(1), counts)

                return count

            # Equal ones stand in the order of their numbers.
            counts = lax.fori_loop(0, tile, counted(lambda key: key >= mine), zeros(SQUARE, MATRIX))
            counts = counted(lambda key: (key > mine) | ((key == mine) & (number(1) < number(0))))(tile, counts)
            counts = lax.fori_loop(tile + 1, tiles, counted(lambda key: key > mine), counts)
            store(places.at[span(tile)], plgpu.layout_cast(jnp.sum(counts, axis=1), ROW))

        plgpu.commit_smem()

        slot = number(0).astype(jnp.float32)

        def ask(tile, found):
            chosen, weights, total = found
            place, score = (load(ref.at[span(tile)], layout=COLUMN) for ref in (places, scores_shared))
            here = along(place, 1) == slot
            expert = (number(1) + tile * TILE).astype(jnp.float32)
            total = total + jnp.where(place < jnp.float32(k), score, zeros((TILE,), COLUMN))
            return jnp.where(here, expert, chosen), jnp.where(here, along(score, 1), weights), total

        # A slot has one expert, so the sums of these squares' rows are what that one left there.
        none = zeros(SQUARE, MATRIX)
        chosen, weights, total = lax.fori_loop(0, tiles, ask, (none, none, zeros((TILE,), COLUMN)))
        chosen, weights = jnp.sum(chosen, axis=1), jnp.sum(weights, axis=1)
        if normalise:
            weights = weights / (jnp.sum(along(total, 1), axis=1) + jnp.float32(1e-20))
        store(chosen_shared, plgpu.layout_cast(chosen.astype(jnp.int32), ROW))
        store(weights_shared, plgpu.layout_cast(weights * jnp.float32(scale), ROW))
        plgpu.commit_smem()
        for i in range(k):
            chosen_ref[row, i] = chosen_shared[i]
            weights_ref[row, i] = weights_shared[i]

    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, k), jnp.int32), jax.ShapeDtypeStruct((rows, k), jnp.float32)),
        scratch_types=dict(
            shared=(
                plgpu.SMEM((experts,), jnp.float32),
                plgpu.SMEM((experts,), jnp.int32),
                plgpu.SMEM((experts,), jnp.float32),
                plgpu.SMEM((TILE,), jnp.int32),
                plgpu.SMEM((TILE,), jnp.float32),
            )
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(logits, bias)
