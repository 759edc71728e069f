"""All-reduce + residual + RMSNorm in exactly one launch: no barrier in front, no memory to zero, no round at the end.

Every 32-bit word of a row travels in one 8-byte packet with a word that says which call it belongs to. A device writes
its rows as packets into the staging buffers of its peers and reads theirs out of its own until every packet carries the
number of this call. The data announces itself, so there is no fence, no separate flag and no acknowledgement between
the moment a row is computed and the moment a peer can use it; the price is twice the bytes on the link, which for the
messages of a decode step is nothing against a round trip.

State (flags_state.py), per device: stage [blocks, 2, world, rows, words] and control, which ends in epoch [blocks].
Block b in its call number e = epoch[b] + 1, on every device alike:

1. reads epoch[b] (written by its own previous call, in the same stream);
2. writes its rows into stage[b, e % 2, own rank] of every peer, each packet with the tag e;
3. reads stage[b, e % 2, r] for r in rank order until all tags are e, and adds in float32;
4. adds the residual, rounds, normalises, stores; sets epoch[b] = e.

Why this is right, whatever the timing:
* A packet is one naturally aligned 64-bit access, relaxed at system scope, which the PTX memory model makes
  indivisible: a tag never arrives without its data. No ordering between packets is assumed.
* A packet of call e overwrites one of call e - 2 of the same block. When device s writes it, its kernel e - 1 has
  ended, so it has seen tags e - 1 of device d in this block; d wrote those in its kernel e - 1, which began after its
  kernel e - 2 had ended (one stream per device), and only that kernel read the overwritten packets. Two buffers are
  therefore enough, and nobody acknowledges anything.
* Buffers belong to blocks, not to rows: calls with different token counts use different numbers of blocks, and a
  block's count goes up only in calls that it takes part in. The count is the same on every device because the calls
  are.
* Tags are (e modulo 2**31) with the top bit set, so zeroed memory carries no tag. A stale tag could only be taken for a
  fresh one if a block skipped a row of its buffer for exactly a multiple of 2**31 calls.
* `partial` is read by its own device only: XLA may reuse it at once.
* XLA may merge two identical calls or drop an unused one: it then does so in the program of every device, and the
  counts still agree. What it must not do is run two calls on one state at the same time; see flags_state.py.
* A device waits for the same block of every peer, so all blocks of all devices must get to run at the same time, and
  nothing else may wait for them: `max_blocks` when ranks share a GPU.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.allreduce_rms_norm import layout
from pallas_kernels.allreduce_rms_norm.flags_state import FlagsState, table_words
from pallas_kernels.inline import lasting
from pallas_kernels.rms_norm import rows
from pallas_kernels.rms_norm.windows import THREADS, Window
from pallas_kernels.rms_norm.windows import windows as cut

# 16-byte loads in flight per thread while polling: four registers each.
LOADS_AT_ONCE = 16


def flags(
    partial: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    state: FlagsState,
    *,
    world: int,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
    max_blocks: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.exact`; partial and residual are [tokens, hidden] with tokens >= 1, and support.py has said
    yes."""
    tokens, hidden = partial.shape
    windows = cut(hidden)
    blocks = min(tokens, state.blocks, max_blocks or state.blocks)
    rows_per_block = -(-tokens // blocks)
    uneven = tokens % blocks != 0

    counters = table_words(world)

    def kernel(partial_ref, residual_ref, weight_ref, stage_ref, control_ref, normed_ref, new_residual_ref):
        # Not lax.axis_index of the mesh axis: asking XLA for the place in the mesh would make this a collective kernel.
        rank = control_ref[0, 0]
        block = lax.axis_index("block")
        call = control_ref[0, jnp.int32(counters) + block] + jnp.int32(1)
        tag = call | jnp.int32(-(2**31))
        buffer = call & jnp.int32(1)

        def row_of(i):
            return block + i * jnp.int32(blocks)

        def if_row(i, action):
            if uneven:
                pl.when(row_of(i) < tokens)(action)
            else:
                action()

        def own(i):
            return [rows.load(partial_ref.at[row_of(i)], window) for window in windows]

        def send(i, values):
            _send(values, stage_ref, stage_ref.at[0, block, buffer, rank, i], control_ref, tag, rank, world, windows)

        def finish(i, values):
            row = row_of(i)
            # Asked for before the wait, so that they travel at the same time as the packets.
            residuals = [rows.load(residual_ref.at[row], window) for window in windows]
            weights = [rows.load(weight_ref, window) for window in windows]
            sources = [stage_ref.at[0, block, buffer, other, i] for other in range(world)]
            totals = _receive_and_sum(values, sources, tag, rank, windows)
            rounded = []
            for window, total, old in zip(windows, totals, residuals, strict=True):
                y = rows.add_and_round(total, old)
                new_residual_ref[row, rows.part(window)] = y
                rounded.append(y)
            rstd = rows.reciprocal_rms(rounded, windows, hidden=hidden, eps=eps)
            for window, y, scale in zip(windows, rounded, weights, strict=True):
                normed_ref[row, rows.part(window)] = rows.scale(
                    y, rstd, scale, unit_offset=unit_offset, out_dtype=out_dtype
                )

        if rows_per_block == 1:
            values = own(jnp.int32(0))
            send(jnp.int32(0), values)
            finish(jnp.int32(0), values)
        else:
            # All rows leave before the first is waited for.
            rows.each_row(rows_per_block, lambda i: if_row(i, lambda: send(i, own(i))))
            rows.each_row(rows_per_block, lambda i: if_row(i, lambda: finish(i, own(i))))
        _store_scalar(control_ref.at[0, jnp.int32(counters) + block], call)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, hidden), out_dtype),
            jax.ShapeDtypeStruct((tokens, hidden), residual.dtype),
        ),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=rows.compiler_params(),
    )(partial, residual, weight, state.stage, state.control)


