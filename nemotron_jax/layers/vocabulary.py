"""Embedding and head, both cut over the tensor axis by rows of the vocabulary (padded with zero rows where it does
not divide).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import product, weight
from nemotron_jax.sharding import Axis, cut_rows, padded_vocab, rank, sum_over


def _rows(config: NemotronHConfig, tensor: str, axis: Axis, dtype):
    padded = padded_vocab(config.vocab_size, axis)
    return weight(cut_rows(tensor, (config.vocab_size, config.hidden_size), axis, padded=padded), dtype)


class Embedding(nnx.Module):
    """Token embedding, not scaled."""

    def __init__(self, config: NemotronHConfig, *, axis: Axis, dtype):
        self.axis = axis
        self.table = _rows(config, "embeddings.weight", axis, dtype)

    def __call__(self, ids: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        """Each rank looks up the ids it holds; one all-reduce adds a row and zeros, so the sum is exact in any
        dtype.
        """
        table = self.table[...]
        if self.axis.size == 1:
            return jnp.take(table, ids, axis=0, mode="clip")
        local = ids - rank(self.axis) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        found = jnp.take(table, jnp.where(mine, local, 0), axis=0, mode="clip")
        return sum_over(jnp.where(mine[..., None], found, 0), self.axis)


class Head(nnx.Module):
    """Logits in float32. ``table`` is the embedding's where the two are tied."""

    def __init__(self, config: NemotronHConfig, *, axis: Axis, dtype):
        self.axis, self.vocab_size = axis, config.vocab_size
        self.table = None if config.tie_word_embeddings else _rows(config, "lm_head.weight", axis, dtype)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], embedding: Embedding
    ) -> Float[Array, "batch tokens local_vocab"]:
        """This rank's columns of the logits; columns of padding rows are -inf."""
        table = (embedding.table if self.table is None else self.table)[...]
        logits = product(x.astype(table.dtype), table, jnp.float32)
        if table.shape[0] * self.axis.size > self.vocab_size:
            ids = rank(self.axis) * table.shape[0] + jnp.arange(table.shape[0])
            logits = jnp.where(ids < self.vocab_size, logits, -jnp.inf)
        return logits
