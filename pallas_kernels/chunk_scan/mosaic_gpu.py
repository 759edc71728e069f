"""The chunk scan on Hopper: matrix products of bfloat16 on WGMMA, the state in registers from chunk to chunk.

A warpgroup owns `width` channels of a head and walks over chunks of 64 tokens. One block holds two warpgroups of the
same group where the group has them, so that B and C are fetched once for both. Of each chunk it computes

    y = exp(decay_l) C S^T + (C B^T * exp(decay_l - decay_s) dt_s) x + D x
    S = exp(decay_last) S + (x * exp(decay_last - decay_l) dt_l)^T B

with S held as [state, channels], so that its size along M is a multiple of 64 for every head_dim. S is in float32
registers; what a product reads is rounded to bfloat16: S, the weights, the scaled x. Nothing is summed but by the
products, so warpgroups share no scratch.

Where heads are too few to fill the GPU the tokens are cut into segments: a first launch computes what each segment adds
to the state, plain JAX adds that up (a few MB), and a second launch walks all segments at the same time, each from its
own state.

The sums of dt * a inside chunks come from plain JAX, as `decays`: in units of log 2, row 0 the decay since the chunk's
start, row 1 the same less log2(dt), so that dt costs no product of its own; a token with dt = 0 has infinity there.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.narrow import store

CHUNK = 64
SHARED_BYTES = 227 << 10  # of a block
MOST_SEGMENTS = 16

MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is shared out.

    Attributes:
        width: channels of a warpgroup, a divisor of head_dim.
        warpgroups: of a block; they belong to one group.
        swizzle: bytes, of every operand of a product.
        stages: chunks in shared memory at a time.
        segments: of the tokens.
        chunks: of a segment.
    """

    width: int
    warpgroups: int
    swizzle: int
    stages: int
    segments: int
    chunks: int


def cut(*, batch: int, tokens: int, heads: int, head_dim: int, state_size: int, groups: int) -> Cut:
    """For shapes that `api.supported` admits."""
    # The state takes width * state_size / 128 registers of a thread, and as much again is needed for the rest.
    width = head_dim if state_size <= 128 else head_dim // (state_size // 128)
    warpgroups = 2 if heads // groups * head_dim % (2 * width) == 0 else 1
    swizzle = next(s for s in (128, 64, 32) if 2 * width % s == 0)
    fixed = warpgroups * CHUNK * width * 4 + warpgroups * state_size * width * 2
    stage = 2 * CHUNK * state_size * 2 + warpgroups * (CHUNK * width * 2 + 2 * CHUNK * 4)
    stages = 3 if fixed + 3 * stage + (4 << 10) <= SHARED_BYTES else 2
    chunks = pl.cdiv(tokens, CHUNK)
    blocks = batch * heads * head_dim // (width * warpgroups)

    def cost(segments):
        """In chunks; the walk that computes states alone is some 2/5 of one."""
        rounds = pl.cdiv(blocks * segments, MULTIPROCESSORS)
        return rounds * pl.cdiv(chunks, segments) * (1.4 if segments > 1 else 1.0) + segments / 4

    segments = min(range(1, min(MOST_SEGMENTS, chunks) + 1), key=cost)
    per_segment = pl.cdiv(chunks, segments)
    return Cut(width, warpgroups, swizzle, stages, pl.cdiv(chunks, per_segment), per_segment)


