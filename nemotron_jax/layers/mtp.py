"""Multi-token prediction: from the state behind token t and token t + 1, the state that predicts token t + 2."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nemotron_jax.cache import Cache, Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.fusion import FusionPlan, PendingSum, add_norm
from nemotron_jax.layers.linear import project, weight
from nemotron_jax.sharding import Axis, whole


class MTPStep(nnx.Module):
    """One prediction step: its input joins an embedding and a state, then come ordinary blocks and a norm of its own.

    Embedding and head are the model's. The blocks defer their sums like the model's, and the step's last norm takes the
    last one in. Enorm, hnorm and eh_proj are whole on every rank.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        step: int,
        *,
        block: Callable[[str, NemotronHConfig, str], nnx.Module],
        axis: Axis,
        dtype,
    ):
        """Args: block: makes the block of (letter, its config, tensor prefix); the class is model.py's."""
        pattern, d = config.mtp_hybrid_override_pattern, config.hidden_size
        indices = range(step * len(pattern), (step + 1) * len(pattern))
        first, last = f"mtp.layers.{indices[0]}.", f"mtp.layers.{indices[-1]}."
        self.axis, self.eps = axis, config.layer_norm_epsilon
        self.enorm = weight(whole(f"{first}enorm.weight", (d,)), jnp.float32)
        self.hnorm = weight(whole(f"{first}hnorm.weight", (d,)), jnp.float32)
        self.eh_proj = weight(whole(f"{first}eh_proj.weight", (d, 2 * d)), dtype)
        self.layers = nnx.List(
            block(kind, config.mtp_layer(i), f"mtp.layers.{i}.") for kind, i in zip(pattern, indices, strict=True)
        )
        self.final_layernorm = weight(whole(f"{last}final_layernorm.weight", (d,)), jnp.float32)

    def __call__(
        self,
        embedded: Float[Array, "batch tokens hidden"],
        hidden: Float[Array, "batch tokens hidden"],
        cache: Cache | None,
        rows: Rows,
        plan: FusionPlan,
        *,
        residual_dtype=None,
        state=None,
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache | None]:
        """The step's own state of each token, which predicts and which a further step takes, and the cache behind them.

        Args:
          embedded: of the token after each.
          hidden: what the model (after its final norm) or the step before this one gave for each token.
          cache: of this step alone; None: the rows start here and nothing is kept.
        """
        norm = {"axis": self.axis, "eps": self.eps}
        embedded, _ = add_norm(embedded, None, self.enorm[...], **norm)
        hidden, _ = add_norm(hidden.astype(embedded.dtype), None, self.hnorm[...], **norm)
        x: jax.Array | PendingSum = project(jnp.concatenate([embedded, hidden], -1), self.eh_proj[...])
        residual, takes, caches = None, "eager", []
        old = (None,) * len(self.layers) if cache is None else cache.layers
        for i, (block, layer_cache) in enumerate(zip(self.layers, old, strict=True)):
            x, residual, layer_cache, _ = block(
                x, residual, layer_cache, rows, takes=takes, defers=plan.boundaries[i].defers,
                residual_dtype=residual_dtype, state=state,
            )  # fmt: skip
            takes = plan.implementation(i)
            caches.append(layer_cache)
        final, _ = add_norm(
            x,
            residual,
            self.final_layernorm[...],
            implementation=takes,
            residual_dtype=residual_dtype,
            state=state,
            **norm,
        )
        return final, None if cache is None else Cache(tuple(caches), cache.length + rows.new)
