"""What is stacked in which order: embedding, blocks of norm and mixer, final norm, head. Runs inside ``jax.shard_map``.

The stream between blocks is ``(x, residual)``: x is the last mixer's output, reduced or pending, and the next block's
norm takes it into the residual. The final norm does so too, hence the last block may defer like any other.

Glossary of letters, used in einsums: b batch, t new tokens, s slots, d hidden_size, f MLP width, v vocabulary;
attention: n query heads, k KV heads, r query heads of a KV head, h head_dim; Mamba: m heads, p head_dim, g groups, r
  heads of a group, e state size,
c chunks, l position in a chunk; x experts.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nemotron_jax.cache import Cache, Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.fusion import FusionPlan, PendingSum, add_norm, defer, settle
from nemotron_jax.layers.attention import Attention
from nemotron_jax.layers.linear import weight
from nemotron_jax.layers.mamba import Mamba
from nemotron_jax.layers.mlp import MLP
from nemotron_jax.layers.moe import MoE
from nemotron_jax.layers.mtp import MTPStep
from nemotron_jax.layers.vocabulary import Embedding, Head
from nemotron_jax.sharding import Axis, ShardingRules, vary_like, whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HiddenStates:
    """Captured activations, every one of them summed.

    Attributes:
      embed: [batch, tokens, hidden], the embedding.
      layers: [layers, batch, tokens, hidden], the residual stream after each block.
      final: [batch, tokens, hidden], after the final norm.
      mixers: [layers, batch, tokens, hidden], each block's own contribution; None unless asked for.
      experts: per mixture-of-experts block, (chosen [batch, tokens, k] ascending, their weights, the score gap to the
        first one left out [batch, tokens]); None unless asked for.
    """

    embed: jax.Array
    layers: jax.Array
    final: jax.Array
    mixers: jax.Array | None = None
    experts: tuple[jax.Array, jax.Array, jax.Array] | None = None


def mixer(kind: str, config: NemotronHConfig, prefix: str, *, axis: Axis, rules: ShardingRules, dtype) -> nnx.Module:
    """The mixer of a block of ``kind``."""
    if kind == "M":
        return Mamba(config, prefix, axis=axis if rules.mamba_heads else Axis(), dtype=dtype)
    if kind == "*":
        return Attention(config, prefix, axis=axis if rules.q_heads else Axis(), dtype=dtype)
    if kind == "-":
        narrow = axis if rules.mlp else Axis()
        return MLP(config, prefix, axis=narrow, dtype=dtype, width=config.intermediate_size, bias=config.mlp_bias)
    return MoE(config, prefix, axis=axis, rules=rules, dtype=dtype)


class Block(nnx.Module):
    """One pattern letter: a norm that takes in the block before, and a mixer whose output is reduced here or
    deferred."""

    def __init__(self, kind: str, config: NemotronHConfig, prefix: str, *, axis: Axis, rules: ShardingRules, dtype):
        self.kind, self.eps, self.axis = kind, config.layer_norm_epsilon, axis
        self.sum_axis = axis if rules.cuts(kind) else Axis()  # a block that is not cut leaves nothing to sum
        self.norm = weight(whole(f"{prefix}norm.weight", (config.hidden_size,)), jnp.float32)
        self.mixer = mixer(kind, config, f"{prefix}mixer.", axis=axis, rules=rules, dtype=dtype)

    def __call__(self, x, residual, cache, rows: Rows, *, takes: str, defers: bool, residual_dtype=None, state=None):
        """Args: x, residual: the stream; takes: implementation for a pending x; defers: whether this block's sum stays
        pending."""
        normed, residual = add_norm(
            x,
            residual,
            self.norm[...],
            axis=self.axis,
            eps=self.eps,
            implementation=takes,
            residual_dtype=residual_dtype,
            state=state,
        )
        aux = None
        if self.kind in "M*":
            out, cache = self.mixer(normed, cache, rows)
        elif self.kind == "E":
            out, aux = self.mixer(normed)
        else:
            out = self.mixer(normed)
        out = defer(out, self.sum_axis)
        return out if defers else settle(out, self.sum_axis), residual, cache, aux


class Network(nnx.Module):
    """The whole model as one rank computes it."""

    def __init__(
        self, config: NemotronHConfig, *, axis: Axis, rules: ShardingRules, dtype, residual_dtype, mtp: bool = False
    ):
        self.config, self.axis, self.residual_dtype = config, axis, residual_dtype
        vocab = axis if rules.vocab else Axis()
        block = functools.partial(Block, axis=axis, rules=rules, dtype=dtype)
        self.embeddings = Embedding(config, axis=vocab, dtype=dtype)
        self.layers = nnx.List(
            block(kind, config.layer(i), f"layers.{i}.") for i, kind in enumerate(config.hybrid_override_pattern)
        )
        self.norm_f = weight(whole("norm_f.weight", (config.hidden_size,)), jnp.float32)
        self.lm_head = Head(config, axis=vocab, dtype=dtype)
        steps = config.num_nextn_predict_layers if mtp else 0
        self.mtp = nnx.List(MTPStep(config, i, block=block, axis=axis, dtype=dtype) for i in range(steps))

    def __call__(
        self,
        ids: Int[Array, "batch tokens"],
        cache: Cache,
        rows: Rows,
        plan: FusionPlan,
        *,
        state=None,
        capture: bool = False,
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache, HiddenStates | None]:
        """Activations after the final norm, the cache behind the new tokens, and the hidden states if ``capture``.

        Args:
          ids: real tokens packed to the left of each row.
          cache: state of each row before them.
          plan: who defers, and what the norms do with it.
          state: persistent buffers of the ``flags`` implementation.
        """
        x: jax.Array | PendingSum = self.embeddings(ids)
        embed, residual, takes = x, None, "eager"
        caches, stream, mixers, experts = [], [], [], []
        for i, (block, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            with jax.named_scope(f"layer_{i}_{block.mixer.__class__.__name__.lower()}"):
                x, residual, layer_cache, aux = block(
                    x, residual, layer_cache, rows, takes=takes, defers=plan.boundaries[i].defers,
                    residual_dtype=self.residual_dtype, state=state,
                )  # fmt: skip
            takes = plan.implementation(i)
            caches.append(layer_cache)
            if capture:
                stream.append(residual)  # of the block before; the next norm has just summed it
                mixers.append(settle(x, block.sum_axis) if isinstance(x, PendingSum) else x)
                if aux is not None:
                    experts.append(aux)
        with jax.named_scope("final_norm"):
            final, residual = add_norm(
                x, residual, self.norm_f[...], axis=self.axis, eps=self.config.layer_norm_epsilon, implementation=takes,
                residual_dtype=self.residual_dtype, state=state,
            )  # fmt: skip
        cache = Cache(tuple(caches), cache.length + rows.new)
        if not capture:
            return final, cache, None
        stream = jnp.stack([*stream[1:], residual]) if self.layers else jnp.zeros((0, *final.shape), final.dtype)
        mixers = jnp.stack(mixers) if self.layers else stream
        experts = tuple(jnp.stack(v) for v in zip(*experts, strict=True)) if experts else None
        return final, cache, HiddenStates(embed, stream, final, mixers, experts)

    def draft(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        next_ids: Int[Array, "batch tokens"],
        cache: Cache | None,
        rows: Rows,
        plan: FusionPlan,
        *,
        step: int = 0,
        state=None,
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache | None]:
        """MTP step ``step``: states whose :meth:`logits` predict the token after ``next_ids``, and the step's cache.

        Args:
          hidden: of each token, after the final norm, or from the step before.
          next_ids: the token that follows each, real ones packed to the left of each row.
          cache: of this step (None: rows start here), with the pattern ``config.mtp_hybrid_override_pattern``.
          plan: of the step's own boundaries.
        """
        with jax.named_scope(f"mtp_{step}"):
            return self.mtp[step](
                self.embeddings(next_ids), hidden, cache, rows, plan, residual_dtype=self.residual_dtype, state=state
            )

    def logits(self, x: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens local_vocab"]:
        """This rank's columns of the float32 logits."""
        with jax.named_scope("head"):
            return self.lm_head(x, self.embeddings)


