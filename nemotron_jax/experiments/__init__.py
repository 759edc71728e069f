"""Sharding experiments: what a plan, a mesh or a table of rules costs, counted in real programs, timed, predicted."""

from nemotron_jax.experiments.predict import H200, Machine, Prediction, predict
from nemotron_jax.experiments.spec import Run, expand, read_spec

__all__ = ["H200", "Machine", "Prediction", "Run", "expand", "predict", "read_spec"]
