"""One token of a Mamba-2 block in one launch: each state element is read once and written once, in place.

Cut: a cluster of blocks per (row, group), each with an equal share of the group's channels in tiles of 64. A block asks
for all it needs at once, its tiles of the state as plain copies into slots of shared memory; it convolves its own
channels and, again in every block, the group's B and C; it updates the state of its channels, reads y out of it and
gates it. The norm needs the whole group's sum of squares: every warp of the cluster puts its part into device memory,
the cluster's barrier orders them, and every block adds all parts in the same order.

Why in place is safe: a tile of the state is written by the block that has copied it, once all of it is there. The
window of x channels is touched by one block alone, each element by threads of one quad (loads, a barrier, stores). The
window of B and C is read by every block of the cluster and written by one of them behind the cluster's barrier.

One warpgroup per block. Values per channel lie as the rows of a matrix fragment do, four neighbouring lanes holding the
same one; sums over the state are then two shuffles and need no shared memory.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.narrow import load, store

TILE = 64  # channels
UNIT = 64  # states of a tile that are in registers at once, at most
PORTABLE_CLUSTER = 8
SHARED_BYTES = 216 * 1024  # for states

MATRIX = plgpu.Layout.WGMMA_8BIT  # [channels, states]: a thread holds 4 neighbours, 16 bytes of float32
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


def along(value: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector repeated over a matrix, of which it is axis `axis`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, [axis]), MATRIX)


def filled(value: jax.Array) -> jax.Array:
    """A scalar for every channel of a tile."""
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)


def blocks_of(group_channels: int) -> int:
    """Blocks of a cluster: as many as share the group's tiles evenly."""
    tiles = group_channels // TILE
    return max(n for n in range(1, PORTABLE_CLUSTER + 1) if tiles % n == 0)


def slots_of(tiles: int, tile_bytes: int, blocks: int) -> int:
    """Tiles of a block's state in shared memory at once: all, where each block has a multiprocessor of its own; else so
    many that three share one, of which some wait for memory while another computes.
    """
    room = SHARED_BYTES if blocks <= MULTIPROCESSORS else SHARED_BYTES // 3
    return max(1, min(tiles, room // tile_bytes))


def silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)) to float32's accuracy everywhere; Mosaic has no log1p."""
    u = jnp.exp(-jnp.maximum(x, -x))
    v = 1.0 + u
    small = v == 1.0
    log1p = jnp.where(small, u, jnp.log(v) * (u / jnp.where(small, 1.0, v - 1.0)))
    return jnp.maximum(x, 0.0) + log1p


