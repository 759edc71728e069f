"""One call of the generator on the host: prompts in pieces of bounded size, tokens in chunks of fixed length."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_jax import processes
from nemotron_jax.cache import Cache, MambaCache
from nemotron_jax.generation import speculation
from nemotron_jax.generation.programs import Written, read_program, vocab_columns, write_program
from nemotron_jax.generation.sampling import IN_CONTEXT, Sampling, controls
from nemotron_jax.generation.speculation import Draft
from nemotron_jax.generation.state import Snapshot, restore
from nemotron_jax.runtime import NemotronH

SMALLEST_PIECE = 16


def bucket(n: int, smallest: int) -> int:
    """The power of two at or above ``n``, and at least ``smallest``: programs are compiled for these sizes only."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def capacity_of(cache: Cache, draft: Draft | None) -> int:
    """Slots for tokens, of the model or of its head."""
    return max(cache.capacity or 0, draft.cache.capacity or 0 if draft is not None else 0)


def pieces(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """How uneven rows are read in pieces of at most ``most`` tokens: for each piece the (start, stop) of every row.

    Rows end together: all but the last ``most`` tokens of a row are in earlier pieces, and a row's first piece is its
    short one. So a row is cut in the same places whatever the batch around it.
    """
    count = max(1, -(-max(lengths, default=0) // most))
    for left in range(count - 1, -1, -1):
        yield [(max(0, n - (left + 1) * most), max(0, n - left * most)) for n in lengths]


def read(
    model: NemotronH,
    cache: Cache,
    logits: jax.Array,
    rows: Sequence[Sequence[int]],
    most: int,
    draft: Draft | None = None,
) -> tuple[Cache, jax.Array, Draft | None]:
    """Let every row read its tokens (none: it stays as it is). The cache, the logits and the draft are taken.

    Args:
      rows: new tokens of each row of the cache.
      most: longest piece.
      draft: of a head that reads along.
    """
    capacity = capacity_of(cache, draft)
    if not any(rows):
        return cache, logits, draft
    for spans in pieces([len(row) for row in rows], most):
        new = np.array([stop - start for start, stop in spans], np.int32)
        width = min(bucket(int(new.max(initial=0)), SMALLEST_PIECE), max(most, 1))
        ids = np.zeros((len(rows), width), np.int32)
        for i, (start, stop) in enumerate(spans):
            ids[i, : stop - start] = rows[i][start:stop]
        if draft is None:
            cache, logits = read_program(model, len(rows), width, capacity)(ids, new, cache, logits)
        else:
            program = speculation.read_program(model, len(rows), width, capacity, draft.hidden.shape[1] - 1)
            cache, logits, draft = program(ids, new, cache, logits, draft)
    return cache, logits, draft


@dataclasses.dataclass
class Decoding:
    """The running state of one call.

    Attributes:
      cache, logits: on the device, behind ``tokens``.
      tokens: all tokens of each row so far, prompt and answer.
      left: [batch] int, tokens each row may still write; 0 where it has ended.
      steps: tokens per chunk; with ``guesses`` as many rounds as write about so many.
      guesses: of the multi-token-prediction head per round; ``draft`` is what it goes on from.
      proposed, accepted: guesses so far, and how many of them stood.
    """

    model: NemotronH
    cache: Cache
    logits: jax.Array
    tokens: list[list[int]]
    left: np.ndarray
    sampling: Sampling
    seeds: np.ndarray
    eos: tuple[int, ...]
    logprobs: int | None
    steps: int
    longest_piece: int
    undo: bool = False
    guesses: int = 0
    draft: Draft | None = None
    proposed: int = 0
    accepted: int = 0

    def __post_init__(self):
        columns = vocab_columns(self.model)
        self.prompt_lengths = [len(row) for row in self.tokens]
        self.used = None
        traits = self.sampling.traits
        if traits.penalised:
            used = np.zeros((len(self.tokens), columns), np.uint8)
            for i, row in enumerate(self.tokens):
                used[i, row] = IN_CONTEXT
            self.used = used
        self.controls = controls(self.sampling, self.seeds, self.eos, columns)
        batch, capacity = len(self.tokens), capacity_of(self.cache, self.draft)
        if self.draft is None:
            self.program = write_program(self.model, batch, capacity, self.steps, traits, self.logprobs)
        else:
            rounds = max(1, self.steps // (self.guesses + 1))
            self.program = speculation.write_program(
                self.model, batch, capacity, rounds, self.guesses, traits, self.logprobs
            )
        self._before: tuple[Snapshot, list[int]] | None = None

    def chunk(self) -> Written:
        """Write further tokens in each row that has not ended; host arrays. ``tokens`` and ``left`` follow."""
        if self.undo:
            self._before = (self._snapshot(), [len(row) for row in self.tokens])
        left = self.left.astype(np.int32)
        if self.draft is None:
            self.cache, self.logits, self.used, written = self.program(
                self.cache, self.logits, self.used, left, self.controls
            )
        else:
            self.cache, self.logits, self.used, written, self.draft = self.program(
                self.cache, self.logits, self.used, left, self.controls, self.draft
            )
        written, broken = processes.host((written, jnp.any(jnp.isnan(self.logits), axis=-1)))
        if np.any(broken[: len(self.tokens)] & (self.left > 0)):
            rows = np.flatnonzero(broken[: len(self.tokens)] & (self.left > 0)).tolist()
            raise FloatingPointError(
                f"the model's logits are not numbers (NaN) in rows {rows}: weights or state are damaged"
            )
        if self.draft is not None:
            rounds = int(np.sum(written.tokens[:: self.guesses + 1] >= 0))
            self.proposed += self.guesses * rounds
            self.accepted += int(np.sum(written.tokens >= 0)) - rounds
        for i in np.flatnonzero(self.left):
            column = written.tokens[:, i]
            row = column[column >= 0].tolist()
            self.tokens[i] += row
            self.left[i] = 0 if row[-1] in self.eos else self.left[i] - len(row)
        return written

    def cut(self, lengths: dict[int, int]) -> None:
        """End some rows after fewer tokens than the last chunk wrote: by a stop string, known only to the host.

        With ``undo`` the rows' states go back too: to where the chunk began, and over the tokens that stay.

        Args:
          lengths: row -> tokens that stay, all in all.
        """
        again: list[list[int]] = [[] for _ in self.tokens]
        for i, n in lengths.items():
            self.left[i] = 0
            if self._before is not None and n < len(self.tokens[i]):
                again[i] = self.tokens[i][self._before[1][i] : n]
            del self.tokens[i][n:]
        if self._before is not None and any(again):
            back = np.array([bool(row) for row in again])
            self.cache = restore(self.cache, self._before[0], back)
            self.cache, self.logits, _ = read(self.model, self.cache, self.logits, again, self.longest_piece)

    def _snapshot(self) -> Snapshot:
        copy = jax.tree.map(
            lambda x: x.copy(), [la if isinstance(la, MambaCache) else None for la in self.cache.layers]
        )
        return Snapshot(
            tuple(len(row) for row in self.tokens), tuple(copy), self.cache.length.copy(), self.logits.copy()
        )
