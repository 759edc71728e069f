"""One new token of each row against a long cache in two launches: parts of the cache, then the sum over the parts.

Cut of the first: a block per (row, KV head, split). The row's *filled* slots are dealt out to the splits in tiles of
64, evenly, whatever its length; nothing behind them is used, and a split without a tile reads nothing. A block takes
all query heads of its KV head at once, as rows of a 64-row product, so each key and value is read once; online softmax
in float32. The products take a tile's keys and values from shared memory, which has room for two tiles: one is worked
on while the other arrives.

The new token: split 0 starts its softmax from it (score, weight 1, value) and writes it into the cache. Its slot lies
behind the filled ones, so no block uses it from the cache, and the write races with nothing that matters.

A tile's slots behind the row's end may hold anything. Their scores are replaced, and their values, which are multiplied
by weights of zero, become zeros in shared memory first. Where the cache is no whole number of tiles the last tile is
moved back to end with it, and leaves out what the tile before has; copies start at multiples of 8 slots, so the cache
must end with one (`api.supported`).

One warpgroup per block: in jax several would share the scratch memory of a reduction. 98 KiB of shared memory and some
190 registers a thread let two blocks run on a multiprocessor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.narrow import load, store

QUERIES = 64  # rows of a product; query heads of a KV head are the first of them
TILE = 64  # slots
STAGES = 2  # tiles in shared memory
BLOCKS = 2 * MULTIPROCESSORS  # that run at once
LONGEST = 4096  # slots of a split where the cache allows shorter ones: rows differ in length
MOST_SPLITS = 64

MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
NOTHING = float("-inf")  # score of what is not seen


def splits_of(rows: int, kv_heads: int, slots: int) -> int:
    """Splits of a row: enough blocks for the whole device, none much longer than the others."""
    wanted = max(BLOCKS // (rows * kv_heads), pl.cdiv(slots, LONGEST), 1)
    return min(wanted, pl.cdiv(slots, TILE), MOST_SPLITS)


def along(value: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector repeated over a matrix, of which it is axis `axis`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, [axis]), MATRIX)


def filled(shape: tuple[int, ...], value: jax.typing.ArrayLike, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def decode_attention(
    qkv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    alive: jax.Array | None,
    *,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.decode_attention`; api.py has said that the shapes fit.

    Args:
        splits: of each row, at most MOST_SPLITS.
    """
    rows, slots, kv_heads, _ = k.shape
    splits = splits or splits_of(rows, kv_heads, slots)
    params = dict(
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )
    k_buffer, v_buffer = jax.new_ref(k), jax.new_ref(v)
    counts = [x.astype(jnp.int32) for x in (length, alive) if x is not None]
    parts = _attend(qkv, k_buffer, v_buffer, counts, splits, params)
    return _combine(*parts, qkv.dtype, params), jax.freeze(k_buffer), jax.freeze(v_buffer)


