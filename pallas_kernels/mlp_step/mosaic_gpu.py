"""down(relu(up(x))^2) for a few rows on Hopper, one launch: both matrices come once, at the memory's rate, and the
second one's first steps are on their way while the first product still ends.

Both products are cut as matvec cuts its own (product.py there) and pass through one ring of slots. The block's fetching
warpgroup goes on from the last steps of `up` to the first of `down` without a pause: they are full when all blocks have
written their parts of what lies between the products, h, to global memory and meet at a barrier (grid_barrier.py). Only
the pieces of h, the second product's x, wait for it.

So all blocks must run at the same time. One block's shared memory leaves no room for a second one on a multiprocessor,
and there are no more blocks than multiprocessors: on a device that this process has for itself they do, whatever else
runs there and ends. Two such launches at the same time could each hold multiprocessors that the other waits for: those
of a program must depend on each other, as the layers of a model do.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matvec.product import (
    GROUP,
    HEIGHT,
    MULTIPROCESSORS,
    SHARED_BYTES,
    Product,
    Shared,
    Tiling,
    padded,
    tile_outputs,
)
from pallas_kernels.mlp_step import grid_barrier

UNIT = GROUP * 64  # elements of the ring that slots are made of, of both products
DEEPEST = 256  # inputs of a step
MOST_STAGES = 32  # barriers that jax counts together


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How both matrices are cut.

    Attributes:
        up, down: alike but for outputs and depth.
        units: of a slot, whole groups of 8 rows of either depth.
    """

    up: Tiling
    down: Tiling
    units: int

    def stride(self, cut: Tiling) -> int:
        """Rows from slot to slot."""
        return self.units * UNIT // cut.depth

    def shared_bytes(self, rows: int) -> int:
        """With results of four bytes, and without the barriers."""
        rows, up, down = padded(rows), self.up, self.down
        deep = max(up.depth, down.depth)
        ring = max(2 * cut.depth * cut.ring_rows(self.stride(cut)) for cut in (up, down)) + 2 * up.stages * rows * deep
        sums = 4 * max(up.warpgroups - 1, 1) * max(len(up.firsts), len(down.firsts)) * HEIGHT * rows
        return ring + sums + rows * (2 * up.width + 4 * down.width)


