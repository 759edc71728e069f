"""The kernels as one operation to tracing: one_operation.py says why."""

import jax

from pallas_kernels.one_operation import one_operation


def decode_attention(operands: list[jax.Array | None]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic_gpu.decode_attention`; the operands that are there differ over the same axes."""
    return tuple(_step.bind(*(x for x in operands if x is not None)))


def _types(qkv, k, v, *rest):
    del rest
    return [qkv.update(shape=(qkv.shape[0], qkv.shape[1] - 2 * k.shape[2], qkv.shape[2])), k, v]


def _kernel(qkv, k, v, length, alive=None):
    from pallas_kernels.decode_attention import mosaic_gpu

    return mosaic_gpu.decode_attention(qkv, k, v, length, alive)


_step = one_operation("decode_attention", _types, _kernel)
