"""A router behind its matrix product, in plain JAX. It defines what the kernel computes."""

import jax
import jax.numpy as jnp
from jax import lax


def route(logits: jax.Array, bias: jax.Array, *, k: int, normalise: bool, scale: float) -> tuple[jax.Array, jax.Array]:
    """See `api.route` for the arguments. The bias takes part in choosing alone."""
    scores = jax.nn.sigmoid(logits)
    chosen = lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    if normalise:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return chosen, weights * scale
