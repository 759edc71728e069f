"""Time of one step from a few numbers: what has to be read, what has to be computed, and how long the sums take.

    step = max(bytes / bandwidth, flops / rate) + blocks * per_block + sum of each boundary's exchange

Nothing is known but the arguments. The defaults for the H200 say where they come from; docs/experiments.md shows how
far they are off.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.fusion import FusionPlan
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, axis_size, bytes_of


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the prediction takes from the hardware.

    Attributes:
      bandwidth: bytes a second that large reads reach.
      flops: operations a second that large bfloat16 matrix products reach (float32 ones at HIGHEST: ``float32_flops``).
      float32_flops: the same for float32 products.
      per_block: seconds per block for everything small: norms, convolution, state update, launches.
      exchange: implementation -> seconds of one boundary's sum of a small message over 2 devices, beyond the norm.
      scaling: implementation -> devices -> factor on ``exchange``; in between and beyond, in proportion.
      link: bytes a second that one device sends, for the part of a message beyond the small.
    """

    bandwidth: float
    flops: float
    float32_flops: float
    per_block: float
    exchange: Mapping[str, float]
    scaling: Mapping[str, Mapping[int, float]]
    link: float


# Measured on 1 and 2 H200 with a stack of 8B shapes in plain JAX, batch 1. Copies reach 4.3 TB/s. A token takes 4.24 ms
# on one device, 3.57 of them reading, and 2.60 on two without any exchange, 1.79 of them reading: 13 and 16 us a block.
# Beyond that, over 52 boundaries on two devices, psum takes 0.95 ms, one_shot 0.62, flags 0.38; gather and two_shot
# are from single calls. Beyond two devices nothing was measured here: the factors are those of published measurements
# of 8 KB all-reduces on 2, 4 and 8 H200, 6.7, 10.1, 16.7 us through NCCL and 2.8, 3.2, 3.5 us through one kernel.
# ``flops`` is what large products usually reach of the dense peak of 790e12.
_LIBRARY, _KERNEL = {2: 1.0, 4: 1.5, 8: 2.5}, {2: 1.0, 4: 1.15, 8: 1.25}
H200 = Machine(
    bandwidth=4.3e12,
    flops=600e12,
    float32_flops=50e12,
    per_block=14e-6,
    exchange={"eager": 18e-6, "psum": 18e-6, "gather": 17e-6, "one_shot": 12e-6, "two_shot": 13e-6, "flags": 7.3e-6},
    scaling={
        **dict.fromkeys(("eager", "psum", "gather"), _LIBRARY),
        **dict.fromkeys(("one_shot", "two_shot", "flags"), _KERNEL),
    },
    link=3.5e11,
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step on each device, and what they are made of.

    Attributes:
      seconds: of the step.
      read: reading weights and states.
      compute: matrix products, attention, state updates; the larger of ``read`` and ``compute`` counts.
      small: the fixed part of every block.
      exchange: the sums over the tensor axis.
      bytes: read and written per device.
      flops: per device.
    """

    seconds: float
    read: float
    compute: float
    small: float
    exchange: float
    bytes: float
    flops: float


def touched_experts(experts: int, chosen: int, tokens: int) -> float:
    """Expected number of distinct experts that ``tokens`` choose, if they choose evenly."""
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)


def work(model: NemotronH, batch: int, tokens: int, context: int) -> tuple[float, float]:
    """(bytes moved, floating-point operations) of one step on one device.

    Args:
      model: may be abstract.
      batch: rows over the whole mesh.
      tokens: new tokens per row.
      context: tokens per row that the cache holds already.
    """
    config, tp = model.config, model.axis.size
    rows = batch / axis_size(model.mesh, DATA)
    here = rows * tokens
    bytes_, flops = 0.0, 0.0
    for p in model.parameters:
        size, factor, tokens_through = float(p.bytes_per_device), 1.0, here
        numbers = size / jnp.dtype(p.dtype).itemsize
        stacked = p.layout.sections[0].stack
        if p.path[0] == "embeddings" and not config.tie_word_embeddings:
            rows_read = here / (tp if model.rules.vocab else 1)
            bytes_ += rows_read * config.hidden_size * jnp.dtype(p.dtype).itemsize
            continue
        if p.path[0] in ("embeddings", "lm_head"):
            tokens_through = rows  # logits of the last token alone
        if stacked:
            layer = config.layer(int(p.path[1]))
            experts, chosen = layer.n_routed_experts, layer.num_experts_per_tok
            factor = touched_experts(experts, chosen, max(1, round(here))) / experts
            tokens_through = here * chosen / experts
        bytes_ += size * factor
        flops += 2.0 * numbers * tokens_through
    state_bytes, state_flops = _states(model, config, rows, tokens, context, tp)
    return bytes_ + state_bytes, flops + state_flops


def _states(
    model: NemotronH, config: NemotronHConfig, rows: float, tokens: int, context: int, tp: int
) -> tuple[float, float]:
    pattern, rules = config.hybrid_override_pattern, model.rules
    item = jnp.dtype(model.dtype).itemsize
    mamba_parts = tp if rules.mamba_heads else 1
    heads_parts = tp if rules.q_heads else 1
    kv = max(1.0, config.num_key_value_heads / heads_parts) * config.head_dim
    attention_bytes = rows * (context + tokens) * 2 * kv * item
    attention_flops = (
        rows * tokens * (context + (tokens + 1) / 2) * 4 * config.num_attention_heads * config.head_dim / heads_parts
    )
    inner, state = config.inner_size / mamba_parts, config.ssm_state_size
    ssm_bytes = 2 * rows * bytes_of((1,), model.state_dtype) * inner * state
    ssm_flops = rows * tokens * 6 * inner * state
    if tokens > 1:  # the chunked form adds products within a chunk
        ssm_flops += (
            rows
            * tokens
            * min(config.chunk_size, tokens)
            * 2
            * (inner + state * max(1.0, config.n_groups / mamba_parts))
        )
    return (
        pattern.count("*") * attention_bytes + pattern.count("M") * ssm_bytes,
        pattern.count("*") * attention_flops + pattern.count("M") * ssm_flops,
    )


def exchange_seconds(machine: Machine, implementation: str, world: int, message: float) -> float:
    """Of one reduction of ``message`` bytes over ``world`` devices."""
    if world == 1:
        return 0.0
    known = machine.scaling[implementation]
    scaling = known[world] if world in known else known[max(known)] * world / max(known)
    crossing = world - 1 if implementation in ("gather", "one_shot", "flags") else 2 * (world - 1) / world
    return machine.exchange[implementation] * scaling + message * crossing / machine.link


def predict(
    model: NemotronH, plan: FusionPlan, batch: int, tokens: int, context: int, machine: Machine = H200
) -> Prediction:
    """Time of one step of ``model`` with ``plan``: of one token per row where ``tokens`` is 1, else of a prompt.

    Args:
      model: may be abstract.
      plan: of the step.
      batch: rows over the whole mesh.
      tokens: new tokens per row.
      context: tokens per row in the cache before them.
      machine: the numbers to take.
    """
    bytes_, flops = work(model, batch, tokens, context)
    rate = machine.float32_flops if model.dtype == jnp.float32 else machine.flops
    read, compute = bytes_ / machine.bandwidth, flops / rate
    small = machine.per_block * len(plan.boundaries)
    message = batch / axis_size(model.mesh, DATA) * tokens * model.config.hidden_size * jnp.dtype(model.dtype).itemsize
    world = model.axis.size
    exchange = sum(
        exchange_seconds(machine, b.implementation, world, message) for b in plan.boundaries if model.rules.cuts(b.kind)
    )
    if model.rules.vocab:
        exchange += exchange_seconds(machine, "eager", world, message) + exchange_seconds(
            machine, "gather", world, 8.0 * batch
        )
    if model.rules.mamba_heads and world > model.config.n_groups:
        exchange += plan_kind(plan, "M") * exchange_seconds(machine, "eager", world, 4.0 * batch * tokens)
    return Prediction(max(read, compute) + small + exchange, read, compute, small, exchange, bytes_, flops)


def plan_kind(plan: FusionPlan, kind: str) -> int:
    """How many boundaries follow a block of that kind."""
    return sum(b.kind == kind for b in plan.boundaries)


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """Milliseconds, bytes and operations, as results files hold them."""
    times = {k: getattr(prediction, k) * 1e3 for k in ("read", "compute", "small", "exchange")}
    parts = {f"{k}_ms": round(v, 6) for k, v in times.items()}
    return {"ms": round(prediction.seconds * 1e3, 6), **parts, "bytes": prediction.bytes, "flops": prediction.flops}
