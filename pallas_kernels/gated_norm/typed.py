"""The kernel as one operation to tracing: one_operation.py says why."""

import jax

from pallas_kernels.one_operation import one_operation


def gated_norm(y, packed, weight, *, groups: int, eps: float, start: int) -> jax.Array:
    """`mosaic_gpu.gated_norm`; the operands differ over the same axes."""
    return _norm.bind(y, packed, weight, groups=groups, eps=eps, start=start)[0]


def _types(y, packed, weight, *, groups, eps, start):
    del weight, groups, eps, start
    return [y.update(dtype=packed.dtype)]


def _kernel(*operands, groups, eps, start):
    from pallas_kernels.gated_norm import mosaic_gpu

    return [mosaic_gpu.gated_norm(*operands, groups=groups, eps=eps, start=start)]


_norm = one_operation("gated_norm", _types, _kernel)
