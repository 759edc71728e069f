"""The next token from vocabulary-sharded logits: bias, penalties, temperature, filters, noise.

Everything but the settings runs inside ``jax.shard_map``.

Order: logit bias, repetition penalty, presence penalty, temperature, top-k, top-p (of what top-k left), min-p, draw.
Filters are exact: top-k and top-p gather the row's logits on every rank and sort them once; all others need no
gathering (a draw is the argmax of logits plus Gumbel noise, one (value, id) pair per rank and row). Equal logits at a
filter's border stay together.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from nemotron_jax.generation.noise import gumbel
from nemotron_jax.sharding import Axis, arg_max_over, gather_over, rank, sum_over

IN_CONTEXT, GENERATED = 1, 2  # bits of ``used``


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Other values compile nothing; which of them are in use is compiled in.

    Attributes:
      temperature: 0 is greedy: the largest logit, ties to the lower id.
      top_k: keep the k largest (0: all).
      top_p: keep the smallest set of most probable tokens with at least this mass (1: all).
      min_p: keep tokens with at least this fraction of the largest probability (0: all).
      repetition_penalty: logits of tokens in the prompt or the answer are divided by it where positive, multiplied
        where negative.
      presence_penalty: subtracted from the logits of tokens generated in this call.
      logit_bias: token id -> value added to its logit; -inf bans it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None

    def faults(self, vocab_size: int) -> list[str]:
        """Everything that is wrong with the values, in words."""
        found = []

        def check(name: str, good: bool, accepted: str) -> None:
            if not good:
                found.append(f"{name}: found {getattr(self, name)!r}, accepted {accepted}")

        def number(value) -> bool:
            return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)

        check("temperature", number(self.temperature) and self.temperature >= 0, "0 (greedy) or a positive number")
        check("top_k", isinstance(self.top_k, int | np.integer) and self.top_k >= 0, "0 (all) or a positive integer")
        check("top_p", number(self.top_p) and 0 < self.top_p <= 1, "more than 0 and at most 1 (all)")
        check("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "0 (all) to 1")
        check(
            "repetition_penalty",
            number(self.repetition_penalty) and self.repetition_penalty > 0,
            "a positive number (1: none)",
        )
        check("presence_penalty", number(self.presence_penalty), "a number (0: none)")
        for token, value in (self.logit_bias or {}).items():
            if not (isinstance(token, int | np.integer) and 0 <= token < vocab_size):
                found.append(f"logit_bias: found token {token!r}, accepted 0 to {vocab_size - 1}")
            if not isinstance(value, int | float | np.number) or math.isnan(value) or value == math.inf:
                found.append(f"logit_bias of token {token!r}: found {value!r}, accepted a number or -inf")
        if not found and sum(v == -math.inf for v in (self.logit_bias or {}).values()) >= vocab_size:
            found.append("logit_bias: bans every token")
        if not found and self.temperature == 0:
            idle = [n for n, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(self, n) != off]
            if idle:
                found.append(
                    f"{', '.join(idle)} with temperature 0: greedy takes no filter; give a temperature above 0"
                )
        return found

    @property
    def traits(self) -> "Traits":
        return Traits(
            sampled=self.temperature > 0,
            sorted=self.top_k > 0 or self.top_p < 1,
            bounded=self.min_p > 0,
            penalised=self.repetition_penalty != 1 or self.presence_penalty != 0,
            biased=bool(self.logit_bias),
        )


@dataclasses.dataclass(frozen=True)
class Traits:
    """Which parts of :class:`Sampling` are in use: what the program is compiled for."""

    sampled: bool = False
    sorted: bool = False
    bounded: bool = False
    penalised: bool = False
    biased: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Controls:
    """The values, as arguments of a program: arrays, or their specs.

    Attributes:
      seed: [batch, 2] uint32.
      numbers: [5] float32: temperature, top_p, min_p, repetition_penalty, presence_penalty.
      top_k: [] int32.
      eos: [n] int32, ids that end a row; -1 is none.
      bias: [vocab] float32 or None.
    """

    seed: Any
    numbers: Any
    top_k: Any
    eos: Any
    bias: Any

    @staticmethod
    def specs(rows: str | None, vocab: str | None, traits: Traits) -> "Controls":
        return Controls(P(rows), P(), P(), P(), P(vocab) if traits.biased else None)


def controls(sampling: Sampling, seeds: np.ndarray, eos: tuple[int, ...], padded_vocab: int) -> Controls:
    """Host arrays of a call.

    Args:
      seeds: [batch] int, any 64-bit values.
      eos: ids that end a row. The array's length is a multiple of 4, so that a few more or less do not recompile.
      padded_vocab: columns of the logits over all ranks.
    """
    wide = np.asarray(seeds, np.uint64)
    halves = np.stack([(wide >> np.uint64(32)).astype(np.uint32), (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)], -1)
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
    )
    ends = np.full(max(4, -(-len(eos) // 4) * 4), -1, np.int32)
    ends[: len(eos)] = eos
    bias = None
    if sampling.logit_bias:
        bias = np.zeros(padded_vocab, np.float32)
        bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    top_k = min(sampling.top_k or padded_vocab, padded_vocab)
    return Controls(halves, np.array(numbers, np.float32), np.int32(top_k), ends, bias)


def local_ids(logits: jax.Array, axis: Axis) -> jax.Array:
    """Token ids of this rank's columns."""
    width = logits.shape[-1]
    return rank(axis) * width + jnp.arange(width, dtype=jnp.int32)


