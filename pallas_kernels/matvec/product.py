"""A product of few rows with the transpose of a large matrix, inside a kernel: its tiles, and how its operands pass
through a ring of slots in shared memory, a step along the inputs in each. mosaic_gpu.py says what it does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matvec.tiling import GROUP, HEIGHT, Tiling, padded
from pallas_kernels.narrow import load, store


def pattern(inputs: int) -> int:
    """Inputs of the widest swizzle pattern that divides them: TMA knows no others."""
    return next(width for width in (64, 32, 16) if inputs % width == 0)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a product uses of a block's shared memory.

    Attributes:
        x: of `Product.x_type`.
        w: of `Product.w_type`.
        sums: [warpgroups - 1, products of a tile, 64, columns], of warpgroups that hand theirs over.
        y: [columns, the tile's width].
        full: barriers, one for each slot, with `Product.arrivals`: its step has come.
        free: barriers, one for each slot: its step has been read.
        done, taken: barriers around `sums`.
    """

    x: Any
    w: Any
    sums: Any
    y: Any
    full: Any
    free: Any
    done: Any
    taken: Any


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part of a product, and what a kernel does for it.

    Steps are numbered through all tiles of a block: a step's slot is its number modulo the stages.

    Attributes:
        rows: of x that a tile is multiplied with.
        choices: matrices of so many outputs; tiles are counted through all of them.
        blocks: that the launch has.
        interpreted: run by the interpreter, which knows no patterns.
    """

    rows: int
    outputs: int
    inputs: int
    cut: Tiling
    dtype: jnp.dtype
    blocks: int
    interpreted: bool
    choices: int = 1

    @property
    def parts(self) -> int:
        """Tiles of one matrix."""
        return pl.cdiv(self.outputs, self.cut.outputs)

    @property
    def tiles(self) -> int:
        return self.choices * self.parts

    @property
    def steps(self) -> int:
        """Of a tile."""
        return pl.cdiv(self.inputs, self.cut.depth)

    @property
    def wide(self) -> int:
        return pattern(self.inputs)

    @property
    def pieces(self) -> int:
        """Patterns of a step."""
        return self.cut.depth // self.wide

    @property
    def columns(self) -> int:
        return padded(self.rows)

    @property
    def arrivals(self) -> int:
        """Copies that fill a slot."""
        return 1 + self.pieces * (self.columns // GROUP)

    @property
    def swizzle(self) -> plgpu.SwizzleTransform:
        return plgpu.SwizzleTransform(2 * self.wide)

    @property
    def tiled(self) -> plgpu.TilingTransform:
        return plgpu.TilingTransform((GROUP, self.wide))

    # Rows of x, of which there may be less than 8, go into groups of 8: the copy knows the group as rows of the swizzle
    # pattern, which may be cut anywhere, the product as tiles.
    def x_type(self) -> Any:
        stages, columns = self.cut.stages, self.columns
        if self.interpreted:
            return plgpu.SMEM((stages, columns, self.cut.depth), self.dtype)
        shape = (stages, columns // GROUP, self.pieces, GROUP, self.wide)
        return plgpu.SMEM(shape, self.dtype, transforms=(self.swizzle,))

    def w_type(self) -> Any:
        return plgpu.SMEM((self.cut.ring_rows, self.cut.depth), self.dtype, transforms=(self.tiled, self.swizzle))

    def sums_type(self) -> Any:
        cut = self.cut
        return plgpu.SMEM((max(cut.warpgroups - 1, 1), len(cut.firsts), HEIGHT, self.columns), jnp.float32)

    def y_type(self, dtype: jnp.dtype) -> Any:
        return plgpu.SMEM((self.columns, self.cut.width), dtype)

    def slot_of(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.cut.stages))

    def first_output(self, number: Any) -> Any:
        """Of a tile. The last tile is moved back to end with the matrix: a copy of one row out of shared memory is not
        cut off at the end of that row. Outputs that two tiles share get the same bits twice (with up to two warpgroups
        that multiply: the sum of two has one order).
        """
        tile = self.cut.outputs
        return jnp.minimum(lax.rem(number, jnp.int32(self.parts)) * tile, self.outputs - tile)

    def choice_of(self, number: Any) -> Any:
        return lax.div(number, jnp.int32(self.parts))

    def each_tile(self) -> Callable[..., Any]:
        """A loop over this block's tiles."""
        return plgpu.nd_loop((self.tiles,), collective_axes="block")

    def mine(self) -> Any:
        """How many tiles this block has."""
        return lax.div(self.tiles - lax.axis_index("block") + (self.blocks - 1), jnp.int32(self.blocks))

    # ------------------------------------------------------------------------------------ the warpgroup that fetches
    def await_slot(self, shared: Shared, step: Any) -> Any:
        """Once it is free, the slot of a step."""
        slot = self.slot_of(step)

        @pl.when(step >= self.cut.stages)
        def wait():
            plgpu.barrier_wait(shared.free.at[slot])

        return slot

    def fetch_w(self, shared: Shared, matrix: Any, number: Any, k: Any, slot: Any) -> None:
        """Ask for the matrix's part of step k of a tile."""
        tile, depth = self.cut.outputs, self.cut.depth
        plgpu.copy_gmem_to_smem(
            matrix.at[pl.ds(self.first_output(number), tile), pl.ds(k * depth, depth)],
            shared.w.at[pl.ds(slot * tile, tile)],
            shared.full.at[slot],
        )

    def fetch_x(self, shared: Shared, x_ref: Any, begin: Any, k: Any, slot: Any) -> None:
        """Ask for x's part of step k, its rows from `begin` on."""
        wide = self.wide
        for row in range(0, self.rows, GROUP):
            # Whole 128 bytes, as jax asks for: rows that x lacks come as zeros (a start that jax knows would be
            # refused), and other choices' rows reach no output.
            count = padded(min(self.rows - row, GROUP), 64 // wide)
            for piece in range(self.pieces):
                if self.interpreted:
                    to = shared.x.at[slot, pl.ds(row, count), pl.ds(piece * wide, wide)]
                else:
                    to = shared.x.at[slot, row // GROUP, piece, pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(row + begin, count), pl.ds(k * self.cut.depth + piece * wide, wide)],
                    to,
                    shared.full.at[slot],
                )

    def drain(self, shared: Shared, steps: Any) -> None:
        """Wait until the last of so many steps have been read."""

        @pl.loop(jnp.maximum(steps - self.cut.stages, 0), steps)
        def each(step):
            plgpu.barrier_wait(shared.free.at[self.slot_of(step)])

    # ------------------------------------------------------------------------------------ the warpgroups that multiply
    def _x_step(self, shared: Shared, slot: Any) -> Any:
        ref = shared.x.at[slot]
        if not self.interpreted:
            ref = dataclasses.replace(ref, transforms=(*ref.transforms, self.tiled.undo(None)))
        return ref.transpose((1, 0))

    def multiply(
        self,
        shared: Shared,
        warpgroup: Any,
        number: Any,
        before: Any,
        row_of: Callable[[int], Any],
        *,
        out_dtype: jnp.dtype,
        squared_relu: bool,
    ) -> None:
        """A tile, from its steps to its results' way out of shared memory.

        Args:
            warpgroup: its number.
            before: steps in front of the tile's.
            row_of: where a row of results goes.
        """
        cut, groups, steps = self.cut, self.cut.warpgroups, self.steps
        first = lax.rem(groups + warpgroup - lax.rem(before, jnp.int32(groups)), jnp.int32(groups))
        turns = lax.div(steps - first + (groups - 1), jnp.int32(groups))

        def accumulate(*totals):
            @pl.loop(0, turns)
            def each_turn(turn):
                step = before + first + turn * groups
                slot = self.slot_of(step)
                plgpu.barrier_wait(shared.full.at[slot])
                for start, total in zip(cut.firsts, totals, strict=True):
                    w = shared.w.at[pl.ds(slot * cut.outputs + start, HEIGHT)]
                    plgpu.wgmma(total, w, self._x_step(shared, slot))
                plgpu.wgmma_wait(len(totals))  # the turn before has been read

                @pl.when(turn > 0)
                def give_back():
                    plgpu.barrier_arrive(shared.free.at[self.slot_of(step - groups)])

            plgpu.wgmma_wait(0)

            @pl.when(turns > 0)
            def give_back_last():
                plgpu.barrier_arrive(shared.free.at[self.slot_of(before + first + (turns - 1) * groups)])

            return tuple(total[...] for total in totals)

        sums = pl.run_scoped(accumulate, *[plgpu.ACC((HEIGHT, self.columns))] * len(cut.firsts))

        if groups > 1:

            @pl.when(warpgroup > 0)
            def hand_over():
                for i, value in enumerate(sums):
                    store(shared.sums.at[warpgroup - 1, i], value)
                plgpu.barrier_arrive(shared.done)
                plgpu.barrier_wait(shared.taken)

        @pl.when(warpgroup == 0)
        def finish():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if groups > 1:
                plgpu.barrier_wait(shared.done)
            for i, (start, value) in enumerate(zip(cut.firsts, sums, strict=True)):
                for other in range(groups - 1):
                    value = value + load(shared.sums.at[other, i], layout=plgpu.Layout.WGMMA)
                value = value.astype(out_dtype)
                if squared_relu:
                    value = jnp.maximum(value.astype(jnp.float32), 0.0)
                    value = (value * value).astype(out_dtype)
                value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                store(shared.y.at[:, pl.ds(start, HEIGHT)].transpose((1, 0)), value)
            if groups > 1:
                plgpu.barrier_arrive(shared.taken)
            plgpu.commit_smem()
            for row in range(self.rows):
                plgpu.copy_smem_to_gmem(
                    shared.y.at[row, pl.ds(0, cut.outputs)],
                    row_of(row).at[pl.ds(self.first_output(number), cut.outputs)],
                )
