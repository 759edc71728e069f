"""Checkpoints in, checkpoints out."""

from nemotron_jax.weights.loading import load

__all__ = ["load"]
