"""The device programs of generation: read a piece of the prompts, write a fixed number of tokens.

Both keep the state of a batch on the device as ``(cache, logits)``: what the rows have read, and the logits behind it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax.cache import Cache, Rows, cleaned
from nemotron_jax.generation.sampling import (
    Controls,
    Traits,
    choose,
    log_softmax_at,
    mark,
    top_log_probabilities,
)
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, axis_size, padded_vocab
from pallas_kernels import selection

GREEDY = Traits()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Written:
    """What a decoding program gives out.

    Attributes:
      tokens: [steps, batch] int32; -1 where the row had ended.
      logprobs: [steps, batch] float32, of the tokens; None unless asked for.
      top_ids, top_logprobs: [steps, batch, n]; None unless asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def vocab_columns(model: NemotronH) -> int:
    """Columns of the logits over all ranks."""
    return padded_vocab(model.config.vocab_size, model.axis) if model.rules.vocab else model.config.vocab_size


def kept(model: NemotronH, key: tuple, make: Callable[[], Callable]) -> Callable:
    """The program that ``make`` builds, made once per model, key, fusion plan and choice of kernels."""
    key = ("generation", *key, model.fusion, selection.key())
    if key not in model._programs:
        model._programs[key] = make()
    return model._programs[key]


def local_rows(model: NemotronH, batch: int) -> int:
    """Rows on one device."""
    return batch // axis_size(model.mesh, DATA)


def empty(model: NemotronH, batch: int, capacity: int) -> tuple[Cache, jax.Array]:
    """State of rows that have read nothing, made on the devices."""

    def make():
        shapes = model.cache_shapes(batch, capacity)
        tree = (shapes.tree, jax.ShapeDtypeStruct((batch, vocab_columns(model)), jnp.float32))
        specs = (shapes.specs, P(model.rows_spec, model.vocab_spec))
        out = jax.tree.map(lambda _, spec: NamedSharding(model.mesh, spec), tree, specs)
        return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree), out_shardings=out)

    return kept(model, ("empty", batch, capacity), make)()


def read_program(model: NemotronH, batch: int, tokens: int, capacity: int) -> Callable:
    """``(ids [batch, tokens], new [batch], cache, logits) -> (cache, logits)``: each row reads its first ``new``
    tokens.

    A row with no new token keeps its state and its logits. The cache and the logits are taken.
    """

    def make():
        plan = model.plan(batch, tokens)
        rows_spec, specs = model.rows_spec, model.cache_shapes(batch, capacity).specs
        logits_spec = P(rows_spec, model.vocab_spec)

        def local(network, state, ids, new, cache, logits):
            rows = Rows(cache.length, new, jnp.arange(tokens, dtype=jnp.int32) < new[:, None])
            x, cache, _ = network(ids, cache, rows, plan, state=state)
            last = jnp.take_along_axis(x, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
            return cache, jnp.where((new > 0)[:, None], network.logits(last)[:, 0], logits)

        return model.compile(
            local,
            (P(rows_spec), P(rows_spec), specs, logits_spec),
            (specs, logits_spec),
            flags=model.flags_state(plan, local_rows(model, batch) * tokens),
            donate=(2, 3),
        )

    return kept(model, ("read", batch, tokens, capacity), make)


def write_program(
    model: NemotronH, batch: int, capacity: int, steps: int, traits: Traits = GREEDY, logprobs: int | None = None
) -> Callable:
    """``(cache, logits, used, left, controls) -> (cache, logits, used, Written)``: up to ``left`` [batch] more tokens
    per row.

    A row ends with an end token, or when it has written ``left`` tokens; no row writes more than ``steps``. Every
    token written is also read, the last one too, so that the state is always that of all tokens. ``used`` is None
    unless ``traits.penalised``. Cache, logits and ``used`` are taken.

    Args:
      logprobs: None, or for how many of the most probable tokens, besides the chosen one, log-probabilities are
        returned. They are those of the model: before bias, penalties, temperature and filters.
    """

    def make():
        plan = model.plan(batch, 1, steps)
        rows_spec, vocab_spec = model.rows_spec, model.vocab_spec
        specs = model.cache_shapes(batch, capacity).specs
        wide = P(rows_spec, vocab_spec)
        used_spec = wide if traits.penalised else None

        def local(network, state, cache, logits, used, left, controls):
            axis = network.lm_head.axis

            def step(carry, _):
                cache, logits, left, used = carry
                alive = left > 0
                token = choose(logits, used, cache.length, controls, traits, axis)
                written = Written(jnp.where(alive, token, -1))
                if logprobs is not None:
                    written.logprobs, norm = log_softmax_at(logits, token, axis)
                    if logprobs:
                        written.top_ids, written.top_logprobs = top_log_probabilities(logits, norm, logprobs, axis)
                if traits.penalised:
                    used = mark(used, token, alive, axis)
                rows = Rows(cache.length, alive.astype(jnp.int32), alive[:, None], clean=True)
                x, cache, _ = network(token[:, None], cache, rows, plan, state=state)
                logits = jnp.where(alive[:, None], network.logits(x)[:, 0], logits)
                ended = jnp.any(token[:, None] == controls.eos, axis=-1)
                left = jnp.where(alive & ~ended, left - 1, 0)
                return (cache, logits, left, used), written

            carry, written = lax.scan(step, (cleaned(cache), logits, left, used), None, length=steps)
            cache, logits, _, used = carry
            return cache, logits, used, written

        over_steps = P(None, rows_spec)
        written_specs = Written(
            over_steps,
            None if logprobs is None else over_steps,
            over_steps if logprobs else None,
            over_steps if logprobs else None,
        )
        in_specs: tuple[Any, ...] = (
            specs,
            wide,
            used_spec,
            P(rows_spec),
            Controls.specs(rows_spec, vocab_spec, traits),
        )
        return model.compile(
            local,
            in_specs,
            (specs, wide, used_spec, written_specs),
            flags=model.flags_state(plan, local_rows(model, batch)),
            donate=(0, 1, 2) if traits.penalised else (0, 1),
        )

    return kept(model, ("write", batch, capacity, steps, traits, logprobs), make)
