"""Loads and stores of arrays whose layout in registers leaves a thread only few neighbours of them."""

import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

load = functools.partial(plgpu.load, optimized=False)


def store(ref: Any, value: jax.Array, *, optimized: bool = False) -> None:
    """Store an array, whatever its layout: jax 0.12 wants to be told that a narrow store is meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=optimized)
    else:
        ref[...] = value
