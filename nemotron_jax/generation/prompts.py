"""What a caller may give as prompts, as token ids; every fault of every row said at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemotron_jax.generation.text import Tokenizer

Prompt = Any  # text, token ids, or chat messages


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a text, a list of ids and a list of messages are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "ndim"):
        rows = np.asarray(prompts)
        return [rows.tolist()] if rows.ndim == 1 else [row.tolist() for row in rows]
    if not hasattr(prompts, "__iter__"):
        raise ValueError(
            f"prompts: found {type(prompts).__name__}, accepted text, token ids, messages, or a list of them"
        )
    prompts = list(prompts)
    if prompts and all(isinstance(p, int | np.integer | dict) for p in prompts):
        return [prompts]
    return prompts


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    bos: int | None = None,
    continuing: bool = False,
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
      bos: what an empty text starts from.
      continuing: the rows have tokens behind them: no token is added in front of a text, and a row may add nothing.

    Raises:
      ValueError: naming every row that is empty, of another type, or holds ids out of the vocabulary.
    """
    rows, faults = [], []
    for i, prompt in enumerate(prompts):
        try:
            rows.append(_encode(prompt, tokenizer, vocab_size, bos, continuing))
        except ValueError as error:
            faults.append(f"prompt {i}: {error}")
    if faults:
        raise ValueError("; ".join(faults))
    return rows


def _encode(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, bos: int | None, continuing: bool
) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("found text, accepted token ids: this model has no tokenizer")
        ids = tokenizer.encode(prompt, specials=not continuing)
        if not ids and not continuing:
            if bos is None:
                raise ValueError("the text is empty, and the checkpoint has no first token to start from")
            ids = [bos]
    elif hasattr(prompt, "__iter__"):
        prompt = list(prompt)
        if prompt and all(isinstance(m, dict) for m in prompt):
            if tokenizer is None:
                raise ValueError("found messages, accepted token ids: this model has no tokenizer")
            ids = tokenizer.encode(tokenizer.render(prompt), specials=False)
        elif bad := [t for t in prompt if not isinstance(t, int | np.integer) or isinstance(t, bool)]:
            raise ValueError(f"found {bad[0]!r} among the tokens, accepted integers")
        else:
            ids = [int(t) for t in prompt]
            if not ids and not continuing:
                raise ValueError("found no tokens, accepted one or more")
    else:
        raise ValueError(f"found {type(prompt).__name__}, accepted text, token ids, or messages")
    if bad := [t for t in ids if not 0 <= t < vocab_size]:
        raise ValueError(f"found token {bad[0]}, accepted 0 to {vocab_size - 1}")
    return ids
