"""Any number of tokens of a Mamba-2 block's state space, in plain JAX and float32. It defines what the others compute.

State of a head: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, output y_t = S_t C_t + D x_t. Computed by chunks: quadratic
inside a chunk, a recurrence over the chunks' states.

Letters: b batch, t tokens, c chunks, l and s positions in a chunk, m heads, p channels of a head, g groups of B and C,
r heads of a group, e state size.
"""

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST


def chunk_scan(
    xbc: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    d: jax.Array,
    state: jax.Array,
    *,
    groups: int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.chunk_scan` for the arguments; y and the state are float32."""
    batch, t, _ = xbc.shape
    _, heads, p, e = state.shape
    g, r = groups, heads // groups
    inner = heads * p
    pad = -t % chunk

    def chunks(v, *shape):
        v = jnp.pad(v.astype(jnp.float32), ((0, 0), (0, pad), (0, 0)))
        return v.reshape(batch, (t + pad) // chunk, chunk, *shape)

    x, b_in, c_in = jnp.split(xbc, (inner, inner + g * e), axis=-1)
    x, b_in, c_in, dt = chunks(x, g, r, p), chunks(b_in, g, e), chunks(c_in, g, e), chunks(dt, g, r)
    a, d = a.reshape(g, r), d.reshape(g, r)
    decay = jnp.cumsum(dt * a, axis=2)  # [b, c, l, g, r], log of the decay since the chunk's start
    last = decay[:, :, -1:]

    # within a chunk: token l sees token s <= l through exp(decay_l - decay_s) dt_s C_l.B_s; masked before the
    # exponential
    cb = jnp.einsum("bclge,bcsge->bcgls", c_in, b_in, precision=HIGHEST)
    moved = jnp.moveaxis(decay, 2, -1)  # [b, c, g, r, l]
    difference = moved[..., :, None] - moved[..., None, :]
    seen = jnp.tril(jnp.ones((chunk, chunk), bool))
    weights = jnp.exp(jnp.where(seen, difference, -jnp.inf)) * cb[:, :, :, None] * jnp.moveaxis(dt, 2, -1)[..., None, :]
    y = jnp.einsum("bcgrls,bcsgrp->bclgrp", weights, x, precision=HIGHEST)

    # what each chunk adds to the state, and the state each chunk starts from
    scaled = x * (dt * jnp.exp(last - decay))[..., None]
    added = jnp.einsum("bclgrp,bclge->bcgrpe", scaled, b_in, precision=HIGHEST)
    kept = jnp.exp(last[:, :, 0])  # [b, c, g, r]
    state, before = over_chunks(state.astype(jnp.float32).reshape(batch, g, r, p, e), added, kept)
    y = y + jnp.einsum("bclge,bcgrpe->bclgrp", c_in, before, precision=HIGHEST) * jnp.exp(decay)[..., None]
    y = y + d[..., None] * x
    return y.reshape(batch, t + pad, inner)[:, :t], state.reshape(batch, heads, p, e)


def over_chunks(
    state: jax.Array, added: jax.Array, kept: jax.Array, *, dtype=jnp.float32, unroll: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The recurrence S <- kept S + added over the chunks, in float32.

    Args:
        state: [b, ..., p, e] before the first chunk.
        added: [b, c, ..., p, e].
        kept: [b, c, ...].
        dtype: to which the states before each chunk are rounded where they are handed out.
        unroll: chunks in one iteration of the loop.

    Returns:
        (state behind the last chunk, the states before each chunk [b, c, ..., p, e]).
    """

    def one(s, chunk_of):
        add, keep = chunk_of
        return s * keep[..., None, None] + add, s.astype(dtype)

    state, before = lax.scan(one, state, (jnp.moveaxis(added, 1, 0), jnp.moveaxis(kept, 1, 0)), unroll=unroll)
    return state, jnp.moveaxis(before, 0, 1)
