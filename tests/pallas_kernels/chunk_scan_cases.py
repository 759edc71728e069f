"""Operands for the chunk scan and its definition again, token by token in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np


def problem(seed, shape, batch, tokens, dtype="bfloat16"):
    """(xbc, dt, a, d, state) of fresh values; some step sizes are 0, as at pads, and decays run from slow to fast."""
    heads, p, e, groups = shape
    random = np.random.default_rng(seed)
    xbc = random.standard_normal((batch, tokens, heads * p + 2 * groups * e), np.float32)
    dt = np.logaddexp(0, random.standard_normal((batch, tokens, heads), np.float32) - 2)
    dt = np.where(random.random((batch, tokens, 1)) < 0.1, 0, dt)
    a = -np.exp(random.uniform(-3.0, 2.8, heads))
    d, state = random.standard_normal(heads), random.standard_normal((batch, heads, p, e), np.float32)
    return jnp.asarray(xbc / (1 + np.exp(-xbc)), dtype), *(jnp.asarray(v, jnp.float32) for v in (dt, a, d, state))


def types(shape, batch, tokens, dtype="bfloat16"):
    """The types of what `problem` gives."""
    heads, p, e, groups = shape
    sizes = (batch, tokens, heads), (heads,), (heads,), (batch, heads, p, e)
    xbc = jax.ShapeDtypeStruct((batch, tokens, heads * p + 2 * groups * e), jnp.dtype(dtype))
    return xbc, *(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes)


def float64(xbc, dt, a, d, state, groups):
    """(y, state behind the last token) without chunks and without rounding."""
    xbc, dt, a, d, state = (np.asarray(v).astype(np.float64) for v in (xbc, dt, a, d, state))
    batch, tokens, _ = xbc.shape
    _, heads, p, e = state.shape
    x, b, c = np.split(xbc, [heads * p, heads * p + groups * e], axis=-1)
    x = x.reshape(batch, tokens, heads, p)
    b, c = (np.repeat(v.reshape(batch, tokens, groups, e), heads // groups, axis=2) for v in (b, c))
    y = np.zeros_like(x)
    for i in range(tokens):
        step = dt[:, i, :, None]
        state = state * np.exp(dt[:, i] * a)[..., None, None] + (step * x[:, i])[..., None] * b[:, i, :, None]
        y[:, i] = np.einsum("bmpe,bme->bmp", state, c[:, i]) + d[:, None] * x[:, i]
    return y.reshape(batch, tokens, heads * p), state


def error(found, wanted) -> float:
    """Root mean square of the difference over that of `wanted`; NaN where anything is."""
    found, wanted = (np.asarray(v).astype(np.float64) for v in (found, wanted))
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))