def _send(
    values: Sequence[jax.Array],
    stage: Any,
    row: Any,
    control: Any,
    tag: jax.Array,
    rank: jax.Array,
    world: int,
    windows: Sequence[Window],
) -> None:
    """Write one row as packets into the stage of every peer.

    `row` is where the row would go in the own `stage`; on a peer it lies equally far from the stage's start.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    @plgpu.inline_mgpu(
        arg_types=(
            [rows.registers(window) for window in windows],
            lasting(),
            lasting(),
            lasting(),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
        )
    )
    def emit(ctx, values, stage, row, control, tag, rank):
        del ctx
        i64, void = ir.IntegerType.get_signless(64), ir.Type.parse("!llvm.void")
        rank_value, tag_value = rank.registers.item(), tag.registers.item()
        table = llvm.ptrtoint(i64, utils.memref_ptr(control))

        def entry(place):  # of the table of addresses
            pointer = llvm.inttoptr(llvm.PointerType.get(), arith.addi(table, utils.c(8 * place, i64)))
            return llvm.load(i64, pointer)

        start = llvm.ptrtoint(i64, utils.memref_ptr(stage))
        # A copy of the stage would not be where the peers write, a copy of the counters would forget calls: stop.
        for address, expected in ((start, entry(1)), (table, entry(2))):
            llvm.inline_asm(
                void,
                [address, expected],
                "{\n.reg .pred MOVED;\nsetp.ne.u64 MOVED, $0, $1;\n@MOVED trap;\n}",
                "l,l",
                has_side_effects=True,
            )
        offset = arith.subi(_thread_pointer(row, windows, values[0].mlir_dtype), start)
        pointers = [arith.addi(entry(3 + other), offset) for other in range(world)]
        offset = 0
        for value in values:
            (vector,) = value.registers.flat
            words = _to_words(vector)
            n = len(words)
            tag_at, rank_at = world + n, world + n + 1
            code = ["{", f".reg .b64 D<{n}>;", ".reg .pred PEER;"]
            code += [f"mov.b64 D{i}, {{${world + i}, ${tag_at}}};" for i in range(n)]
            for other in range(world):
                code.append(f"setp.ne.s32 PEER, ${rank_at}, {other};")
                if n == 1:
                    code.append(f"@PEER st.relaxed.sys.global.b64 [${other}+{offset}], D0;")
                for pair in range(n // 2):
                    place, data = offset + pair * 16 * THREADS, f"{{D{2 * pair}, D{2 * pair + 1}}}"
                    code.append(f"@PEER st.relaxed.sys.global.v2.b64 [${other}+{place}], {data};")
            code.append("}")
            llvm.inline_asm(
                void,
                [*pointers, *words, tag_value, rank_value],
                "\n".join(code),
                ",".join(["l"] * world + ["r"] * (n + 2)) + ",~{memory}",
                has_side_effects=True,
            )
            offset += 8 * n * THREADS

    emit(list(values), stage, row, control, tag, rank)


def _receive_and_sum(
    values: Sequence[jax.Array], sources: Sequence[Any], tag: jax.Array, own_rank: jax.Array, windows: Sequence[Window]
) -> list[jax.Array]:
    """Wait for one row of every rank and add them up in float32 in rank order; the own row comes from registers."""
    world = len(sources)
    pieces = [(rank, w) for rank in range(world) for w in range(len(windows))]
    loads_each = max(1, layout.words_per_thread(windows[0], values[0].dtype) // 2)
    step = max(1, LOADS_AT_ONCE // loads_each)
    totals: list[Any] = [None] * len(windows)
    for first in range(0, len(pieces), step):
        batch = pieces[first : first + step]
        for (_, w), value in zip(batch, _receive(values, sources, tag, own_rank, windows, batch), strict=True):
            value = value.astype(jnp.float32)
            totals[w] = value if totals[w] is None else totals[w] + value
    return totals


def _receive(values, sources, tag, own_rank, windows, batch) -> list[jax.Array]:
    """Poll the packets of `batch`, a list of (rank, window), until all carry the tag; returns their data."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    ranks = sorted({rank for rank, _ in batch})

    @plgpu.inline_mgpu(
        arg_types=(
            [rows.registers(windows[w]) for _, w in batch],
            [lasting()] * len(ranks),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
        ),
        return_type=[
            plgpu.ShapeDtypeStruct((windows[w].size,), values[w].dtype, layout=rows.registers(windows[w]))
            for _, w in batch
        ],
    )
    def emit(ctx, values, sources, tag, own_rank):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        own_words = [_to_words(value.registers.flat[0]) for value in values]
        n = len(own_words[0])
        total = n * len(batch)
        pointers = [_thread_pointer(source, windows, values[0].mlir_dtype) for source in sources]
        tag_value, rank_value = tag.registers.item(), own_rank.registers.item()
        pointer_at, tag_at, rank_at = total, total + len(pointers), total + len(pointers) + 1
        code = ["{", f".reg .pred LATE, ODD, PEER<{len(ranks)}>;", ".reg .b32 T;", f".reg .b64 D<{total}>;"]
        code += [f"setp.ne.s32 PEER{k}, ${rank_at}, {rank};" for k, rank in enumerate(ranks)]
        code.append("AGAIN:")
        for b, (rank, w) in enumerate(batch):
            offset = 8 * n * THREADS * w
            pointer = pointer_at + ranks.index(rank)
            if n == 1:
                code.append(f"ld.relaxed.sys.global.b64 D{b}, [${pointer}+{offset}];")
            for pair in range(n // 2):
                d = b * n + 2 * pair
                at = offset + pair * 16 * THREADS
                code.append(f"ld.relaxed.sys.global.v2.b64 {{D{d}, D{d + 1}}}, [${pointer}+{at}];")
        code.append("setp.ne.s32 LATE, 0, 0;")
        for b, (rank, _) in enumerate(batch):
            for d in range(b * n, b * n + n):
                code.append(f"mov.b64 {{${d}, T}}, D{d};")
                code.append(f"setp.ne.and.b32 ODD, T, ${tag_at}, PEER{ranks.index(rank)};")
                code.append("or.pred LATE, LATE, ODD;")
        code += ["@LATE bra AGAIN;", "}"]
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * total)})>") if total > 1 else i32
        received = llvm.inline_asm(
            struct,
            [*pointers, tag_value, rank_value],
            "\n".join(code),
            ",".join(["=&r"] * total + ["l"] * len(pointers) + ["r", "r"]) + ",~{memory}",
            has_side_effects=True,
        )
        words = [llvm.extractvalue(i32, received, [i]) for i in range(total)] if total > 1 else [received]
        results = []
        for b, ((rank, _), value) in enumerate(zip(batch, values, strict=True)):
            is_own = arith.cmpi(arith.CmpIPredicate.eq, rank_value, arith.constant(i32, rank))
            chosen = [arith.select(is_own, own_words[b][i], words[b * n + i]) for i in range(n)]
            vector = _from_words(chosen, value.registers.flat[0].type)
            results.append(
                mgpu.FragmentedArray(
                    _registers=np.array([vector], dtype=object),
                    _layout=value.layout,
                    _is_signed=None,
                )
            )
        return results

    return emit(
        [values[w] for _, w in batch],
        [sources[rank] for rank in ranks],
        tag,
        own_rank,
    )


