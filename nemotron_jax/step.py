"""One greedy step of a model as a program: what ``inspect`` counts, and what experiments compile and time.

A step reads new tokens of every row behind a cache, and gives the most likely next token and the new cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax import fusion
from nemotron_jax.cache import cleaned
from nemotron_jax.fusion import FusionPlan
from nemotron_jax.model import forward
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, arg_max_over, axis_size
from nemotron_jax.targets import HERE, Target
from pallas_kernels.allreduce_rms_norm import abstract_flags_state


def local_tokens(model: NemotronH, batch: int, tokens: int) -> int:
    """New tokens on one device."""
    return batch // axis_size(model.mesh, DATA) * tokens


def plan_for(model: NemotronH, batch: int, tokens: int, target: Target | None = None) -> FusionPlan:
    """The model's fusion plan for a step: as it resolves on the target's devices, which need not be here."""
    if target is None or target.name == HERE:
        return model.plan(batch, tokens)
    return fusion.plan(
        model.fusion,
        model.config.hybrid_override_pattern,
        tokens=local_tokens(model, batch, tokens),
        hidden=model.config.hidden_size,
        dtype=model.dtype,
        residual_dtype=model.residual_dtype,
        mesh=model.mesh,
        axis=model.axis,
        rules=model.rules,
        platform=target.platform,
        device_kind=target.device_kind,
        peers_reachable=True,
    )


def _local(plan: FusionPlan, steps: int | None) -> Callable:
    def one(network, state, ids, cache, clean=False):
        logits, cache, _ = forward(network, ids, None, cache, plan, state=state, last_only=True, clean=clean)
        return arg_max_over(logits[:, 0], network.lm_head.axis), cache

    def many(network, state, ids, cache):
        def body(carry, _):
            token, cache = one(network, state, *carry, clean=True)
            return (token[:, None], cache), token

        (_, cache), tokens = lax.scan(body, (ids, cleaned(cache)), None, length=steps)
        return tokens, cache

    return one if steps is None else many


def step_program(
    model: NemotronH, batch: int, tokens: int, capacity: int, plan: FusionPlan, *, steps: int | None = None
):
    """``(ids [batch, tokens], cache) -> (next token [batch], cache)``; the cache is donated.

    Args:
      model: abstract or with weights.
      capacity: slots of the cache.
      plan: from :func:`plan_for`.
      steps: None for one step; otherwise that many in a scan on the device, each fed the token before (``tokens`` is
        1), and the result is [steps, batch].
    """
    rows, specs = model.rows_spec, model.cache_shapes(batch, capacity).specs
    out = P(rows) if steps is None else P(None, rows)
    return model.compile(
        _local(plan, steps), (P(rows), specs), (out, specs), flags=_flags(model, plan, batch, tokens), donate=(1,)
    )


def _flags(model: NemotronH, plan: FusionPlan, batch: int, tokens: int) -> Any:
    if not plan.uses("flags"):
        return None
    if model.weights is not None:
        return model.flags_state(plan, local_tokens(model, batch, tokens))
    most = 1 << max(0, local_tokens(model, batch, tokens) - 1).bit_length()
    return abstract_flags_state(
        model.mesh, model.axis.name, max_tokens=most, hidden=model.config.hidden_size, dtype=model.dtype
    )


def step_arguments(model: NemotronH, batch: int, tokens: int, capacity: int) -> tuple[Any, Any]:
    """Shapes, dtypes and shardings of (ids, cache)."""
    shapes = model.cache_shapes(batch, capacity)

    def on_mesh(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(model.mesh, spec))

    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=NamedSharding(model.mesh, P(model.rows_spec)))
    return ids, jax.tree.map(on_mesh, shapes.tree, shapes.specs)


def lower_step(
    model: NemotronH, batch: int, tokens: int, capacity: int, target: Target | None = None, *, steps: int | None = None
) -> jax.stages.Lowered:
    """The step before compilation, from shapes alone."""
    plan = plan_for(model, batch, tokens, target)
    program = step_program(model, batch, tokens, capacity, plan, steps=steps)
    arguments = step_arguments(model, batch, tokens, capacity)
    if target is None or target.how != "lower":
        return program.lower(*arguments)
    flags = _flags(model, plan, batch, tokens)
    return program.program.trace(model.abstract_weights(), flags, *arguments).lower(lowering_platforms=("cuda",))
