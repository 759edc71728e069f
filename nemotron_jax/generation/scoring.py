"""Log-likelihoods of given texts: what a perplexity and an evaluation harness are made of."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from nemotron_jax import compilation_cache, processes
from nemotron_jax.cache import Rows
from nemotron_jax.generation import memory
from nemotron_jax.generation.decoding import SMALLEST_PIECE, bucket, pieces
from nemotron_jax.generation.generator import NO_LIMIT
from nemotron_jax.generation.programs import empty, kept, local_rows
from nemotron_jax.generation.prompts import Prompt, encode
from nemotron_jax.generation.sampling import log_softmax_at
from nemotron_jax.generation.text import Tokenizer
from nemotron_jax.runtime import MIN_CAPACITY, NemotronH
from nemotron_jax.sharding import DATA, arg_max_over, axis_size

MAX_LOGITS = 1 << 26  # entries of one rank's float32 logits held at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """What the model thinks of one row.

    Attributes:
      tokens: of the row.
      logprobs: [len(tokens) - 1] float32, nats: of each token but the first, given those before it.
      greedy: [len(tokens) - 1] bool: the token was the most probable one.
    """

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    greedy: np.ndarray


def score_program(model: NemotronH, batch: int, tokens: int, capacity: int) -> Callable:
    """``(ids [batch, tokens], new [batch], targets [batch, tokens], cache) -> (cache, logprobs, greedy)``.

    The logits of a few positions exist at a time, never those of all.
    """

    def make():
        plan = model.plan(batch, tokens)
        rows_spec, specs = P(model.rows_spec), model.cache_shapes(batch, capacity).specs

        def local(network, state, ids, new, targets, cache):
            axis = network.lm_head.axis
            rows = Rows(cache.length, new, jnp.arange(tokens, dtype=jnp.int32) < new[:, None])
            x, cache, _ = network(ids, cache, rows, plan, state=state)
            b = ids.shape[0]
            block = max(1, min(tokens, MAX_LOGITS // max(1, b * model.config.vocab_size // axis.size)))
            count = -(-tokens // block)

            def blocks(a):
                a = jnp.pad(a, ((0, 0), (0, count * block - tokens)) + ((0, 0),) * (a.ndim - 2))
                return jnp.moveaxis(a.reshape(b, count, block, *a.shape[2:]), 1, 0)

            def one(arguments):
                x, targets = arguments
                logits = network.logits(x)
                logprob, _ = log_softmax_at(logits, targets, axis)
                best = arg_max_over(logits.reshape(b * block, -1), axis).reshape(b, block)
                return logprob, best == targets

            logprobs, greedy = lax.map(one, (blocks(x), blocks(targets)))
            joined = (jnp.moveaxis(a, 0, 1).reshape(b, count * block)[:, :tokens] for a in (logprobs, greedy))
            return cache, *joined

        return model.compile(
            local,
            (rows_spec, rows_spec, rows_spec, specs),
            (specs, rows_spec, rows_spec),
            flags=model.flags_state(plan, local_rows(model, batch) * tokens),
            donate=(3,),
        )

    return kept(model, ("score", batch, tokens, capacity), make)


def log_likelihoods(
    model: NemotronH,
    texts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = None,
    batch_size: int = 8,
    piece: int = 2048,
    max_positions: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Score]:
    """The log-probability of every token of every text but its first.

    Args:
      texts: text, token ids, or messages; of any lengths.
      batch_size: rows at a time; rows of like length go together.
      piece: longest piece in which a row is read.
      max_positions: longest row; default the config's max_position_embeddings.
      progress: called with the number of rows done.

    Returns:
      One Score per text, in their order.

    Raises:
      ValueError: naming every text that is empty, too long, or no text.
    """
    if batch_size < 1 or piece < 1:
        raise ValueError(f"batch_size and piece: found {batch_size} and {piece}, accepted 1 or more")
    compilation_cache.enable()
    tokenizer = tokenizer or model.tokenizer
    limit = max_positions or model.config.max_position_embeddings or NO_LIMIT
    rows = encode(texts, tokenizer, model.config.vocab_size, bos=model.config.bos_token_id)
    if too_long := [
        f"text {i}: found {len(row)} tokens, accepted {limit}" for i, row in enumerate(rows) if len(row) > limit
    ]:
        raise ValueError("; ".join(too_long))
    data = axis_size(model.mesh, DATA)
    batch_size = min(batch_size, max(len(rows), 1))
    batch = batch_size + -batch_size % data
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores: list[Score | None] = [None] * len(rows)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = [rows[i] for i in chosen] + [[]] * (batch - len(chosen))
        for i, (logprobs, greedy) in zip(chosen, _batch(model, inputs, piece), strict=False):
            scores[i] = Score(tuple(rows[i]), logprobs, greedy)
        progress(len(chosen))
    return [s for s in scores if s is not None]


def _batch(model: NemotronH, rows: Sequence[Sequence[int]], most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    lengths = [max(0, len(row) - 1) for row in rows]  # the last token of a row is only a target
    capacity = bucket(max(lengths), MIN_CAPACITY)
    memory.check(model, len(rows), capacity, min(most, max(lengths)))
    cache, _ = empty(model, len(rows), capacity)
    found: list[list] = [[] for _ in rows]
    for spans in pieces(lengths, most):
        new = np.array([stop - start for start, stop in spans], np.int32)
        width = min(bucket(int(new.max()), SMALLEST_PIECE), most)
        ids, targets = np.zeros((2, len(rows), width), np.int32)
        for i, (start, stop) in enumerate(spans):
            ids[i, : stop - start] = rows[i][start:stop]
            targets[i, : stop - start] = rows[i][start + 1 : stop + 1]
        cache, logprobs, greedy = score_program(model, len(rows), width, capacity)(ids, new, targets, cache)
        logprobs, greedy = processes.host((logprobs, greedy))
        for i, n in enumerate(new):
            found[i].append((logprobs[i, :n], greedy[i, :n]))
    return [(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])) for pairs in found]


def windows(tokens: Sequence[int], size: int) -> Iterator[list[int]]:
    """A long text in windows of ``size`` predictions; each begins with the last token of the one before."""
    for start in range(0, max(1, len(tokens) - 1), size):
        yield list(tokens[start : start + size + 1])


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over texts: nats of all tokens but the first of each window, and how many those are."""

    nats: float
    tokens: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Total":
        return cls(
            -sum(float(np.sum(s.logprobs, dtype=np.float64)) for s in scores), sum(s.logprobs.size for s in scores)
        )
