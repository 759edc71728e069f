"""Which experts a token goes to, and with what weight. In float32, computed alike on every rank from the same input."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import weight
from nemotron_jax.sharding import whole
from pallas_kernels import route as kernel

# Of experts with one another, over all tokens: beyond, sorting is cheaper.
MAX_COMPARISONS = 1 << 20


class Router(nnx.Module):
    """Sigmoid router. Weight and bias are float32 in every model dtype: biases may lie near 64 and differ by 0.01."""

    def __init__(self, config: NemotronHConfig, prefix: str):
        experts = config.n_routed_experts
        self.k, self.groups, self.kept_groups = config.num_experts_per_tok, config.n_group, config.topk_group
        self.normalise, self.scale = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = weight(whole(f"{prefix}weight", (experts, config.hidden_size)), jnp.float32)
        self.bias = weight(whole(f"{prefix}e_score_correction_bias", (experts,)), jnp.float32)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"]
    ) -> tuple[Int[Array, "batch tokens k"], Float[Array, "batch tokens k"], Float[Array, "batch tokens experts"]]:
        """Chosen experts (best first), their weights, and the scores they were chosen by."""
        logits = lax.dot_general(
            x.astype(jnp.float32), self.weight[...], (((2,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        return route(
            logits, self.bias[...], k=self.k, groups=self.groups, kept_groups=self.kept_groups,
            normalise=self.normalise, scale=self.scale,
        )  # fmt: skip


def route(
    logits: Float[Array, "*tokens experts"],
    bias: Float[Array, " experts"],
    *,
    k: int,
    groups: int = 1,
    kept_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Int[Array, "*tokens k"], Float[Array, "*tokens k"], Float[Array, "*tokens experts"]]:
    """The router behind its matrix product.

    The bias takes part in choosing and in nothing else: weights come from the raw sigmoid, not from (score - bias),
    which would be 0 for a score of 1e-8 beside a bias of 12. Of several groups the ``kept_groups`` with the largest sum
    of their two best scores are kept; experts of the others cannot be chosen, however negative the scores that are
    left. Equal scores go to the lower index, as in ``torch.topk``.

    Args:
      logits: float32.
      bias: float32.

    Returns:
      (chosen int32, best first; weights float32 in the same order; the scores chosen by, -inf in groups left out).
    """
    scores = jax.nn.sigmoid(logits)
    choice = scores + bias
    if groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], groups, -1)
        best = jnp.sum(lax.top_k(grouped, 2)[0], -1)
        kept = jnp.any(jax.nn.one_hot(lax.top_k(best, kept_groups)[1], groups, dtype=jnp.bool_), -2)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    elif kernel.declined(rows=math.prod(logits.shape[:-1]), experts=logits.shape[-1], k=k) is None:
        chosen, weights = kernel.route(
            logits.reshape(-1, logits.shape[-1]),
            bias,
            k=k,
            normalise=normalise,
            scale=scale,
            implementation="mosaic_gpu",
        )
        shape = (*logits.shape[:-1], k)
        return chosen.reshape(shape), weights.reshape(shape), choice
    chosen, weights = largest(choice, scores, k)
    if normalise:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return chosen, weights * scale, choice


def largest(
    choice: Float[Array, "*tokens experts"], scores: Float[Array, "*tokens experts"], k: int
) -> tuple[Int[Array, "*tokens k"], Float[Array, "*tokens k"]]:
    """The experts of the k largest ``choice``, the first of equal ones first, and their ``scores``.

    For few tokens by comparing each expert with each: two small kernels on a GPU, where sorting is four slower ones.
    """
    if choice.size * choice.shape[-1] > MAX_COMPARISONS:
        chosen = lax.top_k(choice, k)[1]
        return chosen, jnp.take_along_axis(scores, chosen, -1)
    # integers in the order of the numbers, NaN included: every expert has a place of its own whatever came in
    bits = lax.bitcast_convert_type(choice, jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    mine, other = key[..., :, None], key[..., None, :]
    index = jnp.arange(choice.shape[-1], dtype=jnp.int32)
    before = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    place = jnp.sum(before, -1, dtype=jnp.int32)
    here = place[..., None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(here, index, 0), -1), jnp.sum(jnp.where(here, scores[..., None, :], 0.0), -1)


def describe(
    chosen: Int[Array, "*tokens k"], weights: Float[Array, "*tokens k"], choice: Float[Array, "*tokens experts"]
) -> tuple[Int[Array, "*tokens k"], Float[Array, "*tokens k"], Float[Array, "*tokens"]]:
    """What comparisons read: experts ascending, their weights, and how far behind the first expert left out was.

    A program that does not return it does not compute it.
    """
    order = jnp.argsort(chosen, -1)
    k = chosen.shape[-1]
    if k < choice.shape[-1]:
        best = lax.top_k(choice, k + 1)[0]
        gap = best[..., k - 1] - best[..., k]
    else:
        gap = jnp.full_like(choice[..., 0], jnp.inf)
    return jnp.take_along_axis(chosen, order, -1), jnp.take_along_axis(weights, order, -1), gap
