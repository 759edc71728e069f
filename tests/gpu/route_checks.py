"""A router behind its matrix product, in one launch, against plain JAX on one real GPU. A program:

    python -m tests.gpu.route_checks --seconds 60 --out FILE

Memory is filled with NaN before each call, each call is repeated on equal inputs to find results that move, and many
draws of random numbers follow. The chosen experts must be the plain code's, and the weights before they are divided by
their sum its bits: then both computed the same scores. Shapes that failed are not timed. With --small it runs little
shapes anywhere, without a GPU the kernel in the interpreter: that shows that the program works, and its times mean
nothing.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_jax.layers import router
from pallas_kernels import selection
from pallas_kernels.route import mosaic_gpu, route, shapes
from tests.gpu.decode_kernel_checks import poison
from tests.gpu.loops import interpreted, microseconds
from tests.gpu.program import LOOP_ALONE, Program

FORMS = ("plain", "mosaic_gpu")
CHAIN = 16  # calls in an iteration, whose own 7 us would hide them
KINDS = ("normal", "near 64", "ties", "equal", "no numbers")
RELATIVE = 1e-6  # of weights divided by their sum, whose additions have another order
SMALL = {"small": (128, 6)}


def problem(seed: int, rows: int, experts: int, kind: str) -> tuple[jax.Array, jax.Array]:
    """(logits, bias): numbers far from each other, large biases that differ by a hundredth, many equal ones, all equal,
    or NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    logits, bias = 2 * rng.normal(size=(rows, experts)), rng.normal(size=experts)
    if kind == "near 64":
        bias = 64 + 0.01 * rng.permutation(experts)
    elif kind == "ties":
        logits, bias = rng.integers(-3, 4, logits.shape) / 4, rng.integers(0, 2, experts) / 8
    elif kind == "equal":
        logits, bias = np.zeros_like(logits), np.zeros_like(bias)
    elif kind == "no numbers":
        for values in (logits, bias):
            which = rng.integers(0, 40, values.shape)
            for i, value in enumerate((np.nan, np.inf, -np.inf)):
                values[which == i] = value
    return jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32)


def form(name: str, k: int, normalise: bool, scale: float) -> Any:
    """A function of `problem`'s operands: the plain code as a model has it without the kernel, or the kernel."""
    options = dict(k=k, normalise=normalise, scale=scale)
    if name == "plain":

        def plain(logits, bias):
            with selection.use("none"):
                return router.route(logits, bias, **options)[:2]

        return jax.jit(plain)
    if jax.default_backend() != "gpu":
        return functools.partial(interpreted, mosaic_gpu.route, **options)
    return jax.jit(lambda *operands: route(*operands, **options, implementation="mosaic_gpu"))


def compare(found: tuple, wanted: tuple, relative: float) -> float:
    """The largest relative difference of a weight.

    Raises:
        AssertionError: other experts, or a weight that is further off; with ``relative`` 0 it has other bits.
    """
    (chosen, weights), (experts, right) = (tuple(map(np.asarray, pair)) for pair in (found, wanted))
    assert chosen.dtype == experts.dtype and weights.dtype == right.dtype and chosen.shape == experts.shape
    differ = np.flatnonzero((chosen != experts).any(-1))
    assert not len(differ), f"{len(differ)} rows, at {differ[0]} {chosen[differ[0]]} instead of {experts[differ[0]]}"
    both = np.isnan(weights) & np.isnan(right)
    if not relative:
        assert np.array_equal(np.where(both, 0, weights), np.where(both, 0, right)), "scores have other bits"
        return 0.0
    off = np.where(both, 0, np.abs(weights - right) / np.maximum(np.abs(right), 1e-30))
    assert np.all(off <= relative), f"weights are off by {np.nanmax(off):.1e}"
    return float(off.max())


def check(experts: int, k: int, rows: int, kind: str, repeats: int = 20, draws: int = 50) -> float:
    """The largest relative difference of a weight from the plain code's.

    Raises:
        AssertionError: see `compare`; or a result that moves.
    """
    worst = 0.0
    for normalise, scale, relative in ((False, 1.0, 0.0), (True, 2.5, RELATIVE)):
        plain, kernel = (form(name, k, normalise, scale) for name in FORMS)
        operands, first = problem(0, rows, experts, kind), None
        for _ in range(repeats):
            poison()
            found = kernel(*operands)
            bits = tuple(np.asarray(v).tobytes() for v in found)
            first = bits if first is None else first
            assert first == bits, "the result moves"
        worst = max(worst, compare(found, plain(*operands), relative))
        for seed in range(1, draws):
            operands = problem(seed, rows, experts, kind)
            worst = max(worst, compare(kernel(*operands), plain(*operands), relative))
    return worst


def time_form(name: str, experts: int, k: int, rows: int, loops: tuple[int, int], repeats: int) -> float:
    """Microseconds of one call of CHAIN in an iteration of a loop on the device, each on what the one before has
    left."""
    logits, bias = problem(0, rows, experts, "normal")
    call = None if name == LOOP_ALONE else form(name, k, True, 2.5)

    def body(_, carry):
        logits, bias = carry
        for _ in range(CHAIN):
            logits = lax.optimization_barrier(logits)
            if call is None:
                logits = logits + 1e-6
            else:
                chosen, weights = call(logits, bias)
                logits = logits + 1e-6 * (weights[:, :1] + chosen[:, -1:].astype(jnp.float32))
        return logits, bias

    compiled = not isinstance(call, functools.partial)
    found, left = microseconds(body, (logits, bias), loops, repeats, compiled=compiled)
    assert all(bool(jnp.isfinite(v).all()) for v in left), "the loop left numbers that are none"
    return found / CHAIN


def cases(small: bool) -> Iterator[tuple[str, int, int, int, str]]:
    """(name, experts, k, rows, kind), what matters most first."""
    if small:
        yield from (("small", 128, 6, 2, kind) for kind in KINDS)
        return
    for rows in shapes.ROWS:
        for kind in KINDS:
            yield from ((name, *shape, rows, kind) for name, shape in shapes.SHAPES.items())
    for experts, k, rows in ((128, 1, 5), (256, 8, 2), (384, 64, 3), (1024, 64, 2), (128, 64, 132), (512, 4, 300)):
        yield from ((f"{k} of {experts}", experts, k, rows, kind) for kind in KINDS)


def checks(small: bool) -> Iterator[tuple]:
    """What `Program.check` takes."""
    few = dict(repeats=2, draws=2) if small else {}
    for name, experts, k, rows, kind in cases(small):
        row = {"kernel": "route", "shape": name, "form": "mosaic_gpu", "rows": rows, "kind": kind}
        yield row, functools.partial(check, experts, k, rows, kind, **few)


def times(small: bool) -> Iterator[tuple]:
    """What `Program.time` takes."""
    loops = ((0, 1), 1) if small else ((8, 72), 5)
    for rows in (1,) if small else (1, 8, 64, 4):
        for name, shape in (SMALL if small else shapes.SHAPES).items():
            forms = {form: functools.partial(time_form, form, *shape, rows, *loops) for form in (LOOP_ALONE, *FORMS)}
            yield {"kernel": "route", "shape": name, "rows": rows}, forms, lambda us: {}


def main() -> None:
    program = Program(__doc__)
    program.check(checks(program.small))
    program.time(times(program.small))
    program.end()


if __name__ == "__main__":
    main()