def _attend(qkv, k, v, counts: list[jax.Array], splits: int, params: dict) -> tuple[jax.Array, jax.Array]:
    """Write the new token, and attend to each split's part of the row.

    Args:
        counts: length and, where there is one, alive.

    Returns:
        (o [rows, kv_heads, splits, queries, head_dim] float32, each split's own result;
        lse [rows, kv_heads, splits, 64] float32, log of the sum of its weights, -inf where it has seen nothing, and
        then o is not written).
    """
    rows, slots, kv_heads, d = k.shape
    q_heads = qkv.shape[1] - 2 * kv_heads
    queries = q_heads // kv_heads
    dtype = qkv.dtype
    scale = d**-0.5

    def kernel(qkv_ref, k_ref, v_ref, length_ref, *rest, scratch):
        *alive_ref, o_ref, lse_ref = rest
        shared, q_smem, small, k_arrived, v_arrived, q_arrived = scratch
        (k_smem, v_smem), o_smem = shared
        q_rows, p_smem = small
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        q_head, new_k, new_v = head * queries, q_heads + head, q_heads + kv_heads + head
        here = length_ref[row]
        tiles = lax.div(here + (TILE - 1), jnp.int32(TILE))
        first, behind = (lax.div((split + i) * tiles, jnp.int32(splits)) for i in (0, 1))
        count = behind - first
        owns_new = (split == 0) & (here < slots)
        if alive_ref:
            owns_new = owns_new & (alive_ref[0][row] > 0)

        def start_of(tile):
            return jnp.minimum(tile * TILE, slots - TILE)

        keys, values = (k_ref, k_smem, k_arrived), (v_ref, v_smem, v_arrived)

        def fetch(what, i):
            """Ask for the keys or values of the block's tile number i, if there is one."""
            ref, smem, arrived = what

            @pl.when(i < count)
            def _():
                stage = lax.rem(jnp.int32(i), jnp.int32(STAGES))
                span = pl.ds(start_of(first + i), TILE)
                plgpu.copy_gmem_to_smem(ref.at[row, span, head], smem.at[stage], arrived.at[stage])

        for i in range(STAGES):
            fetch(keys, i)
            fetch(values, i)

        @pl.when((count > 0) | owns_new)
        def _():
            # Rows behind the query heads hold what was there; a product's rows do not mix.
            plgpu.copy_gmem_to_smem(
                qkv_ref.at[row, pl.ds(q_head, queries)], q_rows.at[pl.ds(0, queries)], q_arrived.at[0]
            )
            plgpu.barrier_wait(q_arrived.at[0])
            q = load(q_rows, layout=MATRIX)
            store(q_smem, q, optimized=True)
            plgpu.commit_smem()
            k_new = load(qkv_ref.at[row, new_k], layout=COLUMN).astype(jnp.float32)
            v_new = load(qkv_ref.at[row, new_v], layout=COLUMN).astype(jnp.float32)
            score = jnp.sum(q.astype(jnp.float32) * along(k_new, (QUERIES, d), 1), axis=1) * jnp.float32(scale)
            largest = jnp.where(owns_new, score, filled((QUERIES,), NOTHING, ROW))
            total = filled((QUERIES,), jnp.where(owns_new, jnp.float32(1), jnp.float32(0)), ROW)
            acc = jnp.where(owns_new, along(v_new, (QUERIES, d), 1), filled((QUERIES, d), 0, MATRIX))

            def product(a, b, width):
                def run(acc_ref):
                    plgpu.wgmma(acc_ref, a, b)
                    return acc_ref[...]

                return pl.run_scoped(run, plgpu.ACC((QUERIES, width), jnp.float32))

            def one_tile(i, carry):
                acc, largest, total = carry
                stage = lax.rem(i, jnp.int32(STAGES))
                start = start_of(first + i)
                low, high = (first + i) * TILE - start, here - start  # the tile's own slots, counted from its start

                plgpu.barrier_wait(k_arrived.at[stage])
                score = product(q_smem, k_smem.at[stage].transpose((1, 0)), TILE) * jnp.float32(scale)
                fetch(keys, i + STAGES)
                slot = plgpu.broadcasted_iota(jnp.int32, (QUERIES, TILE), 1, layout=MATRIX)
                score = jnp.where((slot >= low) & (slot < high), score, jnp.float32(NOTHING))
                before, largest = largest, jnp.maximum(largest, jnp.max(score, axis=1))
                shrink = jnp.exp(before - largest)
                weight = jnp.exp(score - along(largest, (QUERIES, TILE), 0))
                total = total * shrink + jnp.sum(weight, axis=1)
                store(p_smem, weight.astype(dtype), optimized=True)
                plgpu.barrier_wait(v_arrived.at[stage])

                @pl.when(high < TILE)
                def _():
                    tile = load(v_smem.at[stage], layout=MATRIX)
                    slot = plgpu.broadcasted_iota(jnp.int32, (TILE, d), 0, layout=MATRIX)
                    store(v_smem.at[stage], jnp.where(slot < high, tile, jnp.zeros((), dtype)), optimized=True)

                plgpu.commit_smem()
                acc = acc * along(shrink, (QUERIES, d), 0) + product(p_smem, v_smem.at[stage], d)
                fetch(values, i + STAGES)
                return acc, largest, total

            acc, largest, total = lax.fori_loop(0, count, one_tile, (acc, largest, total))
            store(o_smem, acc / along(total, (QUERIES, d), 0))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, queries)], o_ref.at[row, head, split])
            store(lse_ref.at[row, head, split], largest + jnp.log(total))
            plgpu.wait_smem_to_gmem(0)

        @pl.when((count == 0) & jnp.logical_not(owns_new))
        def _():
            store(lse_ref.at[row, head, split], filled((QUERIES,), NOTHING, ROW))

        @pl.when(owns_new)
        def _():
            layout = plgpu.Layout.WG_STRIDED((d,), vec_size=1)
            for new, ref in ((new_k, k_ref), (new_v, v_ref)):
                store(ref.at[row, here, head], load(qkv_ref.at[row, new], layout=layout))

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((STAGES, TILE, d), dtype, transforms=swizzled)

    def attend(*refs):
        pl.run_scoped(
            lambda *scratch: kernel(*refs, scratch=scratch),
            plgpu.RefUnion([tile, tile], plgpu.SMEM((QUERIES, d), jnp.float32)),
            plgpu.SMEM((QUERIES, d), dtype, transforms=swizzled),
            plgpu.RefUnion(plgpu.SMEM((QUERIES, d), dtype), plgpu.SMEM((QUERIES, TILE), dtype, transforms=swizzled)),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=1),
        )

    return plgpu.kernel(
        attend,
        out_type=(
            jax.ShapeDtypeStruct((rows, kv_heads, splits, queries, d), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, splits, QUERIES), jnp.float32),
        ),
        grid=(rows, kv_heads, splits),
        grid_names=("row", "head", "split"),
        **params,
    )(qkv, k, v, *counts)


def _combine(o: jax.Array, lse: jax.Array, dtype: jnp.dtype, params: dict) -> jax.Array:
    """The splits' results weighted by what each has seen, [rows, q_heads, head_dim]; a block per row and query head."""
    rows, kv_heads, splits, queries, d = o.shape
    layout = plgpu.Layout.WG_STRIDED((d,), vec_size=1)

    def combine(o_ref, lse_ref, y_ref):
        row, q_head = lax.axis_index("row"), lax.axis_index("head")
        head, query = lax.div(q_head, jnp.int32(queries)), lax.rem(q_head, jnp.int32(queries))
        logs = [lse_ref[row, head, split, query] for split in range(splits)]
        parts = [load(o_ref.at[row, head, split, query], layout=layout) for split in range(splits)]
        largest = logs[0]
        for log in logs[1:]:
            largest = jnp.maximum(largest, log)
        largest = jnp.maximum(largest, jnp.float32(-1e38))  # where nothing was seen
        total, y = jnp.float32(0), plgpu.layout_cast(jnp.zeros((d,), jnp.float32), layout)
        for log, part in zip(logs, parts, strict=True):
            weight = jnp.exp(log - largest)
            total = total + weight
            y = y + jnp.where(weight > 0, part, jnp.float32(0)) * weight
        y = y / jnp.where(total > 0, total, jnp.float32(1))
        store(y_ref.at[row, q_head], y.astype(dtype))

    return plgpu.kernel(
        combine,
        out_type=jax.ShapeDtypeStruct((rows, kv_heads * queries, d), dtype),
        grid=(rows, kv_heads * queries),
        grid_names=("row", "head"),
        **params,
    )(o, lse)
