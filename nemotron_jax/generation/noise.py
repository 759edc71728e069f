"""Gumbel noise as a function of (seed, position, token id) alone: of no mesh, batch or jax version.

jax.random's values belong to an index in an array of some shape; here the token id itself is the counter, so a rank
that holds ids 512..1023 draws exactly the numbers that a single device draws for them.
"""

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011): 64 random bits for each (key, counter).

    Args:
      key, counter: pairs of uint32 arrays that broadcast against each other.

    Returns:
      A pair of uint32 arrays.
    """
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = counter[0] + schedule[0], counter[1] + schedule[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def gumbel(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise: adding it to logits and taking the largest draws from their softmax.

    Args:
      seed: [batch, 2] uint32.
      position: [batch] int32, tokens before the one that is drawn.
      ids: [vocab] int32, token ids.

    Returns:
      [batch, vocab] float32, finite.
    """
    key = (seed[:, :1], seed[:, 1:])
    counter = (ids[None].astype(jnp.uint32), position[:, None].astype(jnp.uint32))
    bits, _ = threefry(key, counter)
    # u in (0, 1); large noise comes from small u, where float32 resolves all 32 bits. The bound keeps log1p finite.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))
