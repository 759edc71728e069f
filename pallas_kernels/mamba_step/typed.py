"""The kernel as one operation whose results differ over the same mesh axes as its operands.

A kernel that writes into its operands cannot be traced on values that differ over mesh axes under
`shard_map(check_vma=True)`: Pallas refuses such references. So tracing sees only this operation and its types, and the
kernel itself is traced, without such types, when the program is lowered.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_step = Primitive("mamba_step")
_step.multiple_results = True


def mamba_step(operands: list[jax.Array | None], **kwargs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic_gpu.mamba_step`; the operands that are there differ over the same axes."""
    present = tuple(x is not None for x in operands)
    return tuple(_step.bind(*(x for x in operands if x is not None), present=present, kwargs=tuple(kwargs.items())))


@_step.def_abstract_eval
def _types(zxbcdt, window, state, *rest, present, kwargs):
    del rest, present, kwargs
    rows, heads, head_dim, _ = state.shape
    return [zxbcdt.update(shape=(rows, heads * head_dim)), window, state]


@functools.partial(mlir.register_lowering, _step, platform="cuda")
def _lower(ctx, *operands, present, kwargs):
    def call(*values):
        # Imported here: programs that never leave the CPU do not load the kernel compiler.
        from pallas_kernels.mamba_step import mosaic_gpu

        values = iter(values)
        return mosaic_gpu.mamba_step(*(next(values) if there else None for there in present), **dict(kwargs))

    def plain(avals):
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
    return mlir.lower_fun(jax.jit(call), multiple_results=True)(ctx, *operands)
