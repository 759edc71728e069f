"""A kernel as one operation to tracing, whose results differ over the same mesh axes as its operands.

Under `shard_map(check_vma=True)` some kernels cannot be traced on values that differ over mesh axes: Pallas refuses
references of that type where a kernel writes into its operands, and a loop inside a kernel that carries what it read
beside what a matrix product gave has no type of its own. So tracing sees only this operation and its types, and the
kernel itself is traced, without such types, when the program is lowered.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


def one_operation(name: str, types: Callable[..., list[Any]], kernel: Callable[..., Sequence[jax.Array]]) -> Primitive:
    """The operation `name`, for GPUs.

    Args:
        types: (types of the operands, static keyword arguments) -> types of the results.
        kernel: (operands, static keyword arguments) -> results. It imports the kernel's module itself: programs that
            never leave the CPU do not load the kernel compiler.

    Returns:
        What `bind(*operands, **static)` calls; the operands must differ over the same axes. Static arguments must be
        hashable.
    """
    operation = Primitive(name)
    operation.multiple_results = True
    operation.def_abstract_eval(types)

    def lower(ctx, *operands, **static):
        def plain(avals):
            return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        call = jax.jit(functools.partial(kernel, **static))
        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(operation, lower, platform="cuda")
    return operation
