"""One token of a Mamba-2 block, between its two projections, in plain JAX. It defines what the kernel computes.

Letters: b rows, m heads, p channels of a head, g groups of B and C (and of the norm), e state size, k taps.
"""

import jax
import jax.numpy as jnp
from jax import lax


def mamba_step(
    zxbcdt: jax.Array,
    window: jax.Array,
    state: jax.Array,
    conv_weight: jax.Array,
    conv_bias: jax.Array | None,
    a_log: jax.Array,
    d: jax.Array,
    dt_bias: jax.Array,
    norm_weight: jax.Array,
    alive: jax.Array | None,
    *,
    groups: int,
    eps: float,
    time_step_limit: tuple[float, float],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.mamba_step` for the arguments. All arithmetic is in float32; the convolution's output is rounded once to
    the dtype of `zxbcdt`, the state to its own, y to that of `zxbcdt`."""
    rows, heads, p, e = state.shape
    inner, bc = heads * p, groups * e
    z, xbc, dt = jnp.split(zxbcdt, (inner, 2 * inner + 2 * bc), axis=-1)

    inputs = jnp.concatenate([window, xbc[:, None]], 1)
    taps = conv_weight[:, 0].astype(jnp.float32)
    y = sum(inputs[:, k].astype(jnp.float32) * taps[:, k] for k in range(taps.shape[1]))
    if conv_bias is not None:
        y = y + conv_bias.astype(jnp.float32)
    xbc = jax.nn.silu(y).astype(zxbcdt.dtype).astype(jnp.float32)
    x, b, c = jnp.split(xbc, (inner, inner + bc), axis=-1)
    x = x.reshape(rows, groups, heads // groups, p)
    b, c = (v.reshape(rows, groups, 1, 1, e) for v in (b, c))

    low, high = time_step_limit
    dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
    dt = jnp.maximum(dt, low) if high == float("inf") else jnp.clip(dt, low, high)
    new_window = inputs[:, 1:]
    if alive is not None:
        dt = jnp.where(alive[:, None] > 0, dt, 0.0)
        new_window = jnp.where(alive[:, None, None] > 0, new_window, window)
    dt = dt.reshape(x.shape[:3])
    decay = jnp.exp(dt * -jnp.exp(a_log).reshape(x.shape[1:3]))
    old = state.astype(jnp.float32).reshape(*x.shape, e)
    new = old * decay[..., None, None] + (dt[..., None] * x)[..., None] * b
    y = jnp.sum(new * c, -1) + d.reshape(*x.shape[1:3], 1) * x

    y = y.reshape(rows, groups, -1) * jax.nn.silu(z.astype(jnp.float32)).reshape(rows, groups, -1)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    y = (y.reshape(rows, inner) * norm_weight.astype(jnp.float32)).astype(zxbcdt.dtype)
    return y, new_window, new.reshape(state.shape).astype(state.dtype)
