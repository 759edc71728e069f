"""Checkpoints in, checkpoints out."""

from nemotron_jax.weights.load import load

__all__ = ["load"]
