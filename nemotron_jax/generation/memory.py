"""Does a batch fit the devices? Asked before anything is allocated."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, axis_size, padded_vocab


def free_bytes(device: jax.Device) -> int | None:
    """Memory that ``device`` can still give out; None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        return None if found is None else int(found) * 1024 // len(jax.devices("cpu"))
    return None


def needed_bytes(model: NemotronH, batch: int, capacity: int, piece: int) -> int:
    """Per device: the state of ``batch`` rows with ``capacity`` slots, their logits, the activations of a piece.

    The activations are an estimate: the residual stream and the widest projection of one block, twice.
    """
    config, mesh = model.config, model.mesh
    shapes = model.cache_shapes(batch, capacity)
    state = 0
    for leaf, spec in zip(jax.tree.leaves(shapes.tree), jax.tree.leaves(shapes.specs), strict=True):
        shape = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
        state += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    rows = -(-batch // axis_size(mesh, DATA))
    logits = rows * padded_vocab(config.vocab_size, model.axis) // (model.axis.size if model.rules.vocab else 1) * 4
    widest = max(
        2 * config.inner_size + 2 * config.n_groups * config.ssm_state_size,
        config.intermediate_size,
        config.hidden_size,
    )
    activations = 2 * rows * piece * (2 * config.hidden_size + widest // model.axis.size) * model.dtype.itemsize
    return state + 2 * logits + activations


def check(model: NemotronH, batch: int, capacity: int, piece: int) -> None:
    """Refuse a batch that cannot fit.

    Raises:
      ValueError: saying what is needed, what is free, and how many rows would fit.
    """
    free = min((f for d in model.mesh.local_devices if (f := free_bytes(d)) is not None), default=None)
    if free is None:
        return
    needed = needed_bytes(model, batch, capacity, piece)
    if needed > free:
        data = axis_size(model.mesh, DATA)
        fits = max(0, batch * free // needed // data * data)
        raise ValueError(
            f"prompts: found {batch} rows of up to {capacity} tokens, which need {needed / 1e9:.2f} GB per device; "
            f"accepted what fits {free / 1e9:.2f} GB: about {fits} rows at once, or shorter ones"
        )
