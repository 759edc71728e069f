"""Time of one iteration of a loop on the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def microseconds(
    body: Callable[[Any, Any], Any], carry: Any, loops: tuple[int, int], repeats: int, compiled: bool = True
) -> tuple[float, Any]:
    """From loops of two lengths, so that what a start costs falls out; and what the longer one left.

    Args:
      body: (iteration, carry) -> carry; each iteration must wait for the one before.
      repeats: timed runs of each loop, whose median counts, after three that are not.
      compiled: False: one call of ``body`` after the other, for kernels that are interpreted.
    """

    def eagerly(n: int, carry):
        for i in range(n):
            carry = body(i, carry)
        return carry

    def seconds(n: int) -> tuple[float, Any]:
        run = jax.jit(lambda c: lax.fori_loop(0, n, body, c), donate_argnums=0) if compiled else lambda c: eagerly(n, c)
        found, state = [], jax.tree.map(jnp.copy, carry)
        for _ in range(3):
            state = jax.block_until_ready(run(state))
        for _ in range(repeats):
            begin = time.perf_counter()
            state = jax.block_until_ready(run(state))
            found.append(time.perf_counter() - begin)
        return statistics.median(found), state

    short = seconds(loops[0])[0]
    long, state = seconds(loops[1])
    return (long - short) / (loops[1] - loops[0]) * 1e6, state
