"""Mixture-of-experts block ("E")."""

from flax import nnx

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.sharding import Axis, ShardingRules


class MoE(nnx.Module):
    def __init__(self, config: NemotronHConfig, prefix: str, *, axis: Axis, rules: ShardingRules, dtype):
        raise NotImplementedError("mixture-of-experts blocks (pattern letter E) are not built yet")
