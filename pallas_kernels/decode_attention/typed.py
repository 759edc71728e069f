"""The kernels as one operation whose results differ over the same mesh axes as its operands; mamba_step/typed.py says
why a kernel that writes into its operands needs that.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_step = Primitive("decode_attention")
_step.multiple_results = True


def decode_attention(operands: list[jax.Array | None]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic_gpu.decode_attention`; the operands that are there differ over the same axes."""
    return tuple(_step.bind(*(x for x in operands if x is not None)))


@_step.def_abstract_eval
def _types(qkv, k, v, *rest):
    del rest
    return [qkv.update(shape=(qkv.shape[0], qkv.shape[1] - 2 * k.shape[2], qkv.shape[2])), k, v]


@functools.partial(mlir.register_lowering, _step, platform="cuda")
def _lower(ctx, *operands):
    def call(qkv, k, v, length, alive=None):
        # Imported here: programs that never leave the CPU do not load the kernel compiler.
        from pallas_kernels.decode_attention import mosaic_gpu

        return mosaic_gpu.decode_attention(qkv, k, v, length, alive)

    def plain(avals):
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
    return mlir.lower_fun(jax.jit(call), multiple_results=True)(ctx, *operands)
