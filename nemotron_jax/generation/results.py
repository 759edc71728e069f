"""What generation gives back, and how one row's answer comes together."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from nemotron_jax.generation.programs import Written
from nemotron_jax.generation.prompts import Prompt
from nemotron_jax.generation.state import State
from nemotron_jax.generation.stopping import EOS, LENGTH, STOP, RowText


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one token, in nats, by the model alone (before bias, penalties, temperature and filters).

    Attributes:
      token: the token that was chosen.
      logprob: its log-probability.
      top: the most probable (token, logprob) pairs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was written after one prompt.

    Attributes:
      prompt: as it was given.
      prompt_tokens: what the model had read, tokens of a continued state included.
      text: without special tokens, cut before a stop string; None where the model has no tokenizer.
      tokens: every token written, an end token and those of a stop string included.
      finish_reason: ``"eos"`` an end token, ``"stop"`` a stop string, ``"length"`` max_new_tokens or the last position.
      seed: of this row.
      logprobs: one per token, where asked for.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    text: str | None
    tokens: tuple[int, ...]
    finish_reason: str
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream gives out: more of one row.

    Attributes:
      row: index of the prompt.
      text: certain text; empty while a character or a stop string is undecided, or where the model has no tokenizer.
      tokens: tokens of this piece.
      completion: on the row's last piece the whole of it, otherwise None.
    """

    row: int
    text: str
    tokens: tuple[int, ...]
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True)
class Generation(Sequence):
    """The completions of a call, in the order of the prompts.

    Attributes:
      state: behind prompts and answers, with ``keep_state=True``.
      proposed, accepted: with ``speculative_tokens``, guesses of the multi-token-prediction head, and those that stood.
    """

    completions: tuple[Completion, ...]
    state: State | None = None
    proposed: int = 0
    accepted: int = 0

    def __getitem__(self, index):
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)


@dataclasses.dataclass
class Answer:
    """One row's answer while it is written.

    Attributes:
      row: index of the prompt.
      text: cuts the text at a stop string; None where the model has no tokenizer.
      logprobs: None unless asked for.
    """

    row: int
    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    seed: int
    text: RowText | None
    logprobs: list[TokenLogprob] | None
    written: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    completion: Completion | None = None

    def add(self, tokens: Sequence[int], chunk: Written) -> Piece:
        """Take in the row's tokens of one chunk, up to the one that completes a stop string."""
        text, taken = ("", len(tokens)) if self.text is None else self.text.push(tokens)
        if self.logprobs is not None:
            self.logprobs += _details(chunk, self.row, tokens[:taken])
        self.tokens += tokens[:taken]
        self.written += text
        return Piece(self.row, text, tuple(tokens[:taken]))

    @property
    def stopped(self) -> bool:
        return self.text is not None and self.text.stopped

    def end(self, last: Piece, eos: Sequence[int]) -> Piece:
        """``last`` with what was held back and the completion: no further token comes."""
        stopped, rest = self.stopped, ""
        if self.text is not None:
            rest = self.text.finish()
            self.written += rest
        if stopped:
            reason = STOP
        elif self.tokens and self.tokens[-1] in eos:
            reason = EOS
        else:
            reason = STOP if self.stopped else LENGTH
        self.completion = Completion(
            prompt=self.prompt,
            prompt_tokens=self.prompt_tokens,
            text=None if self.text is None else self.written,
            tokens=tuple(self.tokens),
            finish_reason=reason,
            seed=self.seed,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )
        return Piece(last.row, last.text + rest, last.tokens, self.completion)


def _details(chunk: Written, row: int, tokens: Sequence[int]) -> list[TokenLogprob]:
    found = []
    assert chunk.logprobs is not None
    steps = np.flatnonzero(np.asarray(chunk.tokens)[:, row] >= 0)  # a guess that did not stand leaves a gap
    for step, token in zip(steps, tokens, strict=False):
        top: tuple[tuple[int, float], ...] = ()
        if chunk.top_ids is not None and chunk.top_logprobs is not None:
            ids, values = chunk.top_ids[step, row].tolist(), chunk.top_logprobs[step, row].tolist()
            top = tuple(zip(ids, values, strict=True))
        found.append(TokenLogprob(token, float(chunk.logprobs[step, row]), top))
    return found
