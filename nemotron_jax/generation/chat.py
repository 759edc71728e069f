"""A conversation that only ever appends: each turn reads the new words alone, whatever the length of the history."""

from collections.abc import Iterator

from nemotron_jax.generation.generator import Generator
from nemotron_jax.generation.results import Piece
from nemotron_jax.generation.state import State

_PLACE = "\u2063answer\u2063"  # stands for the answer where the template is asked what follows it


class Conversation:
    """A chat with one model. Without a chat template the texts simply follow each other.

    Attributes:
      state: behind everything said so far; None before the first turn. Keep it to come back to this place.
      plain: the checkpoint has no chat template.
    """

    def __init__(self, generator: Generator, *, system: str | None = None):
        """Begin with an optional system message.

        Raises:
          ValueError: if the model has no tokenizer, or a system message is given and there is no template to put it in.
        """
        if generator.tokenizer is None:
            raise ValueError("chat: this model has no tokenizer")
        self._tokenizer = generator.tokenizer
        self.plain = generator.tokenizer.chat_template is None
        if self.plain and system:
            raise ValueError("system: found a text, accepted none: this checkpoint has no chat template")
        self._generator = generator
        self._opening = [{"role": "system", "content": system}] if system else []
        self._ended_by: int | None = None  # the end token that the last answer closed with
        self.state: State | None = None
        self.turns = 0

    def say(self, text: str, *, seed: int = 0) -> Iterator[Piece]:
        """The answer to ``text``, piece by piece. The turn counts once its last piece has been taken."""
        run = self._generator.start([self._tokens(text)], seed, self.state, True)
        for piece in self._generator.pieces(run):
            completion = piece.completion
            if completion is not None:
                self.state = self._generator.state_of(run)
                last = completion.tokens[-1] if completion.tokens else None
                self._ended_by = last if completion.finish_reason == "eos" else None
                self.turns += 1
            yield piece

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self._tokenizer
        if self.plain:
            ids = tokenizer.encode(text, specials=self.state is None)
            return ids or tokenizer.encode(" ", specials=False)
        user = {"role": "user", "content": text}
        if self.state is None:
            return tokenizer.encode(tokenizer.render([*self._opening, user]), specials=False)
        # What stands between an answer and the next one, whatever the template did to earlier turns.
        question = {"role": "user", "content": "-"}
        whole = tokenizer.render([*self._opening, question, {"role": "assistant", "content": _PLACE}, user])
        between = whole[whole.rindex(_PLACE) + len(_PLACE) :]
        ids = tokenizer.encode(between, specials=False)
        if self._ended_by is not None and ids[:1] == [self._ended_by]:
            ids = ids[1:]
        return ids
