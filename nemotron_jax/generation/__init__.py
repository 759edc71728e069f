"""Text from a model: prompts, decoding on the device, sampling, stopping, state, scoring."""

from nemotron_jax.generation.generator import Completion, Generation, Generator, Piece, TokenLogprob
from nemotron_jax.generation.state import State

__all__ = ["Completion", "Generation", "Generator", "Piece", "State", "TokenLogprob"]
