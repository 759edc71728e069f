"""The kernel as one operation to tracing: one_operation.py says why."""

import jax

from pallas_kernels.one_operation import one_operation


def prefill_attention(*operands: jax.Array, q_heads: int) -> jax.Array:
    """`mosaic_gpu.prefill_attention`; the operands differ over the same axes."""
    return _attention.bind(*operands, q_heads=q_heads)[0]


def _types(q, k, v, start, new, *, q_heads):
    del k, v, start, new
    rows, tokens, _, d = q.shape
    return [q.update(shape=(rows, tokens, q_heads, d))]


def _kernel(*operands, q_heads):
    from pallas_kernels.prefill_attention import mosaic_gpu

    return [mosaic_gpu.prefill_attention(*operands, q_heads=q_heads)]


_attention = one_operation("prefill_attention", _types, _kernel)
