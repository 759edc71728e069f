"""The kernel as one operation whose results differ over the same mesh axes as its operands.

Inside a kernel what is read from an operand carries its type of differing over mesh axes, and what a matrix product
gives does not, so a loop that carries the state has no type of its own. So tracing sees only this operation and its
types, and the kernel itself is traced, without such types, when the program is lowered.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

_scan = Primitive("chunk_scan")
_scan.multiple_results = True


def chunk_scan(xbc, dt, a, d, state, *, groups: int) -> tuple[jax.Array, jax.Array]:
    """`mosaic_gpu.chunk_scan`; the operands differ over the same axes."""
    y, state = _scan.bind(xbc, dt, a, d, state, groups=groups)
    return y, state


@_scan.def_abstract_eval
def _types(xbc, dt, a, d, state, *, groups):
    del a, d, groups
    _, heads, head_dim, _ = state.shape
    wide = jnp.dtype(jnp.float32)
    return [xbc.update(shape=(*dt.shape[:2], heads * head_dim), dtype=wide), state.update(dtype=wide)]


@functools.partial(mlir.register_lowering, _scan, platform="cuda")
def _lower(ctx, *operands, groups):
    def call(*values):
        # Imported here: programs that never leave the CPU do not load the kernel compiler.
        from pallas_kernels.chunk_scan import mosaic_gpu

        return mosaic_gpu.chunk_scan(*values, groups=groups)

    def plain(avals):
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
    return mlir.lower_fun(jax.jit(call), multiple_results=True)(ctx, *operands)
