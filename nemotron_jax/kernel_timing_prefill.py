"""The operations of a prefill that are no matrix products, one by one; kernel_timing.py measures them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nemotron_jax.cache import Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.kernel_timing import Operation, normal
from nemotron_jax.layers.attention import attend
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.chunk_scan import chunk_scan
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.mamba_step.shapes import TAPS
from pallas_kernels.prefill_attention import prefill_attention

BOTH = ("reference", "mosaic_gpu")


def operations(config: NemotronHConfig, rows: int, tokens: int, dtype: Any) -> Iterator[Operation]:
    """Those that the model's blocks have, for ``rows`` empty rows that read ``tokens`` tokens each."""
    if "M" in config.hybrid_override_pattern:
        yield convolution(config, rows, tokens, dtype)
        yield scan(config, rows, tokens, dtype)
        yield norm(config, rows, tokens, dtype)
    if "*" in config.hybrid_override_pattern:
        yield attention(config, rows, tokens, dtype)


def _sizes(config: NemotronHConfig) -> tuple[int, int, int]:
    """Channels of z and of y; of x, B and C together; of the packed projection."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    channels = inner + 2 * config.n_groups * config.ssm_state_size
    return inner, channels, inner + channels + config.mamba_num_heads


def convolution(config: NemotronHConfig, rows: int, tokens: int, dtype: Any) -> Operation:
    inner, channels, columns = _sizes(config)
    weight, bias = normal(1, (channels, 1, TAPS), jnp.float32, 0.5), normal(2, (channels,), jnp.float32, 0.1)

    def result(implementation, packed, window):
        return causal_conv(packed, weight, bias, window, start=inner, implementation=implementation)

    def call(implementation, packed, window):
        # All of y is kept apart from what follows, or XLA would compute only what the next call takes of it.
        y = lax.optimization_barrier(result(implementation, packed, window))
        return lax.dynamic_update_slice(packed, y[:, -1:], (0, 0, inner)), window

    packed, window = normal(0, (rows, tokens, columns), dtype), normal(3, (rows, TAPS - 1, channels), dtype)
    moved = 2 * rows * tokens * channels * jnp.dtype(dtype).itemsize
    shape = f"{rows} x {tokens} x {channels}"
    return Operation("causal_conv", shape, BOTH, call, packed, [window], moved, result=result)


def scan(config: NemotronHConfig, rows: int, tokens: int, dtype: Any) -> Operation:
    heads, p, e, groups = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups
    inner, channels, _ = _sizes(config)
    a = -jnp.exp(jax.random.uniform(jax.random.key(1), (heads,), minval=-3.0, maxval=2.8))
    d = normal(2, (heads,), jnp.float32)

    def result(implementation, chained, state):
        xbc, dt = chained
        return chunk_scan(
            xbc, dt, a, d, state, groups=groups, head_dim=p, chunk=config.chunk_size, implementation=implementation
        )

    def call(implementation, chained, state):
        xbc, dt = chained
        y, state = lax.optimization_barrier(result(implementation, chained, state))
        xbc = lax.dynamic_update_slice(xbc, (1e-3 * y[:, -1:]).astype(xbc.dtype), (0, 0, 0))
        return (xbc, dt), state

    xbc = jax.nn.silu(normal(0, (rows, tokens, channels), jnp.float32)).astype(dtype)
    dt = jax.nn.softplus(normal(3, (rows, tokens, heads), jnp.float32) - 2)
    state = normal(4, (rows, heads, p, e), jnp.float32)
    moved = rows * tokens * (channels * jnp.dtype(dtype).itemsize + 4 * heads + 4 * inner)
    shape = f"{rows} x {tokens}, {heads} heads of {p}, state {e}, groups {groups}"
    return Operation(
        "chunk_scan", shape, ("reference", "xla", "mosaic_gpu"), call, (xbc, dt), [state], moved, 0, result
    )


def norm(config: NemotronHConfig, rows: int, tokens: int, dtype: Any) -> Operation:
    inner, _, columns = _sizes(config)
    weight = 1 + normal(2, (inner,), jnp.float32, 0.1)

    def result(implementation, chained, packed):
        return gated_norm(
            chained,
            packed,
            weight,
            groups=config.n_groups,
            eps=config.layer_norm_epsilon,
            implementation=implementation,
        )

    def call(implementation, chained, packed):
        found = lax.optimization_barrier(result(implementation, chained, packed))
        return lax.dynamic_update_slice(chained, found[:, -1:].astype(jnp.float32), (0, 0, 0)), packed

    y, packed = normal(0, (rows, tokens, inner), jnp.float32), normal(1, (rows, tokens, columns), dtype)
    moved = rows * tokens * inner * (4 + 2 * jnp.dtype(dtype).itemsize)
    shape = f"{rows} x {tokens} x {inner}, groups {config.n_groups}"
    return Operation("gated_norm", shape, BOTH, call, y, [packed], moved, result=result)


def attention(config: NemotronHConfig, rows: int, tokens: int, dtype: Any) -> Operation:
    q_heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    start, new = jnp.zeros(rows, jnp.int32), jnp.full((rows,), tokens, jnp.int32)

    def result(implementation, q, copy):
        k, v = copy
        if implementation == "xla":
            return attend(q, k, v, Rows(start, new, None, clean=True))
        return prefill_attention(q, k, v, start, new, clean=True, implementation=implementation)

    def call(implementation, q, copy):
        return lax.optimization_barrier(result(implementation, q, copy)), copy

    q = normal(0, (rows, tokens, q_heads, head_dim), dtype)
    copy = tuple(normal(i, (rows, tokens, kv_heads, head_dim), dtype) for i in (1, 2))
    moved = rows * tokens * head_dim * 2 * (q_heads + kv_heads) * jnp.dtype(dtype).itemsize
    flops = 2 * rows * q_heads * head_dim * tokens**2
    shape = f"{rows} x {tokens}, {q_heads} heads of {head_dim}, {kv_heads} KV heads"
    return Operation("prefill_attention", shape, ("xla", "mosaic_gpu"), call, q, [copy], moved, flops, result)
