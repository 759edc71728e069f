"""Nemotron-H (Mamba-2, attention, MLP, mixture of experts) in JAX, tensor parallel, with deferred sums."""

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.generation import Generator
from nemotron_jax.parity import compare
from nemotron_jax.runtime import NemotronH, Output
from nemotron_jax.sharding import ShardingRules, make_mesh
from nemotron_jax.weights import convert, export, load, save

__all__ = [
    "Generator",
    "NemotronH",
    "NemotronHConfig",
    "Output",
    "ShardingRules",
    "compare",
    "convert",
    "export",
    "load",
    "make_mesh",
    "save",
]
