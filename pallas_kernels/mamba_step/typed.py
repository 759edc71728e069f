"""The kernel as one operation to tracing: one_operation.py says why."""

import jax

from pallas_kernels.one_operation import one_operation


def mamba_step(operands: list[jax.Array | None], **kwargs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic_gpu.mamba_step`; the operands that are there differ over the same axes."""
    present = tuple(x is not None for x in operands)
    return tuple(_step.bind(*(x for x in operands if x is not None), present=present, kwargs=tuple(kwargs.items())))


def _types(zxbcdt, window, state, *rest, present, kwargs):
    del rest, present, kwargs
    rows, heads, head_dim, _ = state.shape
    return [zxbcdt.update(shape=(rows, heads * head_dim)), window, state]


def _kernel(*operands, present, kwargs):
    from pallas_kernels.mamba_step import mosaic_gpu

    values = iter(operands)
    return mosaic_gpu.mamba_step(*(next(values) if there else None for there in present), **dict(kwargs))


_step = one_operation("mamba_step", _types, _kernel)
