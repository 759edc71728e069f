"""Checkpoints in, checkpoints out."""

from nemotron_jax.weights.loading import load
from nemotron_jax.weights.saving import Conversion, convert, export, save

__all__ = ["Conversion", "convert", "export", "load", "save"]