def choose(
    logits: jax.Array, used: jax.Array | None, position: jax.Array, controls: Controls, traits: Traits, axis: Axis
) -> jax.Array:
    """The next token of each row.

    Args:
      logits: [batch, local vocab] float32, this rank's columns.
      used: [batch, local vocab] uint8, bits IN_CONTEXT and GENERATED; None unless ``traits.penalised``.
      position: [batch] int32, tokens before the new one.
      axis: of the vocabulary.

    Returns:
      [batch] int32, the same on every rank.
    """
    temperature, top_p, min_p, repetition, presence = controls.numbers
    if traits.biased:
        logits = logits + controls.bias
    if used is not None:
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(used & IN_CONTEXT != 0, repeated, logits)
        logits = logits - jnp.where(used & GENERATED != 0, presence, 0.0)
    if not traits.sampled:
        return arg_max_over(logits, axis)
    logits = logits / temperature
    if traits.sorted or traits.bounded:
        bound = smallest_kept(logits, controls.top_k, top_p, min_p, traits, axis)
        logits = jnp.where(logits >= bound[:, None], logits, -jnp.inf)
    return arg_max_over(logits + gumbel(controls.seed, position, local_ids(logits, axis)), axis)


def smallest_kept(logits, top_k, top_p, min_p, traits: Traits, axis: Axis) -> jax.Array:
    """[batch], the smallest logit that passes top-k, top-p and min-p; the same on every rank."""
    largest = jnp.max(gather_over(jnp.max(logits, -1), axis), 0)
    bound = jnp.full_like(largest, -jnp.inf)
    if traits.bounded:
        bound = largest + jnp.log(min_p)
    if traits.sorted:
        every = jnp.moveaxis(gather_over(logits, axis), 0, 1).reshape(logits.shape[0], -1)
        ordered = -jnp.sort(-every, axis=-1)
        kth = jnp.take(ordered, top_k - 1, axis=-1)
        weights = jnp.where(ordered >= kth[:, None], jnp.exp(ordered - largest[:, None]), 0.0)
        mass = jnp.cumsum(weights, -1)
        kept = (mass - weights < top_p * mass[:, -1:]) | (top_p >= 1)  # the mass before a kept token is below top_p
        last = jnp.maximum(jnp.sum(kept, -1) - 1, 0)
        nucleus = jnp.take_along_axis(ordered, last[:, None], -1)[:, 0]
        bound = jnp.maximum(bound, jnp.maximum(kth, nucleus))
    return bound


def mark(used: jax.Array, token: jax.Array, alive: jax.Array, axis: Axis) -> jax.Array:
    """``used`` with the new tokens of the rows that are alive."""
    new = (local_ids(used, axis) == token[:, None]) & alive[:, None]
    return jnp.where(new, jnp.uint8(IN_CONTEXT | GENERATED), used)


def log_softmax_at(logits: jax.Array, token: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Log-probability of one token per row, and the row's log of the sum of exponentials.

    Args:
      logits: [..., local vocab] float32.
      token: [...] int32.

    Returns:
      Two [...] float32, the same on every rank.
    """
    largest = jnp.max(gather_over(jnp.max(logits, -1), axis), 0)
    total = sum_over(jnp.sum(jnp.exp(logits - largest[..., None]), -1), axis)
    mine = local_ids(logits, axis) == token[..., None]
    picked = sum_over(jnp.sum(jnp.where(mine, logits, 0.0), -1), axis)
    norm = largest + jnp.log(total)
    return picked - norm, norm


def top_log_probabilities(logits: jax.Array, norm: jax.Array, n: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """The n most probable tokens: ids [batch, n] and log-probabilities [batch, n], the same on every rank."""
    here = min(n, logits.shape[-1])
    values, index = jax.lax.top_k(logits, here)
    ids = index.astype(jnp.int32) + rank(axis) * logits.shape[-1]
    values, ids = (jnp.moveaxis(gather_over(v, axis), 0, 1).reshape(logits.shape[0], -1) for v in (values, ids))
    values, index = jax.lax.top_k(values, n)  # ties take the lower place, hence the lower id
    return jnp.take_along_axis(ids, index, -1), values - norm[:, None]
