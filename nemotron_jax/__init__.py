"""Nemotron-H in JAX: hybrids of Mamba-2, attention, MLP and mixture-of-experts blocks, tensor parallel, with deferred sums."""

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.parity import compare
from nemotron_jax.runtime import NemotronH, Output
from nemotron_jax.sharding import ShardingRules, make_mesh
from nemotron_jax.weights import load

__all__ = ["NemotronH", "NemotronHConfig", "Output", "ShardingRules", "compare", "load", "make_mesh"]
