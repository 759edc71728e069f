"""Mixture-of-experts block ("E"): routed experts, in a latent width or not, beside a shared expert at full width."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.experts import expert_sum
from nemotron_jax.layers.linear import Weight, project, weight
from nemotron_jax.layers.mlp import MLP
from nemotron_jax.layers.router import Router, describe
from nemotron_jax.sharding import Axis, Layout, Section, ShardingRules, rank, vary_like, whole


class MoE(nnx.Module):
    """Experts cut over the tensor axis, whole ones per rank or a slice of each; one summand on each rank either way.

    Tokens, router and latent projections are the same on every rank. The projection out of the latent width is linear,
    so it runs before the sum, and the routed and the shared summand are added before it too: one reduction per block.
    """

    def __init__(self, config: NemotronHConfig, prefix: str, *, axis: Axis, rules: ShardingRules, dtype):
        experts, hidden, latent = config.n_routed_experts, config.hidden_size, config.moe_latent_size
        width = latent or hidden
        cut = axis if rules.experts or rules.expert_mlp else Axis()
        self.axis = axis
        self.cuts_routed, self.cuts_shared = cut.size > 1, axis.size > 1 and bool(rules.mlp)
        self.per_rank = experts // axis.size if self.cuts_routed and rules.experts else 0  # experts of a rank, 0: all

        def stacked(leaf: str, shape: tuple[int, ...], width_dim: int) -> Weight:
            dim = width_dim if rules.expert_mlp else 0
            section = Section(f"{prefix}experts.{{}}.{leaf}.weight", shape[dim], parts=cut.size, stack=experts)
            return weight(Layout(shape, dim, (section,), cut.size), dtype)

        self.router = Router(config, f"{prefix}gate.")
        self.up = stacked("up_proj", (experts, config.moe_intermediate_size, width), 1)
        self.down = stacked("down_proj", (experts, width, config.moe_intermediate_size), 2)
        self.into_latent = weight(whole(f"{prefix}fc1_latent_proj.weight", (latent, hidden)), dtype) if latent else None
        self.out_of_latent = (
            weight(whole(f"{prefix}fc2_latent_proj.weight", (hidden, latent)), dtype) if latent else None
        )
        self.shared = MLP(
            config,
            f"{prefix}shared_experts.",
            axis=axis if rules.mlp else Axis(),
            dtype=dtype,
            width=config.moe_shared_expert_intermediate_size,
            bias=config.mlp_bias,
        )

    def __call__(
        self, x: Float[Array, "batch tokens hidden"]
    ) -> tuple[
        Float[Array, "batch tokens hidden"],
        tuple[Int[Array, "batch tokens k"], Float[Array, "batch tokens k"], Float[Array, "batch tokens"]],
    ]:
        """The block's output (where something is cut, this rank's summand) and what the router did (its `describe`)."""
        with jax.named_scope("router"):
            chosen, weights, choice = self.router(x)
        with jax.named_scope("experts"):
            v = x if self.into_latent is None else project(x, self.into_latent[...])
            local = chosen - rank(self.axis) * self.per_rank if self.per_rank else chosen
            routed = expert_sum(
                _rows(v), self.up[...], self.down[...], _rows(local), _rows(weights), elsewhere=bool(self.per_rank)
            ).reshape(v.shape)
            if self.out_of_latent is not None:
                routed = project(routed, self.out_of_latent[...])
        with jax.named_scope("shared_expert"):
            shared = self.shared(x)
        if self.cuts_routed != self.cuts_shared:  # one of the two is whole on every rank: it counts once
            once = rank(self.axis) == 0
            if self.cuts_routed:
                shared = jnp.where(once, shared, 0)
            else:
                routed = jnp.where(once, routed, 0)
        out = (routed.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
        if self.cuts_routed or self.cuts_shared:
            out = vary_like(out, self.up[...], self.shared.up[...])  # no tokens: nothing above made it a summand
        return out, describe(chosen, weights, choice)


def _rows(a: jax.Array) -> jax.Array:
    """[batch, tokens, n] -> [batch * tokens, n]."""
    return a.reshape(-1, a.shape[-1])
