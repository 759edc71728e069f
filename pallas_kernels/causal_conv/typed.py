"""The kernel as one operation to tracing: one_operation.py says why."""

import jax

from pallas_kernels.one_operation import one_operation


def causal_conv(packed, weight, bias, window, *, start: int) -> jax.Array:
    """`mosaic_gpu.causal_conv`; bias may be None. The operands differ over the same axes."""
    operands = (packed, weight, window, *(() if bias is None else (bias,)))
    return _conv.bind(*operands, start=start)[0]


def _types(packed, weight, *rest, start):
    del rest, start
    return [packed.update(shape=(*packed.shape[:2], weight.shape[0]))]


def _kernel(packed, weight, window, *bias, start):
    from pallas_kernels.causal_conv import mosaic_gpu

    return [mosaic_gpu.causal_conv(packed, weight, bias[0] if bias else None, window, start=start)]


_conv = one_operation("causal_conv", _types, _kernel)
