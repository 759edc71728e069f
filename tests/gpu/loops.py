"""Time of one iteration of a loop on the device; checks of which nearly all of the time goes into compiling."""

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BYTES_PER_SECOND = 4.8e12  # of an H200's memory


def interpreted(kernel: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """What a Mosaic GPU kernel gives where there is no GPU."""
    from tests.pallas_kernels.interpreter import interpreter

    with interpreter() as interpret:
        return jax.block_until_ready(kernel(*operands, **options, interpret=interpret))


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


def checked(checks: Sequence[Callable[[], Any]], until: float) -> Iterator[tuple[int, Any]]:
    """Run checks, on a GPU several at the same time, since compiling is the most of it.

    Args:
      checks: in the order in which they are begun.
      until: `time.monotonic()` from which on none is begun.

    Yields:
      (number, result) of each as it ends, the exception where it raised one, None where it was not begun.
    """

    def run(check: Callable[[], Any]) -> Any:
        if time.monotonic() > until:
            return None
        try:
            return check()
        except Exception as error:  # every case is tried
            return error

    # the interpreter of kernels knows no threads
    with concurrent.futures.ThreadPoolExecutor(8 if jax.default_backend() == "gpu" else 1) as pool:
        numbers = {pool.submit(run, check): number for number, check in enumerate(checks)}
        for future in concurrent.futures.as_completed(numbers):
            yield numbers[future], future.result()


def shown(found: Any) -> Any:
    """A result as it is printed, in one line."""
    return (
        f"FAILED {type(found).__name__} {' '.join(str(found).split())[:200]}" if isinstance(found, Exception) else found
    )
