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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matvec.product import Product, Shared
from pallas_kernels.matvec.tiling import Tiling, default_tiling


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
    groups, steps = cut.warpgroups, pl.cdiv(inputs, cut.depth)
    # Each slot has one reader, whose count of its phases holds; it gives a slot back when it has the next one.
    assert cut.stages % groups == 0 and cut.stages >= 2 * groups
    blocks = min(cut.blocks, choices * pl.cdiv(outputs, cut.outputs))
    product = Product(rows, outputs, inputs, cut, dtype, blocks, interpret is not None, choices)

    def kernel(x_ref, w_ref, *refs, x_shared, w_shared, sums_shared, y_shared, full, free, done, taken):
        *chosen_ref, y_ref = refs
        shared = Shared(x_shared, w_shared, sums_shared, y_shared, full, free, done, taken)
        warpgroup = lax.axis_index("warpgroup")
        my_tiles = product.each_tile()

        @pl.when(warpgroup == groups)
        def fetch():
            @my_tiles
            def each_tile(info):
                (number,) = info.index
                matrix = w_ref.at[chosen_ref[0][product.choice_of(number)]] if chosen_ref else w_ref

                @pl.loop(0, steps)
                def each_step(k):
                    slot = product.await_slot(shared, info.local_index * steps + k)
                    product.fetch_w(shared, matrix, number, k, slot)
                    choice = product.choice_of(number)
                    begin = lax.div(choice, jnp.int32(choices // x.shape[0])) if chosen_ref else 0 * k
                    product.fetch_x(shared, x_ref, begin, k, slot)

            product.drain(shared, product.mine() * steps)

        @pl.when(warpgroup < groups)
        def multiply():
            @my_tiles
            def each_tile(info):
                (number,) = info.index

                def row_of(row):
                    return y_ref.at[product.choice_of(number) if chosen_ref else row]

                before = info.local_index * steps
                product.multiply(
                    shared, warpgroup, number, before, row_of, out_dtype=out_dtype, squared_relu=squared_relu
                )

            @pl.when(warpgroup == 0)
            def leave():
                plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows if chosen is None else choices, outputs), out_dtype),
        scratch_types=dict(
            x_shared=product.x_type(),
            w_shared=product.w_type(),
            sums_shared=product.sums_type(),
            y_shared=product.y_type(out_dtype),
            full=plgpu.Barrier(num_arrivals=product.arrivals, num_barriers=cut.stages),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=cut.stages),
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
