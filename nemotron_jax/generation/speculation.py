"""Speculative writing with the multi-token-prediction head: several tokens per pass, none of them different.

A round draws the next token from the model's logits as ever, lets the head guess the ones after it, and runs the
model over all of them at once. A guess stands if it is the very token that the model itself draws there: greedily the
most probable one, otherwise the one that the row's noise at that position picks. So the tokens are those of plain
writing, and with them their distribution; the head only decides how many come out of a round. It draws with the same
noise, which makes its guesses agree more often. The states of Mamba blocks are kept behind every token of the round,
and the one behind the last token that stands goes on; keys and values of refused tokens are overwritten.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax.cache import AttentionCache, Cache, MambaCache, Rows, cleaned
from nemotron_jax.generation.programs import Written, kept, local_rows
from nemotron_jax.generation.sampling import (
    Controls,
    Traits,
    choose,
    log_softmax_at,
    mark,
    top_log_probabilities,
)
from nemotron_jax.runtime import NemotronH


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Draft:
    """What the head goes on from.

    Attributes:
      cache: of the head, behind all pairs (state behind a token, next token) that it has seen.
      hidden: [batch, guesses + 1, hidden], states behind the last tokens, which the head has not seen yet.
      tokens: [batch, guesses + 1] int32, the token after each; the one after the last is not known yet.
      new: [batch] int32, how many of them are real.
    """

    cache: Cache
    hidden: jax.Array
    tokens: jax.Array
    new: jax.Array


def draft_specs(model: NemotronH, batch: int, capacity: int) -> Draft:
    """PartitionSpecs of a draft."""
    rows = P(model.rows_spec)
    return Draft(model.mtp_cache_shapes(batch, capacity).specs, rows, rows, rows)


def empty_draft(model: NemotronH, batch: int, capacity: int, guesses: int) -> Draft:
    """A head that has seen nothing, made on the devices. Its first guesses go on from a state of zeros."""

    def make():
        shapes = Draft(
            model.mtp_cache_shapes(batch, capacity).tree,
            jax.ShapeDtypeStruct((batch, guesses + 1, model.config.hidden_size), model.dtype),
            jax.ShapeDtypeStruct((batch, guesses + 1), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        )
        out = jax.tree.map(lambda _, spec: NamedSharding(model.mesh, spec), shapes, draft_specs(model, batch, capacity))

        def build():
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return dataclasses.replace(zeros, new=jnp.ones(batch, jnp.int32))

        return jax.jit(build, out_shardings=out)

    return kept(model, ("empty draft", batch, capacity, guesses), make)()


def read_program(model: NemotronH, batch: int, tokens: int, capacity: int, guesses: int) -> Callable:
    """``(ids, new, cache, logits, draft) -> (cache, logits, draft)``: as the plain one; the head reads along."""

    def make():
        plan, head_plan = model.plan(batch, tokens), model.mtp_plan(batch, tokens)
        rows_spec, specs = P(model.rows_spec), model.cache_shapes(batch, capacity).specs
        logits_spec, head_specs = P(model.rows_spec, model.vocab_spec), draft_specs(model, batch, capacity)

        def local(network, state, ids, new, cache, logits, draft):
            place = jnp.arange(tokens, dtype=jnp.int32)
            x, after, _ = network(ids, cache, Rows(cache.length, new, place < new[:, None]), plan, state=state)
            last = jnp.take_along_axis(x, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
            read = new > 0
            logits = jnp.where(read[:, None], network.logits(last)[:, 0], logits)
            # the state before each token; the first token of a row has none, and makes no pair
            before = jnp.concatenate([draft.hidden[:, :1], x[:, :-1]], axis=1)
            skip = (cache.length == 0).astype(jnp.int32)
            index = jnp.minimum(place + skip[:, None], tokens - 1)
            pairs = jnp.maximum(new - skip, 0)
            rows = Rows(draft.cache.length, pairs, place < pairs[:, None])
            _, head = network.draft(
                jnp.take_along_axis(before, index[..., None], axis=1),
                jnp.take_along_axis(ids, index, axis=1),
                draft.cache,
                rows,
                head_plan,
                state=state,
            )
            behind = jnp.where(read[:, None], last[:, 0], draft.hidden[:, 0])
            hidden = draft.hidden.at[:, 0].set(behind)
            return after, logits, Draft(head, hidden, draft.tokens, draft.new)

        return model.compile(
            local,
            (rows_spec, rows_spec, specs, logits_spec, head_specs),
            (specs, logits_spec, head_specs),
            flags=_flags(model, (plan, head_plan), local_rows(model, batch) * tokens),
            donate=(2, 3, 4),
        )

    return kept(model, ("read along", batch, tokens, capacity, guesses), make)


def write_program(
    model: NemotronH, batch: int, capacity: int, rounds: int, guesses: int, traits: Traits, logprobs: int | None
) -> Callable:
    """``(cache, logits, used, left, controls, draft) -> (cache, logits, used, Written, draft)``: ``rounds`` rounds.

    As the plain one, but a round writes 1 to ``guesses`` + 1 tokens per row: :class:`Written` has ``guesses`` + 1
    entries for each, -1 where a guess did not stand.
    """
    width = guesses + 1

    def make():
        plan = model.plan(batch, width, rounds)
        wide_plan, one_plan = model.mtp_plan(batch, width), model.mtp_plan(batch, 1)
        rows_spec, vocab_spec = model.rows_spec, model.vocab_spec
        specs, head_specs = model.cache_shapes(batch, capacity).specs, draft_specs(model, batch, capacity)
        wide = P(rows_spec, vocab_spec)
        used_spec = wide if traits.penalised else None

        def local(network, state, cache, logits, used, left, controls, draft):
            axis = network.lm_head.axis
            place = jnp.arange(width, dtype=jnp.int32)

            def draw(logits, used, position):
                return choose(logits, used, position, controls, traits, axis)

            def marked(used, token, rows):
                return mark(used, token, rows, axis) if traits.penalised else used

            def guess(draft, first, used, alive, start):
                """The tokens after ``first`` by the head, and its cache behind the pairs that are certain."""
                tokens = jnp.where(place == (draft.new - 1)[:, None], first[:, None], draft.tokens)
                real = (place < draft.new[:, None]) & alive[:, None]
                rows = Rows(draft.cache.length, jnp.where(alive, draft.new, 0), real, clean=True)
                x, certain = network.draft(draft.hidden, tokens, draft.cache, rows, wide_plan, state=state)
                x = jnp.take_along_axis(x, (draft.new - 1)[:, None, None], axis=1)
                ahead, found = certain, []
                for k in range(guesses):
                    if k:
                        rows = Rows(ahead.length, alive.astype(jnp.int32), alive[:, None], clean=True)
                        x, ahead = network.draft(x, found[-1][:, None], ahead, rows, one_plan, state=state)
                    found.append(draw(network.logits(x)[:, 0], used, start + 1 + k))
                    used = marked(used, found[-1], alive)
                # keys and values behind the certain ones are overwritten later; recurrent states are not taken over
                layers = tuple(
                    new if isinstance(new, AttentionCache) else old
                    for old, new in zip(certain.layers, ahead.layers, strict=True)
                )
                return found, Cache(layers, certain.length)

            def one_round(carry, _):
                cache, logits, used, left, draft = carry
                alive, start = left > 0, cache.length
                first = draw(logits, used, start)
                used = marked(used, first, alive)
                guessed, head = guess(draft, first, used, alive, start)
                block = jnp.stack([first, *guessed], axis=1)
                real = jnp.broadcast_to(alive[:, None], block.shape)
                rows = Rows(start, jnp.where(alive, width, 0), real, every=True, clean=True)
                x, after, _ = network(block, cache, rows, plan, state=state)
                behind = network.logits(x)  # [batch, width, local vocab]

                count, stands = jnp.ones_like(left), alive
                for k in range(guesses):
                    stands = stands & (draw(behind[:, k], used, start + 1 + k) == guessed[k])
                    used = marked(used, guessed[k], stands)
                    count = count + stands
                ends = jnp.any(block[..., None] == controls.eos, axis=-1)
                until_end = jnp.where(jnp.any(ends, -1), jnp.argmax(ends, -1).astype(jnp.int32) + 1, width + 1)
                count = jnp.minimum(jnp.minimum(count, until_end), left)

                written = Written(jnp.where((place < count[:, None]) & alive[:, None], block, -1).T)
                if logprobs is not None:
                    _add_logprobs(written, jnp.concatenate([logits[:, None], behind[:, :-1]], 1), block, logprobs, axis)

                def at_last(new, old):
                    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (new.ndim - 1))
                    new = jnp.take_along_axis(new, index, axis=1)[:, 0]
                    return jnp.where(alive.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

                layers = tuple(
                    jax.tree.map(at_last, new, old) if isinstance(new, MambaCache) else new
                    for new, old in zip(after.layers, cache.layers, strict=True)
                )
                cache = Cache(layers, start + jnp.where(alive, count, 0))
                logits = at_last(behind, logits)
                following = jnp.pad(block[:, 1:], ((0, 0), (0, 1)))
                draft = Draft(
                    head,
                    jnp.where(alive[:, None, None], x, draft.hidden),
                    jnp.where(alive[:, None], following, draft.tokens),
                    jnp.where(alive, count, draft.new),
                )
                left = jnp.where(alive & (until_end > count), left - count, 0)
                return (cache, logits, used, left, draft), written

            draft = dataclasses.replace(draft, cache=cleaned(draft.cache))
            carry = (cleaned(cache), logits, used, left, draft)
            (cache, logits, used, _, draft), written = lax.scan(one_round, carry, None, length=rounds)
            # [rounds, width, ...] -> [rounds * width, ...]
            written = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), written)
            return cache, logits, used, written, draft

        over = P(None, rows_spec)
        top = over if logprobs else None
        written_specs = Written(over, None if logprobs is None else over, top, top)
        return model.compile(
            local,
            (specs, wide, used_spec, P(rows_spec), Controls.specs(rows_spec, vocab_spec, traits), head_specs),
            (specs, wide, used_spec, written_specs, head_specs),
            flags=_flags(model, (plan, wide_plan, one_plan), local_rows(model, batch) * width),
            donate=(0, 1, 2, 5) if traits.penalised else (0, 1, 5),
        )

    return kept(model, ("speculate", batch, capacity, rounds, guesses, traits, logprobs), make)


def _add_logprobs(written: Written, logits: jax.Array, block: jax.Array, n: int, axis) -> None:
    """Log-probabilities of the block's tokens, from the logits before each."""
    found = []
    for k in range(block.shape[1]):
        logprob, norm = log_softmax_at(logits[:, k], block[:, k], axis)
        found.append((logprob, *(top_log_probabilities(logits[:, k], norm, n, axis) if n else ())))
    columns = [jnp.stack(c) for c in zip(*found, strict=True)]
    written.logprobs = columns[0]
    if n:
        written.top_ids, written.top_logprobs = columns[1:]


def _flags(model: NemotronH, plans, local_tokens: int):
    """One set of buffers for all plans of a program."""
    return next((s for p in plans if (s := model.flags_state(p, local_tokens)) is not None), None)