def pack(mask: jax.Array | None, start: jax.Array, tokens: int) -> tuple[Rows, jax.Array | None]:
    """Order that brings each row's real tokens to the left (pads may stand anywhere), and the rows as the layers see
    them."""
    if mask is None:
        return Rows(start, jnp.full_like(start, tokens), None), None
    real = mask.astype(bool)
    order = jnp.argsort(~real, axis=1, stable=True)
    new = jnp.sum(real, axis=1, dtype=jnp.int32)
    return Rows(start, new, jnp.arange(tokens, dtype=jnp.int32) < new[:, None]), order


def forward(
    network: Network,
    ids,
    mask,
    cache: Cache,
    plan: FusionPlan,
    *,
    state=None,
    capture: bool = False,
    last_only: bool = False,
    clean: bool = False,
):
    """Logits (this rank's columns), cache and hidden states of new tokens at the places where the caller put them.

    With ``last_only`` the logits are those of each row's last real token, [batch, 1, local vocab]; ``clean`` says that
    the cache went through :func:`nemotron_jax.cache.cleaned`.
    """
    rows, order = pack(mask, cache.length, ids.shape[1])
    rows = dataclasses.replace(rows, clean=clean)
    if order is not None:
        ids = jnp.take_along_axis(ids, order, axis=1)
    x, cache, hidden = network(ids, cache, rows, plan, state=state, capture=capture)
    if last_only:
        last = jnp.maximum(rows.new - 1, 0)
        x = (
            jnp.take_along_axis(x, last[:, None, None], axis=1)
            if ids.shape[1]
            else jnp.zeros((x.shape[0], 1, x.shape[2]), x.dtype)
        )
    elif order is not None:
        x = jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
    if hidden is not None and order is not None:
        back = jnp.argsort(order, axis=1)

        def unpack(a, axis):
            index = back.reshape((1,) * (axis - 1) + back.shape + (1,) * (a.ndim - axis - 1))
            return jnp.take_along_axis(a, index, axis=axis)

        experts = None if hidden.experts is None else tuple(unpack(a, 2) for a in hidden.experts)
        hidden = HiddenStates(
            unpack(hidden.embed, 1),
            unpack(hidden.layers, 2),
            unpack(hidden.final, 1),
            unpack(hidden.mixers, 2),
            experts,
        )
    return network.logits(x), cache, hidden


