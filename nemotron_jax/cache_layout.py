"""The cache in the checkpoint's order: what the ranks keep one after the other, put back where the sections came from.

Under tensor parallelism each rank's convolution window holds its own part of x, B and C, and a group or KV head that
several ranks need is there several times. Only this module knows how to undo that.
"""

import numpy as np

from nemotron_jax import processes
from nemotron_jax.cache import AttentionCache, Cache, MambaCache
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import Layout


def unpack(
    layout: Layout, packed: np.ndarray, dim: int, sections: str | tuple[str, ...] | None = None, unit: int = 1
) -> np.ndarray:
    """The rows of some sections in checkpoint order, each once.

    Args:
      layout: of the parameter whose rows the array's entries along ``dim`` correspond to.
      packed: the global array: the ranks' entries one after the other.
      dim: the dimension that holds them.
      sections: names of the sections that the array holds, in the layout's order (None: all).
      unit: rows of the parameter per entry of the array (head_dim for heads).

    Raises:
      ValueError: if the array does not have as many entries as the layout says.
    """
    kept = [s for s in layout.sections if sections is None or s.name in sections]
    width = sum(s.width() for s in kept) // unit
    if packed.shape[dim] != width * layout.ranks:
        raise ValueError(
            f"found {packed.shape[dim]} entries along dimension {dim}, accepted {width} on each of {layout.ranks} ranks"
        )
    origin = {s.tensor: min(k.start for k in kept if k.tensor == s.tensor) for s in kept}
    total = sum(s.size for s in kept) // unit
    out = np.zeros((*packed.shape[:dim], total, *packed.shape[dim + 1 :]), packed.dtype)
    here = [slice(None)] * packed.ndim
    there = [slice(None)] * packed.ndim
    for rank in range(layout.ranks):
        offset = rank * width
        for s in kept:
            start, stop = s.rows(rank, layout.ranks)
            here[dim] = slice(offset, offset + (stop - start) // unit)
            there[dim] = slice((start - origin[s.tensor]) // unit, (stop - origin[s.tensor]) // unit)
            out[tuple(there)] = packed[tuple(here)]
            offset += s.width() // unit
    return out


def _layout(model: NemotronH, layer: int, name: str) -> Layout:
    path = ("layers", layer, "mixer", name)
    return next(p.layout for p in model.parameters if p.path == path)


def states(model: NemotronH, cache: Cache, tokens: int) -> dict[str, np.ndarray]:
    """Every state of a cache, on the host, as a PyTorch reference stores it.

    Args:
      model: the model that the cache belongs to.
      cache: with at least ``tokens`` tokens in each row.
      tokens: how many slots of the KV buffers to return.

    Returns:
      ``conv`` [Mamba blocks, batch, channels, conv_kernel - 1], oldest input first; ``ssm`` [Mamba blocks, batch,
      heads, head_dim, state]; ``k``, ``v`` [attention blocks, batch, KV heads, tokens, head_dim]. A kind without
      blocks is left out.
    """
    found: dict[str, list[np.ndarray]] = {"conv": [], "ssm": [], "k": [], "v": []}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, MambaCache):
            window = unpack(_layout(model, i, "conv"), np.asarray(processes.host(layer.conv)), 2)
            found["conv"].append(np.moveaxis(window, 1, 2))
            found["ssm"].append(np.asarray(processes.host(layer.ssm)))
        elif isinstance(layer, AttentionCache):
            layout = _layout(model, i, "qkv")
            for name, buffer in (("k", layer.k), ("v", layer.v)):
                filled = np.asarray(processes.host(buffer[:, :tokens]))
                heads = unpack(layout, filled, 2, (name,), model.config.head_dim)
                found[name].append(np.moveaxis(heads, 1, 2))
    return {name: np.stack(values) for name, values in found.items() if values}