def mamba_step(
    zxbcdt: jax.Array,
    window: jax.Array,
    state: jax.Array,
    conv_weight: jax.Array,
    conv_bias: jax.Array | None,
    a_log: jax.Array,
    d: jax.Array,
    dt_bias: jax.Array,
    norm_weight: jax.Array,
    alive: jax.Array | None,
    *,
    groups: int,
    eps: float,
    time_step_limit: tuple[float, float],
    blocks: int | None = None,
    slots: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.mamba_step`; api.py has said that the shapes fit.

    Args:
        blocks: thread blocks of a cluster; a divisor of the group's tiles, at most 8.
        slots: tiles of a block's state that are in shared memory at once.
    """
    rows, heads, p, e = state.shape
    inner, bc = heads * p, groups * e
    taps = conv_weight.shape[-1]
    group_channels = inner // groups
    blocks = blocks or blocks_of(group_channels)
    tiles = group_channels // TILE // blocks
    dtype = zxbcdt.dtype
    low, high = time_step_limit
    # States that are in registers at once: a divisor of e in steps of 16, the least that the layout holds.
    unit = next(n for n in range(min(e, UNIT), 0, -16) if e % n == 0)
    slots = slots or slots_of(tiles, TILE * e * state.dtype.itemsize, rows * groups * blocks)

    # A tile of 64 channels touches `touched` heads: exactly, where tiles and heads are aligned.
    if p % TILE == 0:
        touched = 1
    else:
        touched = TILE // p if TILE % p == 0 else (TILE + p - 2) // p + 1

    def kernel(*refs, shared, states, arrived):
        refs = list(refs)
        zx_ref, window_ref, state_ref, w_ref = refs[:4]
        rest = refs[4:]
        bias_ref = rest.pop(0) if conv_bias is not None else None
        a_ref, d_ref, dt_bias_ref, norm_ref = rest[:4]
        rest = rest[4:]
        alive_ref = rest.pop(0) if alive is not None else None
        y_ref, squares_ref = rest
        row, group = lax.axis_index("row"), lax.axis_index("group")
        part = lax.axis_index("part") if blocks > 1 else jnp.int32(0)
        first_channel = group * group_channels + part * (tiles * TILE)

        def channel(tile):
            return pl.multiple_of(first_channel + tile * TILE, TILE)

        def fetch_state(tile):
            plgpu.copy_gmem_to_smem(
                state_ref.at[row, pl.ds(channel(tile), TILE)],
                states.at[tile % slots],
                arrived.at[tile % slots],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one plain copy, without a descriptor
            )

        # Everything is asked for before anything is waited for: one journey to memory instead of one per stage.
        for tile in range(slots):
            fetch_state(tile)

        def fetch_inputs(start, size, layout):
            """What the convolution of `size` channels from `start` reads: raw inputs, taps, bias."""
            span = pl.ds(start, size)
            raw = [load(window_ref.at[row, k, span], layout=layout) for k in range(taps - 1)]
            raw.append(load(zx_ref.at[row, pl.ds(inner + start, size)], layout=layout))
            weights = [load(w_ref.at[k, span], layout=layout) for k in range(taps)]
            return raw, weights, None if bias_ref is None else load(bias_ref.at[span], layout=layout)

        def convolve(raw, weights, bias):
            """silu(convolution), rounded to the activations' dtype and back to float32."""
            y = None
            for value, weight in zip(raw, weights, strict=True):
                term = value.astype(jnp.float32) * weight
                y = term if y is None else y + term
            return silu(y if bias is None else y + bias).astype(dtype).astype(jnp.float32)

        if e % 128 == 0:
            # Neighbours are loaded together where all rows begin at a multiple of them: heads may be odd in number.
            together = math.gcd(e // 128, zxbcdt.shape[1], window.shape[2])
            pieces = [(0, e, plgpu.Layout.WG_STRIDED((e,), vec_size=together))]
        else:
            pieces = [(min(i, e - TILE), TILE, ROW) for i in range(0, e, TILE)]
        starts = [
            (which, first, inner + which * bc + group * e + first, size, layout)
            for which in range(2)
            for first, size, layout in pieces
        ]
        shared_inputs = [fetch_inputs(start, size, layout) for _, _, start, size, layout in starts]

        def fetch_head(head):
            """Raw dt, its bias, A_log and D of one head: scalars."""
            dt = zx_ref[row, 2 * inner + 2 * bc + head].astype(jnp.float32)
            return dt, dt_bias_ref[head], a_ref[head], d_ref[head]

        def fetch_tile(tile):
            span = pl.ds(channel(tile), TILE)
            head = lax.div(channel(tile), jnp.int32(p))
            return dict(
                inputs=fetch_inputs(channel(tile), TILE, ROW),
                gate=load(zx_ref.at[row, span], layout=ROW),
                weight=load(norm_ref.at[span], layout=ROW),
                heads=[fetch_head(jnp.minimum(head + i, heads - 1) if i else head) for i in range(touched)],
                begins=[(head + i) * p - channel(tile) for i in range(touched)],
            )

        fetched = [fetch_tile(tile) for tile in range(tiles)]
        keep = None if alive_ref is None else alive_ref[row] > 0

        # B and C of the group go through shared memory into the layout of a matrix's columns.
        for (which, first, _, size, _), inputs in zip(starts, shared_inputs, strict=True):
            store(shared.at[which, pl.ds(first, size)], convolve(*inputs))
        plgpu.commit_smem()

        def of_head(dt, bias, a, d):
            """(dt, decay, D) of one head: scalars."""
            dt = jnp.maximum(softplus(dt + bias), jnp.float32(low))
            if high != float("inf"):
                dt = jnp.minimum(dt, jnp.float32(high))
            if keep is not None:
                dt = jnp.where(keep, dt, jnp.float32(0))
            return dt, jnp.exp(dt * -jnp.exp(a)), d

        def by_row(heads, begins):
            """(dt, decay, D) of a tile's channels."""
            values = [filled(v) for v in of_head(*heads[0])]
            index = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
            for head, begin in zip(heads[1:], begins[1:], strict=True):
                values = [
                    jnp.where(index >= begin, filled(new), old) for new, old in zip(of_head(*head), values, strict=True)
                ]
            return values

        gated = []
        for tile in range(tiles):
            dt, decay, skip = by_row(fetched[tile]["heads"], fetched[tile]["begins"])
            x = convolve(*fetched[tile]["inputs"])
            dtx, y = dt * x, skip * x
            plgpu.barrier_wait(arrived.at[tile % slots])
            for first in range(0, e, unit):
                wide = (TILE, unit)
                span = pl.ds(first, unit)
                old = load(states.at[tile % slots, :, span], layout=MATRIX)
                b, c = (load(shared.at[which, span], layout=COLUMN) for which in range(2))
                new = old.astype(jnp.float32) * along(decay, wide, 0)
                new = new + along(dtx, wide, 0) * along(b, wide, 1)
                store(state_ref.at[row, pl.ds(channel(tile), TILE), span], new.astype(state.dtype))
                y = y + plgpu.layout_cast(jnp.sum(new * along(c, wide, 1), axis=1), ROW)
            if tile + slots < tiles:
                plgpu.commit_smem()  # every thread has read the slot
                fetch_state(tile + slots)
            gated.append(y * silu(fetched[tile]["gate"].astype(jnp.float32)))

        squares = None
        for value in gated:
            squares = value * value if squares is None else squares + value * value
        if interpret is None:
            total = _sum_over_cluster(squares, squares_ref.at[row, group], part, blocks)
        else:
            total = filled(jnp.sum(squares))
        scale = lax.rsqrt(total / jnp.float32(group_channels) + jnp.float32(eps))
        for tile, value in enumerate(gated):
            y = (value * scale * fetched[tile]["weight"]).astype(dtype)
            store(y_ref.at[row, pl.ds(channel(tile), TILE)], y)

        def shift(moves):
            for span, raw in moves:
                for k in range(taps - 1):
                    store(window_ref.at[row, k, span], raw[k + 1])

        def if_alive(action):
            if keep is None:
                action()
            else:
                pl.when(keep)(action)

        own = [(pl.ds(channel(tile), TILE), fetched[tile]["inputs"][0]) for tile in range(tiles)]
        common = [
            (pl.ds(start, size), inputs[0])
            for (_, _, start, size, _), inputs in zip(starts, shared_inputs, strict=True)
        ]
        if_alive(lambda: shift(own))
        pl.when(part == 0)(lambda: if_alive(lambda: shift(common)))

    window_buffer, state_buffer = jax.new_ref(window), jax.new_ref(state.reshape(rows, inner, e))
    operands = [zxbcdt, window_buffer, state_buffer, conv_weight[:, 0].astype(jnp.float32).T]
    operands += [] if conv_bias is None else [conv_bias.astype(jnp.float32)]
    operands += [v.astype(jnp.float32) for v in (a_log, d, dt_bias, norm_weight)]
    operands += [] if alive is None else [alive.astype(jnp.int32)]
    y, _ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, inner), dtype),
            jax.ShapeDtypeStruct((rows, groups, 4 * blocks), jnp.float32),
        ),
        scratch_types=dict(
            shared=plgpu.SMEM((2, e), jnp.float32),
            states=plgpu.SMEM((slots, TILE, e), state.dtype),
            arrived=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        ),
        grid=(rows, groups),
        grid_names=("row", "group"),
        **(dict(cluster=(blocks,), cluster_names=("part",)) if blocks > 1 else {}),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)
    return y, jax.freeze(window_buffer), jax.freeze(state_buffer).reshape(state.shape)


def _sum_over_cluster(squares: jax.Array, parts: Any, part: jax.Array, blocks: int) -> jax.Array:
    """The sum of [64] values over all blocks of a cluster, in every channel's place; the same bits in every block.

    Each warp writes the sum of its 16 channels to `parts` [4 * blocks], and behind the barrier every warp adds all of
    them. The barrier also tells that every thread of the cluster has done its loads.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, llvm, vector

    @plgpu.inline_mgpu(
        arg_types=(ROW, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=ROW),
    )
    def emit(ctx, squares, parts, part):
        del ctx
        f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        void = ir.Type.parse("!llvm.void")
        mine = functools.reduce(arith.addf, (vector.extract(v, [], [0]) for v in squares.registers.flat))
        for distance in (4, 8, 16):  # lanes of a quad hold the same channels
            mine = arith.addf(mine, utils.shfl_bfly(mine, distance))
        thread = arith.remui(arith.index_castui(i32, gpu.thread_id(gpu.Dimension.x)), utils.c(128, i32))
        lane, warp = arith.remui(thread, utils.c(32, i32)), arith.divui(thread, utils.c(32, i32))
        start = llvm.ptrtoint(i64, utils.memref_ptr(parts))
        place = arith.addi(arith.muli(part.registers.item(), utils.c(4, i32)), warp)

        def address(index):
            return arith.addi(start, arith.muli(arith.extui(i64, index), utils.c(4, i64)))

        code = "{\n.reg .pred FIRST;\nsetp.eq.s32 FIRST, $2, 0;\n@FIRST st.global.f32 [$0], $1;\n"
        if blocks > 1:
            code += "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n}"
        else:
            code += "bar.sync 0;\n}"
        llvm.inline_asm(void, [address(place), mine, lane], code, "l,f,r,~{memory}", has_side_effects=True)
        theirs = llvm.inline_asm(
            f32,
            [address(lane), lane],
            f"{{\n.reg .pred IN;\nmov.f32 $0, 0f00000000;\nsetp.lt.u32 IN, $2, {4 * blocks};\n"
            "@IN ld.relaxed.gpu.global.f32 $0, [$1];\n}",
            "=&f,l,r,~{memory}",
            has_side_effects=True,
        )
        for distance in (1, 2, 4, 8, 16):
            theirs = arith.addf(theirs, utils.shfl_bfly(theirs, distance))
        return mgpu.FragmentedArray.splat(theirs, (TILE,), layout=squares.layout, is_signed=None)

    return emit(squares, parts, part)
