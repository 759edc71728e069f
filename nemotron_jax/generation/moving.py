"""The state of a batch in the checkpoint's order on the host, and back onto any mesh.

The inverse of :mod:`nemotron_jax.cache_layout`, which undoes what tensor parallelism did to convolution windows and KV
heads.
"""

import dataclasses

import jax
import numpy as np

from nemotron_jax import processes
from nemotron_jax.cache import AttentionCache, Cache, MambaCache
from nemotron_jax.cache_layout import unpack
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import Layout


def _layout(model: NemotronH, layer: int, name: str) -> Layout:
    path = ("layers", layer, "mixer", name)
    return next(p.layout for p in model.parameters if p.path == path)


def pack(
    layout: Layout, rows: np.ndarray, dim: int, sections: tuple[str, ...] | None = None, unit: int = 1
) -> np.ndarray:
    """Entries in checkpoint order -> the ranks' entries one after the other, repeated where ranks share a section.

    Args:
      layout: of the parameter whose rows the entries along ``dim`` correspond to.
      rows: every section once, in the layout's order.
      sections: names of the sections that the array holds (None: all).
      unit: rows of the parameter per entry (head_dim for heads).
    """
    kept = [s for s in layout.sections if sections is None or s.name in sections]
    origin = {s.tensor: min(k.start for k in kept if k.tensor == s.tensor) for s in kept}
    parts = []
    for rank in range(layout.ranks):
        for s in kept:
            start, stop = ((n - origin[s.tensor]) // unit for n in s.rows(rank, layout.ranks))
            parts.append(np.take(rows, range(start, stop), axis=dim))
    return np.concatenate(parts, axis=dim)


def canonical(model: NemotronH, cache: Cache, logits: jax.Array, rows: int) -> dict[str, list]:
    """Host arrays of the first ``rows`` rows, the same at every degree: per block, lengths, logits of real ids."""
    layers: list[tuple[np.ndarray, ...] | None] = []
    for i, layer in enumerate(processes.host(cache.layers)):
        if isinstance(layer, MambaCache):
            layers.append(
                (unpack(_layout(model, i, "conv"), np.asarray(layer.conv), 2)[:rows], np.asarray(layer.ssm)[:rows])
            )
        elif isinstance(layer, AttentionCache):
            layout, d = _layout(model, i, "qkv"), model.config.head_dim
            layers.append(
                tuple(
                    unpack(layout, np.asarray(buffer), 2, (name,), d)[:rows]
                    for name, buffer in (("k", layer.k), ("v", layer.v))
                )
            )
        else:
            layers.append(None)
    return {
        "layers": layers,
        "length": [np.asarray(processes.host(cache.length))[:rows]],
        "logits": [np.asarray(processes.host(logits))[:rows, : model.config.vocab_size]],
    }


def place(model: NemotronH, cache: Cache, logits: jax.Array, host: dict[str, list]) -> tuple[Cache, jax.Array]:
    """Put host arrays into the place of an empty state's, with its shardings. Rows beyond the host's stay empty."""

    def put(old: jax.Array, new: np.ndarray) -> jax.Array:
        full = np.zeros(old.shape, old.dtype)
        full[tuple(slice(0, n) for n in new.shape)] = new
        return jax.device_put(full, old.sharding)

    layers: list[MambaCache | AttentionCache | None] = []
    for i, (old, new) in enumerate(zip(cache.layers, host["layers"], strict=True)):
        if isinstance(old, MambaCache):
            layers.append(MambaCache(put(old.conv, pack(_layout(model, i, "conv"), new[0], 2)), put(old.ssm, new[1])))
        elif isinstance(old, AttentionCache):
            layout, d = _layout(model, i, "qkv"), model.config.head_dim
            k, v = (pack(layout, buffer, 2, (name,), d) for name, buffer in zip("kv", new, strict=True))
            layers.append(AttentionCache(put(old.k, k), put(old.v, v)))
        else:
            layers.append(None)
    columns = np.full(logits.shape, -np.inf, np.float32)  # padding columns are never chosen
    columns[:] = -np.inf
    given = host["logits"][0]
    columns[: given.shape[0], : given.shape[1]] = given
    cache = dataclasses.replace(cache, layers=tuple(layers), length=put(cache.length, host["length"][0]))
    return cache, jax.device_put(columns, logits.sharding)
