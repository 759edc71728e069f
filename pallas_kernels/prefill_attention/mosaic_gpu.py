"""Causal attention of many tokens on Hopper: both products on WGMMA, scores never leave registers.

A block has 128 queries of one head: two warpgroups with 64 each, and a third that fetches keys and values with TMA in
tiles of 128 slots, as far ahead as shared memory has room. Each of the two walks over the row's tiles with an online
softmax in float32, in units of log 2. Tiles that all its queries see need no mask; those that none sees are not
fetched; between them lie one or two. The softmax of one warpgroup hides behind the products of the other: with `turns`
they see to it that one computes while the other multiplies. With `overlap` it hides behind its own products too: those
of a tile's weights and values run while the next tile's scores become weights.

Blocks that run at the same time belong to the same KV head as far as possible: they find its keys and values in the
second-level cache. Of a head the last queries, which see most, come first, so that what ends last is short.

Copies take tokens and slots in tiles of 8: arrays that are no multiple are padded before. What lies behind them reads
as zeros and is not written. Behind a row's tokens scores are replaced, whatever the keys are; values there are
multiplied by 0 and must be numbers.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64  # of a warpgroup
WARPGROUPS = 2  # that multiply
COPIED = 8  # rows of a tile of shared memory

MATRIX = plgpu.Layout.WGMMA
ROW = MATRIX.reduce(1)
NOTHING = float("-inf")  # score of what is not seen


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a block works.

    Attributes:
        slots: of a tile, a multiple of 64.
        stages: tiles in shared memory at a time.
        turns: the warpgroups multiply in turns.
        overlap: ask for a tile's scores before the tile before is through.
    """

    slots: int = 128
    stages: int = 2
    turns: bool = False
    overlap: bool = True