def _store_scalar(target: Any, value: jax.Array) -> None:
    """Store one word, once every thread of the block has come here."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(lasting(), plgpu.Layout.WG_SPLAT))
    def emit(ctx, target, value):
        del ctx
        utils.warpgroup_barrier()
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [utils.memref_ptr(target), value.registers.item()],
                "st.relaxed.sys.global.b32 [$0], $1;",
                "l,r,~{memory}",
                has_side_effects=True,
            )

    emit(target, value)


def _thread_pointer(ref, windows: Sequence[Window], element):
    """Address of this thread's first packet in a row of the stage: packets of neighbouring threads lie side by side."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, llvm

    i64 = ir.IntegerType.get_signless(64)
    stride = min(16, 8 * layout.words_of(windows[0], utils.bitwidth(element)))
    thread = arith.remui(gpu.thread_id(gpu.Dimension.x), utils.c(THREADS, ir.IndexType.get()))
    offset = arith.muli(arith.index_castui(i64, thread), utils.c(stride, i64))
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), offset)


def _to_words(vector):
    """A thread's elements as 32-bit words; a lone 16-bit element takes the lower half of one."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith
    from jaxlib.mlir.dialects import vector as vector_dialect

    i32 = ir.IntegerType.get_signless(32)
    kind = ir.VectorType(vector.type)
    size = kind.shape[0] * utils.bitwidth(kind.element_type)
    if size < 32:
        i16 = ir.IntegerType.get_signless(16)
        half = vector_dialect.bitcast(ir.VectorType.get((1,), i16), vector)
        return [arith.extui(i32, vector_dialect.extract(half, [], [0]))]
    whole = vector_dialect.bitcast(ir.VectorType.get((size // 32,), i32), vector)
    return [vector_dialect.extract(whole, [], [i]) for i in range(size // 32)]


def _from_words(words, kind):
    """The inverse of `_to_words`."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith
    from jaxlib.mlir.dialects import vector as vector_dialect

    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    shape = ir.VectorType(kind)
    if shape.shape[0] * utils.bitwidth(shape.element_type) < 32:
        whole = vector_dialect.from_elements(ir.VectorType.get((1,), i16), [arith.trunci(i16, words[0])])
    else:
        whole = vector_dialect.from_elements(ir.VectorType.get((len(words),), i32), words)
    return vector_dialect.bitcast(kind, whole)