def chunk_scan(
    xbc: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    d: jax.Array,
    state: jax.Array,
    *,
    groups: int,
    how: Cut | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.chunk_scan` for the arguments; y and the state are float32. The chunk is always 64 tokens.

    Args:
        how: the cut to use instead of the chosen one.
    """
    batch, tokens, _ = xbc.shape
    _, heads, p, e = state.shape
    how = how or cut(batch=batch, tokens=tokens, heads=heads, head_dim=p, state_size=e, groups=groups)
    width, units = how.width, heads * p // how.width
    padded = how.segments * how.chunks * CHUNK
    # Tokens are copied in tiles of 8. What lies behind the last tile reads as zeros and is not written.
    xbc = jnp.pad(xbc, ((0, 0), (0, -tokens % 8), (0, 0)))
    dt = jnp.pad(dt, ((0, 0), (0, padded - tokens), (0, 0)))
    dt = jnp.moveaxis(dt.reshape(batch, padded // CHUNK, CHUNK, heads), 3, 1)  # [b, m, c, l]
    decay = jnp.cumsum(dt * (a * math.log2(math.e))[:, None, None], axis=-1)
    decays = jnp.stack([decay, decay - jnp.log2(dt)], axis=3)
    d = d.astype(jnp.float32)

    starts = jnp.swapaxes(state.astype(jnp.float32).reshape(batch, 1, units, width, e), 3, 4)
    if how.segments > 1:
        added = _launch(how, xbc, decays, d, None, groups=groups, e=e, interpret=interpret)
        whole = jnp.exp2(decay[..., -1].reshape(batch, heads, how.segments, how.chunks).sum(-1))
        kept = jnp.moveaxis(jnp.repeat(whole, units // heads, axis=1), 2, 1)[..., None, None]
        each = [starts[:, 0]]
        for i in range(how.segments - 1):
            each.append(each[-1] * kept[:, i] + added[:, i])
        starts = jnp.stack(each, axis=1)
    y, last = _launch(how, xbc, decays, d, starts, groups=groups, e=e, interpret=interpret)
    return y[:, :tokens], jnp.swapaxes(last, 2, 3).reshape(batch, heads, p, e)


def _launch(how: Cut, xbc, decays, d, starts, *, groups: int, e: int, interpret: Any):
    """The walk over the chunks of each segment.

    Args:
        xbc: [b, t, channels]; t a multiple of 8.
        decays: [b, heads, chunks, 2, CHUNK].
        d: [heads].
        starts: [b, segments, units, e, width] the state before each segment; None: zeros, and only states are wanted.

    Returns:
        Without starts what each segment but the last adds to the state, [b, segments - 1, units, e, width]; with them
        (y [b, t, inner], the state behind the last segment [b, units, e, width]).
    """
    batch, tokens, channels = xbc.shape
    heads = decays.shape[1]
    inner = channels - 2 * groups * e
    width, warpgroups, stages = how.width, how.warpgroups, how.stages
    units = inner // width
    units_per_head, units_per_group = units // heads, units // groups
    outputs = starts is not None

    def tile(shape, dtype, swizzle=how.swizzle):
        itemsize = jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = dict(
        x_shared=tile((stages, warpgroups, CHUNK, width), xbc.dtype),
        b_shared=tile((stages, CHUNK, e), xbc.dtype),
        decays_shared=plgpu.SMEM((stages, warpgroups, 2, CHUNK), jnp.float32),
        full=plgpu.Barrier(num_arrivals=1 + outputs + 2 * warpgroups, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )
    if outputs:
        wide = next(s for s in (128, 64, 32) if 4 * width % s == 0)
        scratch |= dict(
            c_shared=tile((stages, CHUNK, e), xbc.dtype),
            state_shared=tile((warpgroups, e, width), xbc.dtype),
            y_shared=tile((warpgroups, CHUNK, width), jnp.float32, wide),
        )

    def kernel(
        xbc_ref: Any,
        decays_ref: Any,
        *refs: Any,
        x_shared: Any,
        b_shared: Any,
        decays_shared: Any,
        full: Any,
        free: Any,
        c_shared: Any = None,
        state_shared: Any = None,
        y_shared: Any = None,
    ):
        rest: tuple[Any, ...] = refs if outputs else (None, None, None, *refs)
        d_ref, starts_ref, y_ref, last_ref = rest
        row, segment = lax.axis_index("row"), lax.axis_index("segment")
        mine = lax.axis_index("warpgroup")
        first_unit = lax.axis_index("block") * warpgroups
        unit = first_unit + mine
        group = lax.div(first_unit, jnp.int32(units_per_group))

        def fetch(i):
            """Ask for the segment's chunk i."""
            slot = lax.rem(i, jnp.int32(stages))
            chunk = segment * how.chunks + i
            span = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)

            def columns(start, size, shared):
                plgpu.copy_gmem_to_smem(xbc_ref.at[row, span, pl.ds(start, size)], shared, full.at[slot])

            columns(inner + group * e, e, b_shared.at[slot])
            if outputs:
                columns(inner + (groups + group) * e, e, c_shared.at[slot])
            for w in range(warpgroups):
                columns(pl.multiple_of((first_unit + w) * width, width), width, x_shared.at[slot, w])
                head = lax.div(first_unit + w, jnp.int32(units_per_head))
                plgpu.copy_gmem_to_smem(decays_ref.at[row, head, chunk], decays_shared.at[slot, w], full.at[slot])

        @pl.when(mine == 0)
        def _():
            for i in range(min(stages, how.chunks)):
                fetch(jnp.int32(i))

        if outputs:
            state = plgpu.load(starts_ref.at[row, segment, unit], layout=MATRIX, optimized=False)
            skip = d_ref[lax.div(unit, jnp.int32(units_per_head))]
            state_shared[mine] = state.astype(xbc.dtype)
            plgpu.commit_smem()
        else:
            state = plgpu.layout_cast(jnp.zeros((e, width), jnp.float32), MATRIX)

        def one_chunk(i, state):
            slot = lax.rem(i, jnp.int32(stages))
            x_tile, b_tile = x_shared.at[slot, mine], b_shared.at[slot]
            plgpu.barrier_wait(full.at[slot])
            leaving = decays_shared.at[slot, mine, 0]
            entering = decays_shared.at[slot, mine, 1]

            y: Any = None
            if outputs:

                def read_c(pairs, past):
                    c_tile = c_shared.at[slot]
                    plgpu.wgmma(pairs, c_tile, b_tile.transpose((1, 0)))
                    plgpu.wgmma(past, c_tile, state_shared.at[mine])
                    return pairs[...], past[...]

                pairs, past = pl.run_scoped(
                    read_c, plgpu.ACC((CHUNK, CHUNK), jnp.float32), plgpu.ACC((CHUNK, width), jnp.float32)
                )
                since = plgpu.load(leaving, layout=ROW, optimized=False)
                until = plgpu.load(entering, layout=COLUMN, optimized=False)
                square = (CHUNK, CHUNK)
                token = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=MATRIX)
                seen = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=MATRIX)
                decayed = jnp.exp2(_along(since, square, 0) - _along(until, square, 1))
                # Behind the diagonal the exponential may be infinite: it is dropped, not multiplied by 0.
                weights = jnp.where(token >= seen, pairs * decayed, 0.0).astype(xbc.dtype)
                y = past * _along(jnp.exp2(since), (CHUNK, width), 0)

                def read_x(acc):
                    plgpu.wgmma(acc, weights, x_tile)

                y = pl.run_state(read_x)(plgpu.ACC.init(y))

            x = plgpu.load(x_tile, layout=MATRIX).astype(jnp.float32)
            until = plgpu.load(entering, layout=ROW, optimized=False)
            last = decays_shared[slot, mine, 0, CHUNK - 1]
            if outputs:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y_shared[mine] = y + x * skip
            # Behind this barrier no warp reads x any more, neither here nor in a product: it is scaled in place.
            plgpu.commit_smem()
            if outputs:
                start = pl.multiple_of((segment * how.chunks + i) * CHUNK, CHUNK)
                to = y_ref.at[row, pl.ds(start, CHUNK), pl.ds(pl.multiple_of(unit * width, width), width)]
                plgpu.copy_smem_to_gmem(y_shared.at[mine], to)
            x_shared[slot, mine] = (x * _along(jnp.exp2(_filled(last, CHUNK) - until), x.shape, 0)).astype(xbc.dtype)
            plgpu.commit_smem()

            def add(acc):
                plgpu.wgmma(acc, b_tile.transpose((1, 0)), x_tile)

            state = pl.run_state(add)(plgpu.ACC.init(state * jnp.exp2(last)))
            if outputs:
                state_shared[mine] = state.astype(xbc.dtype)
                plgpu.commit_smem()

            @pl.when(i + stages < how.chunks)
            def _():
                plgpu.barrier_arrive(free.at[slot])

            # The slot of the chunk before is asked for again one chunk late, when the other warpgroup has left it too.
            @pl.when((mine == 0) & (i > 0) & (i - 1 + stages < how.chunks))
            def _():
                plgpu.barrier_wait(free.at[lax.rem(i - 1, jnp.int32(stages))])
                fetch(i - 1 + stages)

            return state

        state = lax.fori_loop(jnp.int32(0), jnp.int32(how.chunks), one_chunk, state)
        if outputs:
            plgpu.wait_smem_to_gmem(0)

            @pl.when(segment == how.segments - 1)
            def _():
                store(last_ref.at[row, unit], state)
        else:
            store(last_ref.at[row, segment, unit], state)

    if outputs:
        operands = (xbc, decays, d, starts)
        out_type = (
            jax.ShapeDtypeStruct((batch, tokens, inner), jnp.float32),
            jax.ShapeDtypeStruct((batch, units, e, width), jnp.float32),
        )
    else:
        operands = (xbc, decays)
        out_type = jax.ShapeDtypeStruct((batch, how.segments - 1, units, e, width), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(units // warpgroups, how.segments if outputs else how.segments - 1, batch),
        grid_names=("block", "segment", "row"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)


def _along(value: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector repeated over a matrix, of which it is axis `axis`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, [axis]), MATRIX)


def _filled(value: jax.Array, size: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), ROW)
