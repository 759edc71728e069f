"""The chunk scan for bfloat16 models in plain JAX: matrix products of bfloat16 operands, summed in float32.

Rounded to bfloat16 are what mamba_ssm's kernels round before a product: the weights of a chunk, x times its share of
the state, and the state that a chunk starts from. C.B, step sizes, decays, their sums, and the state from chunk to
chunk stay in float32. Letters as in reference.py.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_scan.reference import over_chunks

UNROLL = 8


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
    narrow = xbc.dtype

    def chunks(v, *shape):
        v = jnp.pad(v, ((0, 0), (0, pad), (0, 0)))
        return v.reshape(batch, (t + pad) // chunk, chunk, *shape)

    def product(spec, left, right):
        return jnp.einsum(spec, left.astype(narrow), right.astype(narrow), preferred_element_type=jnp.float32)

    x, b_in, c_in = jnp.split(xbc, (inner, inner + g * e), axis=-1)
    x, b_in, c_in = chunks(x, g, r, p), chunks(b_in, g, e), chunks(c_in, g, e)
    dt = jnp.moveaxis(chunks(dt, g, r), 2, -1)  # [b, c, g, r, l]
    a, d = a.reshape(g, r), d.reshape(g, r)
    decay = jnp.cumsum(dt * a[..., None], axis=-1)
    last = decay[..., -1:]

    cb = product("bclge,bcsge->bcgls", c_in, b_in)
    seen = jnp.tril(jnp.ones((chunk, chunk), bool))
    difference = jnp.where(seen, decay[..., :, None] - decay[..., None, :], -jnp.inf)
    weights = jnp.exp(difference) * cb[:, :, :, None] * dt[..., None, :]
    y = product("bcgrls,bcsgrp->bclgrp", weights, x)

    def by_token(v):
        return jnp.moveaxis(v, -1, 2)[..., None]  # [b, c, l, g, r, 1]

    added = product("bclgrp,bclge->bcgrpe", x.astype(jnp.float32) * by_token(dt * jnp.exp(last - decay)), b_in)
    wide = state.astype(jnp.float32).reshape(batch, g, r, p, e)
    state, before = over_chunks(wide, added, jnp.exp(last[..., 0]), dtype=narrow, unroll=UNROLL)
    y = y + product("bclge,bcgrpe->bclgrp", c_in, before) * by_token(jnp.exp(decay))
    y = y + d[..., None] * x.astype(jnp.float32)
    return y.reshape(batch, t + pad, inner)[:, :t], state.reshape(batch, heads, p, e)
