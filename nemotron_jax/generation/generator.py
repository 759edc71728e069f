"""``Generator``: settings of text generation over a loaded model, and the calls that use them."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from nemotron_jax import compilation_cache
from nemotron_jax.generation import memory
from nemotron_jax.generation.decoding import Decoding, bucket, read
from nemotron_jax.generation.programs import empty
from nemotron_jax.generation.prompts import Prompt, as_batch, encode
from nemotron_jax.generation.results import Answer, Generation, Piece
from nemotron_jax.generation.sampling import Sampling
from nemotron_jax.generation.speculation import empty_draft
from nemotron_jax.generation.state import Snapshot, State
from nemotron_jax.generation.stopping import RowText, check_eos, eos_of
from nemotron_jax.generation.text import Tokenizer
from nemotron_jax.runtime import MIN_CAPACITY, NemotronH
from nemotron_jax.sharding import DATA, axis_size

logger = logging.getLogger("nemotron_jax")

FROM_CHECKPOINT = "checkpoint"
NO_LIMIT = 1 << 30  # of positions, where neither the settings nor the config has one


@dataclasses.dataclass(frozen=True)
class Generator:
    """Text generation with fixed settings. Holds no state of a call: after an error it is as good as new.

    Prompts are text, token ids, or chat messages (the checkpoint's template renders them), one or a list of them of
    any lengths. Rows do not influence each other.

    What compiles a program (each is kept by the model and, on disk, by the compilation cache):
      reading: number of rows, longest new prompt rounded up to a power of two (16 to ``prefill_chunk``), cache
        capacity;
      writing: number of rows, cache capacity, steps per call, which of the sampling settings are in use, ``logprobs``,
        ``speculative_tokens``.
    The cache capacity is the longest row with its new tokens, rounded up to a power of two. Changing a temperature,
    top_k, top_p, min_p, penalty, bias, seed, stop string or end token compiles nothing, unless it was not in use
    before.

    Attributes:
      model: a loaded model on any mesh.
      tokenizer: default the checkpoint's, if it has one.
      max_new_tokens: most tokens per answer. Fewer where the model's last position comes first.
      temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, logit_bias: see :class:`Sampling`.
      eos: end tokens: an id, several, or None for no end token. Default those of the checkpoint
        (``generation_config.json`` before ``config.json``).
      stop: texts that end an answer; they are cut off.
      logprobs: None, or n: log-probabilities of the chosen and the n most probable tokens.
      speculative_tokens: guesses of the multi-token-prediction head per pass of the model (which must hold it:
        ``mtp=True`` at load). The tokens are those of plain writing; it takes fewer passes where guesses stand.
      steps_per_call: tokens written between two looks of the host; also the grain of a stream.
      prefill_chunk: longest piece in which prompts are read; bounds the memory of activations.
      max_positions: longest row; default the config's max_position_embeddings. The family has no position embedding,
        so a larger number runs; what the model makes of it is another matter.
    """

    model: NemotronH
    _: dataclasses.KW_ONLY
    tokenizer: Tokenizer | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    eos: int | Sequence[int] | None | str = FROM_CHECKPOINT
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    steps_per_call: int = 32
    prefill_chunk: int = 2048
    max_positions: int | None = None
    speculative_tokens: int = 0

    def __post_init__(self):
        if self.tokenizer is None:
            object.__setattr__(self, "tokenizer", self.model.tokenizer)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        vocab = self.model.config.vocab_size
        faults = self.sampling.faults(vocab)
        for name, least in (
            ("max_new_tokens", 0),
            ("steps_per_call", 1),
            ("prefill_chunk", 1),
            ("speculative_tokens", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                faults.append(f"{name}: found {value!r}, accepted an integer of at least {least}")
        if self.max_positions is not None and self.max_positions < 1:
            faults.append(f"max_positions: found {self.max_positions}, accepted 1 or more")
        if self.logprobs is not None and not (isinstance(self.logprobs, int) and 0 <= self.logprobs <= vocab):
            faults.append(f"logprobs: found {self.logprobs!r}, accepted None or 0 to {vocab}")
        if bad := [s for s in self.stop if not isinstance(s, str) or not s]:
            faults.append(f"stop: found {bad}, accepted texts of one character or more")
        elif self.stop and self.tokenizer is None:
            faults.append("stop: found texts, accepted none: this model has no tokenizer")
        if self.speculative_tokens and not self.model.mtp:
            faults.append(
                f"speculative_tokens: found {self.speculative_tokens!r}, accepted 0: this model holds no "
                "multi-token-prediction layers; load one that has them with mtp=True"
            )
        try:
            _ = self.ends
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError("generation: " + "; ".join(faults))
        compilation_cache.enable()

    @functools.cached_property
    def sampling(self) -> Sampling:
        return Sampling(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)})

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The end tokens in use."""
        if isinstance(self.eos, str):
            if self.eos != FROM_CHECKPOINT:
                raise ValueError(f"eos: found {self.eos!r}, accepted ids, None, or {FROM_CHECKPOINT!r}")
            return eos_of(self.model.config, self.model.folder)
        return check_eos(self.eos, self.model.config.vocab_size)

    @property
    def positions(self) -> int:
        """Longest row."""
        return self.max_positions or self.model.config.max_position_embeddings or NO_LIMIT

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        seed: int | Sequence[int] = 0,
        state: State | None = None,
        keep_state: bool = False,
        rows: int | None = None,
    ) -> Generation:
        """Write an answer to each prompt.

        Args:
          prompts: one or several; with ``state`` they go on its rows (None: the rows go on as they are).
          seed: of the sampling. A row's tokens depend on its seed and its own tokens alone. One number: row i takes
            seed + i.
          state: what the rows have behind them; it stays as it is.
          keep_state: also return the state behind the answers.
          rows: run at least this many, empty ones if need be: a last, smaller batch compiles nothing then.

        Raises:
          ValueError: before anything runs, naming every fault of every prompt.
        """
        run = self.start(prompts, seed, state, keep_state, rows=rows)
        for _ in self.pieces(run):
            pass
        if run.decoding.proposed:
            logger.info("speculation: %d of %d guesses stood", run.decoding.accepted, run.decoding.proposed)
        completions = tuple(a.completion for a in run.answers if a.completion is not None)
        decoding = run.decoding
        state = self.state_of(run) if keep_state else None
        return Generation(completions, state, decoding.proposed, decoding.accepted)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        seed: int | Sequence[int] = 0,
        state: State | None = None,
    ) -> Iterator[Piece]:
        """The same, piece by piece: each ``steps_per_call`` tokens, every row's new text.

        The texts of a row's pieces joined are its completion's text. Arguments are checked at once, not at the first
        piece.
        """
        return self.pieces(self.start(prompts, seed, state, False))

    def read(self, prompts: Prompt | Sequence[Prompt], *, state: State | None = None) -> State:
        """Let the model read prompts, and return the state behind them: a shared prefix, to be forked and continued."""
        run = self.start(prompts, 0, state, True, new_tokens=0)
        return self.state_of(run)

    # --------------------------------------------------------------------------------------------- one call
    def encode(self, prompts: Sequence[Prompt], *, continuing: bool = False) -> list[list[int]]:
        """Token ids of each prompt; see :func:`nemotron_jax.generation.prompts.encode`."""
        config = self.model.config
        return encode(prompts, self.tokenizer, config.vocab_size, bos=config.bos_token_id, continuing=continuing)

    def start(
        self,
        prompts,
        seed,
        state: State | None,
        keep_state: bool,
        *,
        new_tokens: int | None = None,
        rows: int | None = None,
    ) -> "Run":
        """Check the arguments of a call, read the prompts, and make ready to write."""
        model = self.model
        new_tokens = self.max_new_tokens if new_tokens is None else new_tokens
        if state is not None and state.model is not model:
            raise ValueError("state: found one of another model or mesh, accepted this model's; move it with State.to")
        if prompts is not None:
            given = as_batch(prompts)
        elif state is not None:
            given = [[] for _ in state.tokens]
        else:
            raise ValueError("prompts: found none, accepted one or more, or a state to continue")
        if not given:
            raise ValueError("prompts: found an empty list, accepted one prompt or more")
        if state is not None and len(given) != len(state):
            raise ValueError(f"prompts: found {len(given)}, accepted {len(state)}, as many as the state has rows")
        new = self.encode(given, continuing=state is not None)
        before = [[] for _ in given] if state is None else [list(row) for row in state.tokens]
        tokens = [a + b for a, b in zip(before, new, strict=True)]
        faults = [
            f"prompt {i}: found {len(row)} tokens, accepted {self.positions} (a larger max_positions raises that)"
            for i, row in enumerate(tokens)
            if len(row) > self.positions
        ]
        if faults:
            raise ValueError("; ".join(faults))
        seeds = _seeds(seed, len(given))
        left = np.array([min(new_tokens, self.positions - len(row)) for row in tokens], np.int64)
        if np.any(left < new_tokens):
            logger.warning(
                "max_new_tokens %d is more than the last position %d leaves in some rows", new_tokens, self.positions
            )

        batch = max(len(given), rows or 0)
        batch += -batch % axis_size(model.mesh, DATA)
        needed = max(len(row) + int(n) for row, n in zip(tokens, left, strict=True)) + self.speculative_tokens
        capacity = bucket(needed, MIN_CAPACITY)
        padding = batch - len(given)
        if state is not None:
            batch = state.cache.batch
            padding = batch - len(given)
            capacity = max(capacity, state.cache.capacity or 0)
        memory.check(model, batch, capacity, min(self.prefill_chunk, max(map(len, new))))
        cache, logits = empty(model, batch, capacity) if state is None else state.own(capacity)
        draft = None
        if self.speculative_tokens and new_tokens:
            draft = empty_draft(model, batch, capacity, self.speculative_tokens)
        cache, logits, draft = read(model, cache, logits, [*new, *[[]] * padding], self.prefill_chunk, draft)
        decoding = Decoding(
            model=model,
            cache=cache,
            logits=logits,
            tokens=[*tokens, *[[] for _ in range(padding)]],
            left=np.concatenate([left, np.zeros(padding, np.int64)]),
            sampling=self.sampling,
            seeds=np.array([*seeds, *[0] * padding], np.uint64),
            eos=self.ends,
            logprobs=self.logprobs,
            steps=min(self.steps_per_call, bucket(int(left.max()), 1)),
            longest_piece=self.prefill_chunk,
            undo=keep_state and bool(self.stop),
            guesses=self.speculative_tokens,
            draft=draft,
        )
        answers = [
            Answer(
                row=i,
                prompt=prompt,
                prompt_tokens=tuple(tokens[i]),
                seed=seeds[i],
                text=None if self.tokenizer is None else RowText(self.tokenizer, self.stop),
                logprobs=None if self.logprobs is None else [],
            )
            for i, prompt in enumerate(given)
        ]
        return Run(answers, decoding, state.snapshots if state is not None else ())

    def pieces(self, run: "Run") -> Iterator[Piece]:
        """Write until every row has ended."""
        decoding = run.decoding
        open_rows = [a for a in run.answers if decoding.left[a.row]]
        for answer in run.answers:
            if not decoding.left[answer.row]:
                yield answer.end(Piece(answer.row, "", ()), ())
        while open_rows:
            before = [len(row) for row in decoding.tokens]
            chunk = decoding.chunk()
            pieces = [answer.add(decoding.tokens[answer.row][before[answer.row] :], chunk) for answer in open_rows]
            cuts = {a.row: len(a.prompt_tokens) + len(a.tokens) for a in open_rows if a.stopped}
            if cuts:
                decoding.cut(cuts)
            for answer, piece in zip(open_rows, pieces, strict=True):
                yield piece if decoding.left[answer.row] else answer.end(piece, self.ends)
            open_rows = [a for a in open_rows if decoding.left[a.row]]

    def state_of(self, run: "Run") -> State:
        """The state behind what a call has written so far."""
        tokens = tuple(tuple(row) for row in run.decoding.tokens[: len(run.answers)])
        cache = dataclasses.replace(run.decoding.cache, longest=max(map(len, tokens)))
        return State(self.model, tokens, cache, run.decoding.logits, run.snapshots)


@dataclasses.dataclass
class Run:
    """One call: what was asked, and how far it is."""

    answers: list[Answer]
    decoding: Decoding
    snapshots: tuple[Snapshot, ...]


def _seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    seeds = [seed + i for i in range(rows)] if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != rows:
        raise ValueError(f"seed: found {len(seeds)}, accepted one number or {rows}, as many as prompts")
    if bad := [s for s in seeds if not isinstance(s, int | np.integer)]:
        raise ValueError(f"seed: found {bad[0]!r}, accepted integers")
    return [int(s) & 0xFFFFFFFFFFFFFFFF for s in seeds]
