"""The kernel as one operation to tracing: one_operation.py says why."""

import jax
import jax.numpy as jnp

from pallas_kernels.one_operation import one_operation


def chunk_scan(xbc, dt, a, d, state, *, groups: int) -> tuple[jax.Array, jax.Array]:
    """`mosaic_gpu.chunk_scan`; the operands differ over the same axes."""
    y, state = _scan.bind(xbc, dt, a, d, state, groups=groups)
    return y, state


def _types(xbc, dt, a, d, state, *, groups):
    del a, d, groups
    _, heads, head_dim, _ = state.shape
    wide = jnp.dtype(jnp.float32)
    return [xbc.update(shape=(*dt.shape[:2], heads * head_dim), dtype=wide), state.update(dtype=wide)]


def _kernel(*operands, groups):
    from pallas_kernels.chunk_scan import mosaic_gpu

    return mosaic_gpu.chunk_scan(*operands, groups=groups)


_scan = one_operation("chunk_scan", _types, _kernel)