def along(value: jax.Array, shape: tuple[int, int], axis: int = 0) -> jax.Array:
    """A vector repeated over a matrix, of which it is axis `axis`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, [axis]), MATRIX)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def padded(x: jax.Array) -> jax.Array:
    """[a, n, heads, d] as [a, n rounded up, heads * d]."""
    x = x.reshape(*x.shape[:2], -1)
    behind = -x.shape[1] % COPIED
    return jnp.pad(x, ((0, 0), (0, behind), (0, 0))) if behind else x


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    new: jax.Array,
    *,
    q_heads: int,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.prefill_attention`; api.py has said that the shapes fit.

    Args:
        v: its slots that hold no token hold numbers.
        tiling: instead of the default one.
    """
    how = tiling or Tiling()
    rows, tokens, _, d = q.shape
    slots, kv_heads = k.shape[1:3]
    dtype, group = q.dtype, q_heads // kv_heads
    tiles = pl.cdiv(tokens, WARPGROUPS * QUERIES)
    scale = d**-0.5 * math.log2(math.e)

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        start_ref,
        new_ref,
        y_ref,
        *,
        q_smem,
        k_smem,
        v_smem,
        asked,
        k_full,
        v_full,
        k_free,
        v_free,
        turned,
    ):
        warpgroup = lax.axis_index("warpgroup")
        rest, member = split(lax.axis_index("block"), group)
        rest, tile = split(rest, tiles)
        row, kv_head = split(rest, kv_heads)
        old, real = start_ref[row], new_ref[row]
        end = jnp.minimum(old + real, slots)
        block_first = (tiles - 1 - tile) * (WARPGROUPS * QUERIES)

        def seen_tiles(first):
            """Tiles that the 64 queries from `first` on see: (those that all see whole, all)."""
            last = jnp.minimum(first + QUERIES, real)
            every = lax.div(jnp.minimum(old + last, end) + (how.slots - 1), jnp.int32(how.slots))
            whole = lax.div(jnp.minimum(old + first + 1, end), jnp.int32(how.slots))
            # The first tile of an overlapping walk lies outside the loop.
            return whole, jnp.where(first < real, every, int(how.overlap))

        fetched = seen_tiles(block_first)[1]
        for i in range(1, WARPGROUPS):
            fetched = jnp.maximum(fetched, seen_tiles(block_first + i * QUERIES)[1])

        @pl.when(warpgroup == WARPGROUPS)
        def fetch():
            plgpu.set_max_registers(40, action="decrease")
            columns = pl.ds(pl.multiple_of(kv_head * d, d), d)

            @pl.loop(0, fetched)
            def each_tile(i):
                slot = lax.rem(i, jnp.int32(how.stages))
                span = pl.ds(pl.multiple_of(i * how.slots, how.slots), how.slots)
                for ref, smem, full, free in ((k_ref, k_smem, k_full, k_free), (v_ref, v_smem, v_full, v_free)):

                    @pl.when(i >= how.stages)
                    def wait(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(ref.at[row, span, columns], smem.at[slot], full.at[slot])

            @pl.loop(jnp.maximum(fetched - how.stages, 0), fetched)
            def drain(i):
                slot = lax.rem(i, jnp.int32(how.stages))
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])

        @pl.when(warpgroup < WARPGROUPS)
        def attend():
            plgpu.set_max_registers(232, action="increase")
            first = block_first + warpgroup * QUERIES
            mine = q_smem.at[warpgroup]
            columns = pl.ds(pl.multiple_of((kv_head * group + member) * d, d), d)
            span = pl.ds(pl.multiple_of(first, QUERIES), QUERIES)
            whole, every = seen_tiles(first)
            whole = jnp.minimum(whole, every)
            square, wide = (QUERIES, how.slots), (QUERIES, d)

            @pl.when(every > 0)
            def ask():
                plgpu.copy_gmem_to_smem(q_ref.at[row, span, columns], mine, asked.at[warpgroup])
                plgpu.barrier_wait(asked.at[warpgroup])

            def turn():
                """Whoever multiplies goes on to compute when the other one is done with that."""
                if how.turns:
                    plgpu.barrier_arrive(turned)
                    plgpu.barrier_wait(turned)

            def softmax(score, i, largest, total, masked: bool):
                """(weights, what earlier sums shrink by, largest, total)."""
                if masked:
                    slot = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=MATRIX) + i * how.slots
                    query = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=MATRIX) + (old + first)
                    score = jnp.where((slot <= query) & (slot < end), score, jnp.float32(NOTHING))
                before, largest = largest, jnp.maximum(largest, jnp.max(score, axis=1) * jnp.float32(scale))
                shrink = jnp.exp2(before - largest)
                weight = jnp.exp2(score * jnp.float32(scale) - along(largest, square))
                return weight, shrink, largest, total * shrink + jnp.sum(weight, axis=1)

            def slot_of(i):
                return lax.rem(i, jnp.int32(how.stages))

            def one_tile(masked: bool):
                def step(i, carry):
                    acc, largest, total = carry
                    slot = slot_of(i)
                    plgpu.barrier_wait(k_full.at[slot])

                    def read_keys(score):
                        plgpu.wgmma(score, mine, k_smem.at[slot].transpose((1, 0)))
                        turn()
                        return score[...]

                    score = pl.run_scoped(read_keys, plgpu.ACC(square, jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    weight, shrink, largest, total = softmax(score, i, largest, total, masked)
                    acc = acc * along(shrink, wide)
                    plgpu.barrier_wait(v_full.at[slot])
                    turn()

                    def read_values(acc):
                        plgpu.wgmma(acc, weight.astype(dtype), v_smem.at[slot])

                    acc = pl.run_state(read_values)(plgpu.ACC.init(acc))
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, largest, total

                return step

            def overlapping_tile(masked: bool):
                """Scores of tile i beside the values of the tile before, whose weights are in the carry."""

                def step(i, carry):
                    acc, weight, largest, total = carry
                    slot, before = slot_of(i), slot_of(i - 1)
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[before])
                    turn()

                    def products(refs):
                        acc, new_weight, largest, total, shrink = refs

                        def both(score):
                            plgpu.wgmma(score, mine, k_smem.at[slot].transpose((1, 0)))
                            plgpu.wgmma(acc, weight, v_smem.at[before])
                            scores = plgpu.wgmma_accumulator_load(score, wait_n=1)
                            plgpu.barrier_arrive(k_free.at[slot])
                            turn()
                            new_weight[...], shrink[...], largest[...], total[...] = softmax(
                                scores, i, largest[...], total[...], masked
                            )

                        pl.run_scoped(both, plgpu.ACC(square, jnp.float32))

                    refs = (plgpu.ACC.init(acc), filled(square, 0, MATRIX), largest, total, filled((QUERIES,), 0, ROW))
                    acc, new_weight, largest, total, shrink = pl.run_state(products)(refs)
                    # The compiler lets products run on only where nothing writes what a later one reads: the weights
                    # are rounded behind the products.
                    acc, new_weight = lax.optimization_barrier((acc, new_weight))
                    plgpu.barrier_arrive(v_free.at[before])
                    return acc * along(shrink, wide), new_weight.astype(dtype), largest, total

                return step

            acc, largest, total = filled(wide, 0, MATRIX), filled((QUERIES,), NOTHING, ROW), filled((QUERIES,), 0, ROW)
            pl.when(warpgroup > 0)(turn)
            if how.overlap:
                plgpu.barrier_wait(k_full.at[0])
                turn()

                def read_first_keys(score):
                    plgpu.wgmma(score, mine, k_smem.at[0].transpose((1, 0)))
                    return score[...]

                score = pl.run_scoped(read_first_keys, plgpu.ACC(square, jnp.float32))
                plgpu.barrier_arrive(k_free.at[0])
                turn()
                weight, _, largest, total = softmax(score, 0, largest, total, True)
                carry = acc, weight.astype(dtype), largest, total
                carry = lax.fori_loop(jnp.int32(1), whole, overlapping_tile(False), carry)
                carry = lax.fori_loop(jnp.maximum(whole, 1), every, overlapping_tile(True), carry)
                acc, weight, _, total = carry
                last = slot_of(every - 1)
                plgpu.barrier_wait(v_full.at[last])

                def read_last_values(acc):
                    plgpu.wgmma(acc, weight, v_smem.at[last])

                acc = pl.run_state(read_last_values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[last])
            else:
                carry = acc, largest, total
                carry = lax.fori_loop(jnp.int32(0), whole, one_tile(False), carry)
                acc, _, total = lax.fori_loop(whole, every, one_tile(True), carry)

            @pl.loop(every, fetched)
            def leave(i):
                slot = slot_of(i)
                turn()
                turn()
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])

            pl.when(warpgroup == 0)(turn)
            token = plgpu.broadcasted_iota(jnp.int32, wide, 0, layout=MATRIX) + first
            y = jnp.where(token < real, acc * along(1 / total, wide), jnp.float32(0))

            @pl.when(first < tokens)
            def write():
                mine[...] = y.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(mine, y_ref.at[row, span, columns])
                plgpu.wait_smem_to_gmem(0)

    def shared(*shape):
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((COPIED, 64)), plgpu.SwizzleTransform(128)))

    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, tokens + -tokens % COPIED, q_heads * d), dtype),
        scratch_types=dict(
            q_smem=shared(WARPGROUPS, QUERIES, d),
            k_smem=shared(how.stages, how.slots, d),
            v_smem=shared(how.stages, how.slots, d),
            asked=plgpu.Barrier(num_barriers=WARPGROUPS),
            k_full=plgpu.Barrier(num_barriers=how.stages),
            v_full=plgpu.Barrier(num_barriers=how.stages),
            k_free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=how.stages),
            v_free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=how.stages),
            turned=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        grid=(rows * q_heads * tiles,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(padded(q), padded(k), padded(v), start.astype(jnp.int32), new.astype(jnp.int32))
    return y[:, :tokens].reshape(rows, tokens, q_heads, d)


def split(number: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder."""
    return lax.div(number, jnp.int32(size)), lax.rem(number, jnp.int32(size))
