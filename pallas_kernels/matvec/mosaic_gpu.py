"""Few rows times a large matrix on Hopper's tensor cores, one launch: the matrix comes once, at the memory's rate.

Cut: every thread block owns a few neighbouring outputs (a tile) and all inputs, so no two blocks share a sum. Tiles are
as high as spreads the matrix evenly over the multiprocessors, in steps of 8 outputs; where more than one tile falls to
a block, it goes on to the next without a pause. Its last warpgroup fetches with TMA, as far ahead as shared memory
holds; the others multiply, taking turns by steps along the inputs, and their sums are added in a fixed order.

The product is taken the other way round (outputs x rows): the tensor core wants 64 outputs but is content with 8 rows.
A tile that is no multiple of 64 outputs is covered by products that overlap (equal numbers are computed twice), and one
of fewer than 64 by a product that reads on into what follows in shared memory: such results reach no output.

Rows of x fill the first of a number of groups of 8; what the rest of the last group holds reaches no output either.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132  # of H100 and H200; a kind with fewer runs the blocks that are left afterwards
GROUP = 8  # rows of a swizzled group, outputs as well as rows of x
HEIGHT = 64  # outputs of one tensor core instruction
HIGHEST = 256  # outputs of a tile: the largest side of a TMA box
SHARED_BYTES = 220 * 1024
SLOT_BYTES = 16 * 1024

load = functools.partial(plgpu.load, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Store an array, whatever its layout: jax 0.12 wants to be told that a narrow store is meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def padded(rows: int, step: int = GROUP) -> int:
    return -(-rows // step) * step


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the matrix is cut.

    Attributes:
        outputs: of a tile, a multiple of 8, at most 256.
        depth: inputs of a step, a multiple of 64.
        stages: steps that are in shared memory at once, a multiple of `warpgroups`, two or more for each.
        warpgroups: that multiply, beside the one that fetches.
        blocks: thread blocks, at most.
    """

    outputs: int
    depth: int
    stages: int
    warpgroups: int = 1
    blocks: int = MULTIPROCESSORS

    @property
    def firsts(self) -> tuple[int, ...]:
        """Where in a tile its products start."""
        whole = range(0, self.outputs - HEIGHT + 1, HEIGHT)
        rest = [max(self.outputs - HEIGHT, 0)] if self.outputs % HEIGHT else []
        return (*whole, *rest)

    @property
    def ring_rows(self) -> int:
        """Of the matrix, in shared memory; products of the last slot may read on."""
        return self.stages * self.outputs + max(HEIGHT - self.outputs, 0)

    @property
    def width(self) -> int:
        """Outputs in shared memory, in whole 128 bytes."""
        return -(-self.outputs // HEIGHT) * HEIGHT

    def shared_bytes(self, rows: int) -> int:
        """With results of four bytes."""
        rows = padded(rows)
        ring = 2 * self.depth * (self.ring_rows + self.stages * rows)
        sums = 4 * max(self.warpgroups - 1, 1) * len(self.firsts) * HEIGHT * rows
        return ring + sums + 4 * rows * self.width


def tile_outputs(outputs: int, blocks: int, choices: int = 1) -> int:
    """The tile whose busiest block has least to read, its group of x's rows with each tile; of several, the highest."""

    def busiest(height: int) -> int:
        return -(-choices * -(-outputs // height) // blocks) * (height + GROUP)

    return min(range(GROUP, min(HIGHEST, outputs) + 1, GROUP), key=lambda height: (busiest(height), -height))


def default_tiling(
    rows: int,
    outputs: int,
    choices: int = 1,
    *,
    blocks: int = MULTIPROCESSORS,
    shared_bytes: int = SHARED_BYTES,
    slot_bytes: int = SLOT_BYTES,
    warpgroups: int = 1,
) -> Tiling:
    """Tiles that load all blocks alike, and as many steps on their way as shared memory has room for.

    Args:
        choices: matrices of so many outputs.
        shared_bytes: of a block.
        slot_bytes: of a step of the matrix, about; no step is longer than 256 inputs.
    """
    tile = tile_outputs(outputs, blocks, choices)
    depth = 64 * min(max(slot_bytes // (tile * 128), 1), 4)
    one, two = (Tiling(tile, depth, n, warpgroups, blocks).shared_bytes(rows) for n in (1, 2))
    stages = 1 + (shared_bytes - one) // (two - one)
    return Tiling(tile, depth, max(stages // warpgroups, 2) * warpgroups, warpgroups, blocks)


def pattern(inputs: int) -> int:
    """Inputs of the widest swizzle pattern that divides them: TMA knows no others."""
    return next(width for width in (64, 32, 16) if inputs % width == 0)


def matvec(
    x: jax.Array,
    w: jax.Array,
    chosen: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype,
    squared_relu: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.matvec`, and with `chosen`, which is flat here as x's rows are, `reference.chosen_matvec`; api.py
    has said that the shapes fit.

    Args:
        tiling: instead of the default one.
    """
    *_, outputs, inputs = w.shape
    dtype = x.dtype
    # With a choice, each is one row with a matrix of its own, and tiles are counted through all of them.
    choices, rows = (1, x.shape[0]) if chosen is None else (chosen.shape[0], 1)
    cut = tiling or default_tiling(rows, outputs, choices)
    groups, stages, tile, depth = cut.warpgroups, cut.stages, cut.outputs, cut.depth
    # Each slot has one reader, whose count of its phases holds; it gives a slot back when it has the next one.
    assert stages % groups == 0 and stages >= 2 * groups
    parts, steps = pl.cdiv(outputs, tile), pl.cdiv(inputs, depth)
    tiles = choices * parts
    blocks = min(cut.blocks, tiles)
    wide = pattern(inputs)
    pieces = depth // wide
    swizzle = plgpu.SwizzleTransform(2 * wide)
    tiled = plgpu.TilingTransform((GROUP, wide))
    columns = padded(rows)

    # Rows of x, of which there may be less than 8, go into groups of 8: the copy knows the group as rows of the swizzle
    # pattern, which may be cut anywhere, the product as tiles. The interpreter knows no patterns.
    if interpret is None:
        x_type = plgpu.SMEM((stages, columns // GROUP, pieces, GROUP, wide), dtype, transforms=(swizzle,))
    else:
        x_type = plgpu.SMEM((stages, columns, depth), dtype)

    def x_piece(x_shared, slot, row, count, piece):
        if interpret is None:
            return x_shared.at[slot, row // GROUP, piece, pl.ds(0, count)]
        return x_shared.at[slot, pl.ds(row, count), pl.ds(piece * wide, wide)]

    def x_step(x_shared, slot):
        ref = x_shared.at[slot]
        if interpret is None:
            ref = dataclasses.replace(ref, transforms=(*ref.transforms, tiled.undo(None)))
        return ref.transpose((1, 0))

    def kernel(x_ref, w_ref, *refs, x_shared, w_shared, sums_shared, y_shared, full, free, done, taken):
        *chosen_ref, y_ref = refs
        warpgroup = lax.axis_index("warpgroup")
        my_tiles = plgpu.nd_loop((tiles,), collective_axes="block")

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def first_output(number):
            # The last tile is moved back to end with the matrix: a copy of one row out of shared memory is not cut off
            # at the end of that row. Outputs that two tiles share get the same bits twice (with up
            # to two warpgroups that multiply: the sum of two has one order).
            return jnp.minimum(lax.rem(number, jnp.int32(parts)) * tile, outputs - tile)

        def choice_of(number):
            return lax.div(number, jnp.int32(parts))

        def matrix_of(number):
            return w_ref.at[chosen_ref[0][choice_of(number)]] if chosen_ref else w_ref

        def fetch_w(matrix, number, k, slot):
            plgpu.copy_gmem_to_smem(
                matrix.at[pl.ds(first_output(number), tile), pl.ds(k * depth, depth)],
                w_shared.at[pl.ds(slot * tile, tile)],
                full.at[slot],
            )

        def fetch_x(number, k, slot):
            begin = lax.div(choice_of(number), jnp.int32(choices // x.shape[0])) if chosen_ref else 0 * k
            for row in range(0, rows, GROUP):
                # Whole 128 bytes, as jax asks for: rows that x lacks come as zeros (a start that jax knows would be
                # refused), and other choices' rows reach no output.
                count = padded(min(rows - row, GROUP), 64 // wide)
                for piece in range(pieces):
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(row + begin, count), pl.ds(k * depth + piece * wide, wide)],
                        x_piece(x_shared, slot, row, count, piece),
                        full.at[slot],
                    )

        @pl.when(warpgroup == groups)
        def fetch():
            @my_tiles
            def each_tile(info):
                (number,) = info.index
                matrix = matrix_of(number)

                @pl.loop(0, steps)
                def each_step(k):
                    step = info.local_index * steps + k
                    slot = slot_of(step)

                    @pl.when(step >= stages)
                    def wait():
                        plgpu.barrier_wait(free.at[slot])

                    fetch_w(matrix, number, k, slot)
                    fetch_x(number, k, slot)

            mine = lax.div(tiles - lax.axis_index("block") + (blocks - 1), jnp.int32(blocks))

            @pl.loop(jnp.maximum(mine * steps - stages, 0), mine * steps)
            def drain(step):
                plgpu.barrier_wait(free.at[slot_of(step)])

        @pl.when(warpgroup < groups)
        def multiply():
            @my_tiles
            def each_tile(info):
                (number,) = info.index
                before = info.local_index * steps
                first = lax.rem(groups + warpgroup - lax.rem(before, jnp.int32(groups)), jnp.int32(groups))
                turns = lax.div(steps - first + (groups - 1), jnp.int32(groups))

                def accumulate(*totals):
                    @pl.loop(0, turns)
                    def each_turn(turn):
                        step = before + first + turn * groups
                        slot = slot_of(step)
                        plgpu.barrier_wait(full.at[slot])
                        for start, total in zip(cut.firsts, totals, strict=True):
                            plgpu.wgmma(total, w_shared.at[pl.ds(slot * tile + start, HEIGHT)], x_step(x_shared, slot))
                        plgpu.wgmma_wait(len(totals))  # the turn before has been read

                        @pl.when(turn > 0)
                        def give_back():
                            plgpu.barrier_arrive(free.at[slot_of(step - groups)])

                    plgpu.wgmma_wait(0)

                    @pl.when(turns > 0)
                    def give_back_last():
                        plgpu.barrier_arrive(free.at[slot_of(before + first + (turns - 1) * groups)])

                    return tuple(total[...] for total in totals)

                sums = pl.run_scoped(accumulate, *[plgpu.ACC((HEIGHT, columns))] * len(cut.firsts))

                if groups > 1:

                    @pl.when(warpgroup > 0)
                    def hand_over():
                        for i, value in enumerate(sums):
                            store(sums_shared.at[warpgroup - 1, i], value)
                        plgpu.barrier_arrive(done)
                        plgpu.barrier_wait(taken)

                @pl.when(warpgroup == 0)
                def finish():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if groups > 1:
                        plgpu.barrier_wait(done)
                    for i, (start, value) in enumerate(zip(cut.firsts, sums, strict=True)):
                        for other in range(groups - 1):
                            value = value + load(sums_shared.at[other, i], layout=plgpu.Layout.WGMMA)
                        value = value.astype(out_dtype)
                        if squared_relu:
                            value = jnp.maximum(value.astype(jnp.float32), 0.0)
                            value = (value * value).astype(out_dtype)
                        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                        store(y_shared.at[:, pl.ds(start, HEIGHT)].transpose((1, 0)), value)
                    if groups > 1:
                        plgpu.barrier_arrive(taken)
                    plgpu.commit_smem()
                    for row in range(rows):
                        to = y_ref.at[choice_of(number) if chosen_ref else row]
                        plgpu.copy_smem_to_gmem(
                            y_shared.at[row, pl.ds(0, tile)], to.at[pl.ds(first_output(number), tile)]
                        )

            @pl.when(warpgroup == 0)
            def leave():
                plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows if chosen is None else choices, outputs), out_dtype),
        scratch_types=dict(
            x_shared=x_type,
            w_shared=plgpu.SMEM((cut.ring_rows, depth), dtype, transforms=(tiled, swizzle)),
            sums_shared=plgpu.SMEM((max(groups - 1, 1), len(cut.firsts), HEIGHT, columns), jnp.float32),
            y_shared=plgpu.SMEM((columns, cut.width), out_dtype),
            full=plgpu.Barrier(num_arrivals=1 + pieces * (columns // GROUP), num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=max(groups - 1, 1)),
            taken=plgpu.Barrier(num_arrivals=1),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, w, *(() if chosen is None else (chosen,)))
