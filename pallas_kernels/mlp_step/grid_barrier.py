"""A barrier over all blocks of a launch that needs no memory from XLA and nothing to be zeroed.

Its word lies in the kernel's own module, so it is zero when the module is loaded, once for each device and process, and
nothing else knows it. In each launch all blocks add to it, together exactly 2**31: the top bit flips when the last one
has come, the others are zero again, and the next launch finds the barrier ready, as it always has as many blocks.

All blocks must be on the device at the same time, and of all launches of one kernel on a device one at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

_NAME = "grid_barrier_word"


def _word(ctx: Any) -> Any:
    """Address of the word."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    names = (op.attributes["sym_name"] for op in ctx.module.body if "sym_name" in op.attributes)
    if _NAME not in {ir.StringAttr(name).value for name in names}:
        with ir.InsertionPoint.at_block_begin(ctx.module.body):
            llvm.GlobalOp(
                i32,
                _NAME,
                ir.Attribute.parse("#llvm.linkage<internal>"),
                value=ir.IntegerAttr.get(i32, 0),
                addr_space=ir.IntegerAttr.get(i32, 1),
            )
    return llvm.AddressOfOp(ir.Type.parse("!llvm.ptr<1>"), _NAME).result


def share(block: int | jax.Array, blocks: int) -> jax.Array:
    """What a block adds: the first one what the others leave of the sum, which holds the top bit back until all are
    there."""
    return jnp.where(block == 0, np.array(2**31 - (blocks - 1), np.uint32).astype(np.int32), jnp.int32(1))


def phase() -> jax.Array:
    """The word before this block has come to the barrier, for `wait`. Whoever calls `arrive` must come behind it."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT))
    def emit(ctx):
        value = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [_word(ctx)],
            # the other bits may differ between threads: blocks are coming already
            "ld.relaxed.gpu.global.b32 $0, [$1];\nand.b32 $0, $0, 0x80000000;",
            "=r,l,~{memory}",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return emit()


def arrive(block: jax.Array, blocks: int) -> None:
    """This block has come, and has written all that others read behind the barrier: by copies that it has waited for,
    or by its own threads. For one warpgroup of each block.

    Args:
        block: its number.
        blocks: of the launch.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(ctx, step):
        utils.warpgroup_barrier()  # every thread of the warpgroup is done before one of them speaks for all
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [_word(ctx), step.registers.item()],
                "fence.proxy.async;\nfence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [$0], $1;",
                "l,r,~{memory}",
                has_side_effects=True,
            )

    emit(share(block, blocks))


def wait(before: jax.Array) -> None:
    """Until all blocks have come; then this warpgroup may read what they wrote, by copies (TMA) too.

    Args:
        before: what `phase` said.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(ctx, before):
        void = ir.Type.parse("!llvm.void")
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(
                void,
                [_word(ctx), before.registers.item()],
                "{\n.reg .pred SAME;\n.reg .b32 NOW;\nAGAIN:\nld.acquire.gpu.global.b32 NOW, [$0];\n"
                "xor.b32 NOW, NOW, $1;\nsetp.ge.s32 SAME, NOW, 0;\n@SAME bra AGAIN;\n}",
                "l,r,~{memory}",
                has_side_effects=True,
            )
        utils.warpgroup_barrier()
        # The copies behind are made by another proxy than the loads in front of them, by a thread that is not known.
        llvm.inline_asm(void, [], "fence.proxy.async;", "~{memory}", has_side_effects=True)

    emit(before)
