"""What a batch of sequences has behind it, as an object to keep, fork, join, continue, and move between meshes.

A state is a value: continuing from it leaves it as it was. A recurrent state cannot be shortened; where one will want
  to
come back to a place, take a snapshot there (a copy of the recurrent states, without the keys and values).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax.cache import Cache, MambaCache
from nemotron_jax.generation.moving import canonical, place
from nemotron_jax.generation.programs import empty
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, axis_size


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A place to come back to: everything of the state but keys and values, which are only ever appended.

    Attributes:
      lengths: tokens of each row there.
      recurrent: per block MambaCache or None.
      logits: [batch, vocab], behind those tokens.
    """

    lengths: tuple[int, ...]
    recurrent: tuple[MambaCache | None, ...]
    length: jax.Array
    logits: jax.Array


@dataclasses.dataclass(frozen=True)
class State:
    """Rows of tokens that a model has read.

    Attributes:
      model: whose state it is.
      tokens: every token of each row, read in order.
      cache: the model's state behind them; it may hold more rows than ``tokens`` (padding up to the data axis).
      logits: [batch, vocab] float32, sharded; what comes next.
      snapshots: places that :meth:`truncate` may go back to.
    """

    model: NemotronH
    tokens: tuple[tuple[int, ...], ...]
    cache: Cache
    logits: jax.Array
    snapshots: tuple[Snapshot, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.tokens)

    def select(self, rows: Sequence[int]) -> "State":
        """These rows, in this order; a row may come several times. Snapshots are not taken along.

        Raises:
          ValueError: naming rows that there are not.
        """
        bad = [i for i in rows if not 0 <= i < len(self)]
        if bad or not rows:
            raise ValueError(f"rows: found {bad or 'none'}, accepted 0 to {len(self) - 1}")
        padded = [*rows, *[rows[0]] * (-len(rows) % axis_size(self.model.mesh, DATA))]
        index = np.asarray(padded, np.int32)
        specs = (
            self.model.cache_shapes(len(padded), self.cache.capacity or 0).specs,
            P(self.model.rows_spec, self.model.vocab_spec),
        )
        cache, logits = _take(
            (dataclasses.replace(self.cache, longest=None), self.logits), index, self._shardings(specs)
        )
        tokens = tuple(self.tokens[i] for i in rows)
        return State(self.model, tokens, dataclasses.replace(cache, longest=max(map(len, tokens))), logits)

    def fork(self, copies: int) -> "State":
        """Each row ``copies`` times, side by side."""
        if copies < 1:
            raise ValueError(f"copies: found {copies}, accepted 1 or more")
        return self.select([i for i in range(len(self)) for _ in range(copies)])

    @staticmethod
    def join(states: Sequence["State"]) -> "State":
        """The rows of several states of one model as one batch.

        Raises:
          ValueError: if there is none, or they belong to different models.
        """
        if not states:
            raise ValueError("states: found none, accepted one or more")
        model = states[0].model
        if any(s.model is not model for s in states):
            raise ValueError("states: found some of different models, accepted those of one; move them with State.to")
        capacity = max(s.cache.capacity or 0 for s in states)
        grown = [model.grow(s.cache, capacity) if s.cache.capacity else s.cache for s in states]
        parts = [(dataclasses.replace(c, longest=None), s.logits) for c, s in zip(grown, states, strict=True)]
        cache, logits = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        places: list[int] = []
        start = 0
        for s in states:
            places += range(start, start + len(s))
            start += s.cache.batch
        tokens = tuple(row for s in states for row in s.tokens)
        all_rows: list[tuple[int, ...]] = [()] * start
        for at, row in zip(places, tokens, strict=True):
            all_rows[at] = row
        return State(model, tuple(all_rows), cache, logits).select(places)

    def snapshot(self) -> "State":
        """The same state, with a place to come back to."""
        layers = tuple(
            jax.tree.map(jnp.copy, layer) if isinstance(layer, MambaCache) else None for layer in self.cache.layers
        )
        here = Snapshot(self.lengths, layers, jnp.copy(self.cache.length), jnp.copy(self.logits))
        return dataclasses.replace(self, snapshots=(*(s for s in self.snapshots if s.lengths != self.lengths), here))

    def truncate(self, lengths: int | Sequence[int]) -> "State":
        """Back to a snapshot.

        Args:
          lengths: tokens to keep in each row (one number: in all rows).

        Raises:
          ValueError: where no snapshot was taken at exactly these lengths: a recurrent state cannot be shortened.
        """
        wanted = (lengths,) * len(self) if isinstance(lengths, int) else tuple(lengths)
        if wanted == self.lengths:
            return self
        found = next((s for s in self.snapshots if s.lengths == wanted), None)
        if found is None:
            known = sorted(s.lengths for s in self.snapshots)
            raise ValueError(
                f"truncate: found lengths {wanted}, accepted those of a snapshot ({known or 'none was taken'}): "
                "the recurrent states of Mamba blocks cannot be shortened"
            )
        layers = tuple(
            new if isinstance(old, MambaCache) else old
            for old, new in zip(self.cache.layers, found.recurrent, strict=True)
        )
        earlier = tuple(s for s in self.snapshots if all(a <= b for a, b in zip(s.lengths, wanted, strict=True)))
        tokens = tuple(row[:n] for row, n in zip(self.tokens, wanted, strict=True))
        return State(self.model, tokens, Cache(layers, found.length, max(wanted)), found.logits, earlier)

    def to(self, model: NemotronH) -> "State":
        """The same state for the same model on another mesh, at any tensor-parallel degree.

        Raises:
          ValueError: if the other model's config, dtype or state dtype is not the same.
        """
        for name in ("config", "dtype", "state_dtype"):
            mine, other = getattr(self.model, name), getattr(model, name)
            if mine != other:
                what = "another config" if name == "config" else f"{other}"
                raise ValueError(
                    f"{name}: found {what}, accepted the state's own" + ("" if name == "config" else f", {mine}")
                )
        batch = len(self) + -len(self) % axis_size(model.mesh, DATA)
        cache, logits = empty(model, batch, self.cache.capacity or 0)
        host = canonical(self.model, self.cache, self.logits, len(self))
        cache, logits = place(model, cache, logits, host)
        return State(model, self.tokens, dataclasses.replace(cache, longest=max(self.lengths, default=0)), logits)

    def own(self, capacity: int) -> tuple[Cache, jax.Array]:
        """A copy with room for ``capacity`` tokens, for a program that takes its buffers."""
        cache = dataclasses.replace(self.cache, longest=None)
        if cache.capacity is not None and cache.capacity < capacity:
            cache = self.model.grow(cache, capacity)
        return jax.tree.map(jnp.copy, (cache, self.logits))

    def _shardings(self, specs):
        return jax.tree.map(
            lambda spec: NamedSharding(self.model.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )


def _take(tree, index, shardings):
    return jax.jit(lambda t, i: jax.tree.map(lambda leaf: leaf[i], t), out_shardings=shardings)(tree, index)


def restore(cache: Cache, snapshot: Snapshot, rows: np.ndarray) -> Cache:
    """Put the recurrent states of some rows back to a snapshot.

    Args:
      rows: [batch] bool.
    """

    def back(new, old):
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), old, new)

    layers = tuple(
        jax.tree.map(back, layer, old) if isinstance(layer, MambaCache) else layer
        for layer, old in zip(cache.layers, snapshot.recurrent, strict=True)
    )
    return Cache(layers, back(cache.length, snapshot.length))
