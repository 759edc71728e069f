"""Causal convolution and SiLU in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp
from jax import lax


def causal_conv(
    packed: jax.Array, weight: jax.Array, bias: jax.Array | None, window: jax.Array | None, *, start: int = 0
) -> jax.Array:
    """See `api.causal_conv`. Sums are in float32, with one cast at the end."""
    channels, _, kernel = weight.shape
    x = lax.slice_in_dim(packed, start, start + channels, axis=2)
    if window is None:
        window = jnp.zeros((x.shape[0], kernel - 1, channels), x.dtype)
    taps = weight[:, 0].astype(jnp.float32)
    y = sum(v.astype(jnp.float32) * taps[:, k] for k, v in enumerate(shifted(x, window.astype(x.dtype))))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(x.dtype)


def shifted(x: jax.Array, window: jax.Array) -> list[jax.Array]:
    """The inputs of each tap, [batch, tokens, channels]: x, preceded by window and cut, for the last tap x itself.

    Many tokens are padded and not concatenated: XLA writes a concatenation of which several parts are read to memory,
    and computes paddings where they are read. Of the two that are added one is 0 everywhere.
    """
    t, past = x.shape[1], window.shape[1]
    if t < past:
        inputs = jnp.concatenate([window, x], 1)
        return [inputs[:, k : k + t] for k in range(past + 1)]

    def padded(v, before, behind):
        return jnp.pad(v, ((0, 0), (before, behind), (0, 0)))

    found = [padded(window[:, k:], 0, t - past + k) + padded(x[:, : t - past + k], past - k, 0) for k in range(past)]
    return [*found, x]