def default_cuts(
    rows: int,
    hidden: int,
    wide: int,
    *,
    blocks: int = MULTIPROCESSORS,
    shared_bytes: int = SHARED_BYTES,
    warpgroups: int = 1,
) -> Cuts:
    """Tiles that load all blocks alike in both products, and steps of such depths that slots of one size waste little:
    of the product that has fewer bytes on their way these are as many as can be.

    Args:
        shared_bytes: of a block.
    """
    heights = [tile_outputs(outputs, blocks) for outputs in (wide, hidden)]
    best: tuple[tuple[bool, int, int], Cuts] | None = None
    for depths in [(a, b) for a in range(64, DEEPEST + 1, 64) for b in range(64, DEEPEST + 1, 64)]:
        filled = [height * depth // UNIT for height, depth in zip(heights, depths, strict=True)]
        step = math.lcm(*(depth // 64 for depth in depths))
        units = padded(max(filled), step)

        def cuts(stages: int, depths=depths, units=units) -> Cuts:
            over_up, over_down = (
                Tiling(height, depth, stages, warpgroups, blocks) for height, depth in zip(heights, depths, strict=True)
            )
            return Cuts(over_up, over_down, units)

        one, two = (cuts(n).shared_bytes(rows) for n in (1, 2))
        stages = min(1 + (shared_bytes - one) // (two - one), MOST_STAGES) // warpgroups * warpgroups
        if stages < 2 * warpgroups:
            continue
        rank = (stages >= 4 * warpgroups, stages * min(filled), sum(depths))
        if best is None or rank > best[0]:
            best = rank, cuts(stages)
    assert best is not None
    return best[1]


def mlp_step(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    out_dtype: jnp.dtype,
    cuts: Cuts | None = None,
    max_blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """See `reference.mlp_step`; api.py has said that the shapes fit.

    Args:
        cuts: instead of the default ones.
        max_blocks: multiprocessors of the device, or fewer.
    """
    (rows, hidden), wide = x.shape, up.shape[0]
    dtype, interpreted = x.dtype, interpret is not None
    cuts = cuts or default_cuts(rows, hidden, wide, blocks=min(max_blocks, MULTIPROCESSORS))
    stages, groups = cuts.up.stages, cuts.up.warpgroups
    assert stages % groups == 0 and stages >= 2 * groups
    assert (cuts.down.stages, cuts.down.warpgroups, cuts.down.blocks) == (stages, groups, cuts.up.blocks)
    tiles = [pl.cdiv(wide, cuts.up.outputs), pl.cdiv(hidden, cuts.down.outputs)]
    blocks = min(cuts.up.blocks, max_blocks, max(tiles))

    def product(outputs: int, inputs: int, cut: Tiling) -> Product:
        stride = max(cuts.up.outputs, cuts.down.outputs) if interpreted else cuts.stride(cut)
        return Product(rows, outputs, inputs, cut, dtype, blocks, interpreted, stride=stride)

    first, second = product(wide, hidden, cuts.up), product(hidden, wide, cuts.down)
    ahead = min(stages, second.steps)
    deep = first if cuts.up.depth >= cuts.down.depth else second

    # The interpreter's slots are of one height and of the larger depth, instead of one size.
    def both(types: list[Any], interpreted_type: Any) -> Any:
        return interpreted_type if interpreted else plgpu.RefUnion(*types)

    def views(ref: Any, axes: int) -> list[Any]:
        """One memory, as each product sees it."""
        if not interpreted:
            return list(ref)
        every = (slice(None),) * (axes - 1)
        return [ref.at[(*every, pl.ds(0, cut.depth))] for cut in (cuts.up, cuts.down)]

    def kernel(
        x_ref, up_ref, down_ref, y_ref, h_ref, *,
        x_shared, w_shared, sums, h_shared, y_shared, full_up, full_down, free, done, taken, known, gate=None,
    ):  # fmt: skip
        (x_up, x_down), (w_up, w_down) = views(x_shared, 3), views(w_shared, 2)
        one = Shared(x_up, w_up, sums, h_shared, full_up, free, done, taken)
        two = Shared(x_down, w_down, sums, y_shared, full_down, free, done, taken)
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        before = first.mine() * first.steps

        @pl.when(warpgroup == groups)
        def fetch():
            phase = None if interpreted else grid_barrier.phase()
            plgpu.barrier_arrive(known)

            @first.each_tile()
            def each_of_up(info):
                (number,) = info.index

                @pl.loop(0, first.steps)
                def each_step(k):
                    slot = first.await_slot(one, info.local_index * first.steps + k)
                    first.fetch_w(one, up_ref, number, k, slot)
                    first.fetch_x(one, x_ref, 0 * k, k, slot)

            @pl.when(second.mine() > 0)
            def early():
                @pl.loop(0, ahead)
                def each_matrix(k):
                    second.fetch_w(two, down_ref, block, k, second.await_slot(two, before + k))

                if interpreted:
                    plgpu.barrier_wait(gate)
                else:
                    grid_barrier.wait(phase)

                # All of this block's first product has been read by now, so x's memory is free, whatever its slots are.
                @pl.loop(0, ahead)
                def each_x(k):
                    second.fetch_x(two, h_ref, 0 * k, k, second.slot_of(before + k))

            @second.each_tile()
            def each_of_down(info):
                (number,) = info.index
                come = info.local_index * second.steps

                @pl.loop(jnp.clip(ahead - come, 0, second.steps), second.steps)
                def each_step(k):
                    slot = second.await_slot(two, before + come + k)
                    second.fetch_w(two, down_ref, number, k, slot)
                    second.fetch_x(two, h_ref, 0 * k, k, slot)

            second.drain(two, before + second.mine() * second.steps)

        @pl.when(warpgroup < groups)
        def multiply():
            @first.each_tile()
            def each_of_up(info):
                (number,) = info.index
                first.multiply(
                    one, warpgroup, number, info.local_index * first.steps, lambda row: h_ref.at[row],
                    out_dtype=dtype, squared_relu=True,
                )  # fmt: skip

            @pl.when(warpgroup == 0)
            def come():
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_wait(known)  # whoever waits at the barrier has looked at it before
                if interpreted:
                    plgpu.barrier_arrive(gate)
                else:
                    grid_barrier.arrive(block, blocks)

            @second.each_tile()
            def each_of_down(info):
                (number,) = info.index
                second.multiply(
                    two, warpgroup, number, before + info.local_index * second.steps, lambda row: y_ref.at[row],
                    out_dtype=out_dtype, squared_relu=False,
                )  # fmt: skip

            @pl.when(warpgroup == 0)
            def leave():
                plgpu.wait_smem_to_gmem(0)

    most = first if len(cuts.up.firsts) >= len(cuts.down.firsts) else second
    rings = plgpu.SMEM(
        (stages * first.slot_rows + max(HEIGHT - min(cuts.up.outputs, cuts.down.outputs), 0), deep.cut.depth), dtype
    )
    # Blocks of a cluster are what the interpreter runs at the same time.
    grid = dict(grid=(blocks,), grid_names=("block",))
    if interpreted:
        grid = dict(cluster=(blocks,), cluster_names=("block",), interpret=interpret)
    y, _ = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, hidden), out_dtype), jax.ShapeDtypeStruct((rows, wide), dtype)),
        scratch_types=dict(
            x_shared=both([first.x_type(), second.x_type()], deep.x_type()),
            w_shared=both([first.w_type(), second.w_type()], rings),
            sums=most.sums_type(),
            h_shared=first.y_type(dtype),
            y_shared=second.y_type(out_dtype),
            full_up=plgpu.Barrier(num_arrivals=first.arrivals, num_barriers=stages),
            full_down=plgpu.Barrier(num_arrivals=second.arrivals, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=max(groups - 1, 1)),
            taken=plgpu.Barrier(num_arrivals=1),
            known=plgpu.Barrier(num_arrivals=1),
            **({"gate": plgpu.ClusterBarrier(collective_axes=("block",))} if interpreted else {}),
        ),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **grid,
    )(x, up, down)
    return y
