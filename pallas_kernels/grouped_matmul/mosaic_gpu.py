"""Grouped matrix product on Hopper's tensor cores, one launch.

One thread block per multiprocessor goes through the output tiles, outputs of a row tile first, so that blocks that run
at the same time read the same few matrices. Its last warpgroup fetches with TMA, always `stages` steps ahead and on
into the next tile; the others multiply, each its own outputs by all rows of the tile. The product is taken the other
way round (outputs x rows): the tensor core wants 64 outputs or more but is content with 8 rows, and few rows per group
are the common case. Row tiles beyond the `used` first ones cost nothing.

Edges need no code: TMA fills with zeros what lies beyond a matrix and stores nothing there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import MULTIPROCESSORS

DEPTH = 64  # inputs of one step: 128 bytes of bfloat16, the widest swizzle
WIDTH = 64  # outputs of one tensor core instruction and of one store


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How an output tile is cut.

    Attributes:
        outputs: of one warpgroup, a multiple of 64.
        warpgroups: that multiply, beside the one that fetches.
        stages: steps that are in shared memory at once.
    """

    outputs: int
    warpgroups: int
    stages: int

    def shared_bytes(self, row_tile: int) -> int:
        return 2 * (
            self.stages * DEPTH * (self.warpgroups * self.outputs + row_tile) + self.warpgroups * WIDTH * row_tile
        )

    @property
    def registers(self) -> tuple[int, int]:
        """Of a multiplying and of a fetching thread: together not more than a block's 64 K."""
        return {1: (232, 40), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


def default_tiling(row_tile: int, outputs: int) -> Tiling:
    """For many rows the largest tiles that fit; for few, where memory is the limit, many steps on their way."""
    if row_tile >= 64 and outputs > 256:
        return Tiling(outputs=128, warpgroups=2, stages=4)
    return Tiling(outputs=64, warpgroups=2, stages=8 if row_tile <= 64 else 6)


def grouped_matmul(
    x: jax.Array,
    matrices: jax.Array,
    tile_group: jax.Array,
    used: jax.Array,
    *,
    squared_relu: bool,
    tiling: Tiling | None = None,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.grouped_matmul`; api.py has said that the shapes fit.

    Args:
        tiling: instead of the default one.
        blocks: thread blocks.
    """
    rows, depth = x.shape
    _, outputs, _ = matrices.shape
    dtype = x.dtype
    row_tile = rows // tile_group.shape[0]
    cut = tiling or default_tiling(row_tile, outputs)
    groups, stages = cut.warpgroups, cut.stages
    tile = groups * cut.outputs
    steps, tiles = pl.cdiv(depth, DEPTH), pl.cdiv(outputs, tile)

    def swizzled(size):
        """The widest pattern whose tiles divide a dimension of this size: TMA knows no others."""
        width = next(width for width in (64, 32, 16) if size % width == 0)
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)

    def kernel(x_ref, matrices_ref, group_ref, used_ref, y_ref, *, x_shared, m_shared, y_shared, full, free):
        warpgroup = lax.axis_index("warpgroup")
        row_tiles = used_ref[0]
        output_tiles = plgpu.nd_loop((row_tiles, tiles), collective_axes="block")

        def slot_of(info, k):
            step = info.local_index * steps + k
            return step, lax.rem(step, jnp.int32(stages))

        @pl.when(warpgroup == groups)
        def fetch():
            plgpu.set_max_registers(cut.registers[1], action="decrease")

            @output_tiles
            def each_tile(info):
                row, output = info.index
                of = group_ref[row]

                @pl.loop(0, steps)
                def each_step(k):
                    step, slot = slot_of(info, k)

                    @pl.when(step >= stages)
                    def wait():
                        plgpu.barrier_wait(free.at[slot])

                    span = pl.ds(k * DEPTH, DEPTH)
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(row * row_tile, row_tile), span], x_shared.at[slot], full.at[slot]
                    )
                    for i in range(groups):
                        part = pl.ds(output * tile + i * cut.outputs, cut.outputs)
                        plgpu.copy_gmem_to_smem(matrices_ref.at[of, part, span], m_shared.at[slot, i], full.at[slot])

            mine = lax.div(row_tiles * tiles - lax.axis_index("block") + (blocks - 1), jnp.int32(blocks))
            end = mine * steps

            @pl.loop(jnp.maximum(end - stages, 0), end)
            def drain(step):
                plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])

        @pl.when(warpgroup < groups)
        def multiply():
            plgpu.set_max_registers(cut.registers[0], action="increase")

            @output_tiles
            def each_tile(info):
                row, output = info.index

                def accumulate(total):
                    @pl.loop(0, steps)
                    def each_step(k):
                        step, slot = slot_of(info, k)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(total, m_shared.at[slot, warpgroup], x_shared.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # the step before has been read

                        @pl.when(k > 0)
                        def give_back():
                            plgpu.barrier_arrive(free.at[lax.rem(step - 1, jnp.int32(stages))])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot_of(info, jnp.int32(steps - 1))[1]])
                    return total[...]

                y = pl.run_scoped(accumulate, plgpu.ACC((cut.outputs, row_tile))).astype(dtype)
                if squared_relu:
                    y = jnp.maximum(y.astype(jnp.float32), 0.0)
                    y = (y * y).astype(dtype)
                y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
                for first in range(0, cut.outputs, WIDTH):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    y_shared.at[warpgroup].transpose((1, 0))[...] = y[first : first + WIDTH]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        y_shared.at[warpgroup],
                        y_ref.at[
                            pl.ds(row * row_tile, row_tile),
                            pl.ds(output * tile + warpgroup * cut.outputs + first, WIDTH),
                        ],
                    )

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        scratch_types=dict(
            x_shared=plgpu.SMEM((stages, row_tile, DEPTH), dtype, transforms=swizzled(depth)),
            m_shared=plgpu.SMEM((stages, groups, cut.outputs, DEPTH), dtype, transforms=swizzled(depth)),
            y_shared=plgpu.SMEM((groups, row_tile, WIDTH), dtype, transforms=swizzled(outputs)),
            full=plgpu.Barrier(num_arrivals=1 + groups, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, matrices, tile_group, used)