def draft(network: Network, hidden, next_ids, mask, cache: Cache, plan: FusionPlan, *, step: int = 0, state=None):
    """Logits (this rank's columns), states and cache of an MTP step at the places where the caller put the tokens."""
    rows, order = pack(mask, cache.length, next_ids.shape[1])
    if order is not None:
        next_ids = jnp.take_along_axis(next_ids, order, axis=1)
        hidden = jnp.take_along_axis(hidden, order[..., None], axis=1)
    x, behind = network.draft(hidden, next_ids, cache, rows, plan, step=step, state=state)
    if order is not None:
        x = jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
    return network.logits(x), x, behind


def forward_mtp(network: Network, ids, mask, plan: FusionPlan, mtp_plans: Sequence[FusionPlan], *, state=None):
    """Logits (this rank's columns) for the token ``depth`` + 1 places on, from each token that has ``depth`` known ones
    behind it.

    Step d takes the states of the step before and the tokens d + 1 places on; where fewer are stored, the last one runs
    again.

    Args:
      ids, mask: [batch, tokens].
      plan: of the model's boundaries.
      mtp_plans: of each step's, ``depth`` of them.

    Returns:
      [batch, tokens - depth, local vocab], at the places where the tokens stand.
    """
    start = vary_like(jnp.zeros((ids.shape[0],), jnp.int32), ids)
    rows, order = pack(mask, start, ids.shape[1])
    if order is not None:
        ids = jnp.take_along_axis(ids, order, axis=1)
    x, _, _ = network(ids, Cache((None,) * len(network.layers), start), rows, plan, state=state)
    for d, mtp_plan in enumerate(mtp_plans):
        new = jnp.maximum(rows.new - 1, 0)
        valid = None if rows.valid is None else rows.valid[:, 1:]
        rows, ids = Rows(start, new, valid), ids[:, 1:]
        x, _ = network.draft(x[:, :-1], ids, None, rows, mtp_plan, step=min(d, len(network.mtp) - 1), state=state)
    if order is not None:
        back = jnp.argsort(order, axis=1)[:, : x.shape[1]]
        x = jnp.take_along_axis(jnp.pad(x, ((0, 0), (0, len(mtp_plans)), (0, 0))), back[..., None], axis=1)
    return network.logits(x)
