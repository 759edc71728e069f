"""Text from a model: prompts, decoding on the device, sampling, stopping, state, scoring."""

from nemotron_jax.generation.chat import Conversation
from nemotron_jax.generation.generator import Generator
from nemotron_jax.generation.results import Completion, Generation, Piece, TokenLogprob
from nemotron_jax.generation.scoring import Score, Total, log_likelihoods
from nemotron_jax.generation.state import State

__all__ = [
    "Completion", "Conversation", "Generation", "Generator", "Piece", "Score", "State", "TokenLogprob", "Total",
    "log_likelihoods",
]  # fmt: skip
