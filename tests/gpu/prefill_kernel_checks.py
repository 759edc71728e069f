"""The chunk scan's kernel against its reference on one real GPU, and what the forms of it cost. A program:

    python -m tests.gpu.prefill_kernel_checks --seconds 120 --out FILE

Memory is filled with NaN before each call, inputs are new for each shape, each call is repeated on equal inputs to find
results that move, and errors are also taken by heads and by spans of 64 tokens, where a fault of one block would drown
in the whole. Shapes that failed are not timed. With --small it runs little shapes anywhere, without a GPU the kernel in
the interpreter: that shows that the program works, and its times mean nothing.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.chunk_scan import chunk_scan, mosaic_gpu, shapes
from tests.gpu.decode_kernel_checks import poison
from tests.gpu.loops import BYTES_PER_SECOND, interpreted, microseconds
from tests.gpu.program import Program
from tests.pallas_kernels.chunk_scan_cases import error, problem

FORMS = ("reference", "xla", "mosaic_gpu")
BOUND = 3e-3  # over a whole array; two roundings to bfloat16 in a row are 2.4e-3
PART_BOUND = 1.2e-2  # over one head or one span
SPAN = 64

SMALL = {"small": (2, 64, 128, 1), "small, head_dim 80": (2, 80, 64, 2), "small, state 256": (1, 64, 256, 1)}


def form(name: str, shape):
    """The compiled function of `problem`'s operands."""
    _, p, _, groups = shape
    if name == "mosaic_gpu" and jax.default_backend() != "gpu":
        return functools.partial(interpreted, mosaic_gpu.chunk_scan, groups=groups)
    return jax.jit(lambda *o: chunk_scan(*o, groups=groups, head_dim=p, chunk=128, implementation=name))


def parts(y, state, heads):
    """The arrays by head and by span of tokens, each with its parts along the first axis."""
    batch, tokens, _ = y.shape
    yield "y by head", np.moveaxis(y.reshape(batch, tokens, heads, -1), 2, 0)
    yield "state by head", np.moveaxis(state, 1, 0)
    spans = tokens // SPAN
    yield "y by span", np.moveaxis(y[:, : spans * SPAN].reshape(batch, spans, SPAN, y.shape[-1]), 1, 0)
    yield "y behind the last whole span", y[None, :, spans * SPAN :]


def check(seed, name, shape, batch, tokens, repeats=3) -> dict:
    """Errors of one form at one shape, relative to the reference.

    Raises:
        AssertionError: beyond the bounds, or a result that moves.
    """
    operands = problem(seed, shape, batch, tokens)
    wanted = [np.asarray(v, np.float64) for v in form("reference", shape)(*operands)]
    run, first = form(name, shape), None
    for _ in range(repeats):
        poison()
        found = [np.asarray(v) for v in run(*operands)]
        first = found if first is None else first
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, found, strict=True)), "the result moves"
    assert first is not None
    errors = {what: error(a, b) for what, a, b in zip(("y", "state"), first, wanted, strict=True)}
    for what, off in errors.items():
        assert off <= BOUND, f"{what} is off by {off:.1e}"
    for (what, a), (_, b) in zip(parts(*first, shape[0]), parts(*wanted, shape[0]), strict=True):
        if a.size:
            worst = max(error(left, right) for left, right in zip(a, b, strict=True))
            assert worst <= PART_BOUND, f"{what} is off by {worst:.1e}"
            errors[what] = worst
    return errors


def time_form(name, shape, batch, tokens, loops, repeats) -> float:
    """Microseconds of one call in a loop on the device, each call on what the one before has left."""
    xbc, dt, a, d, state = problem(0, shape, batch, tokens)
    call, heads = form(name, shape), shape[0]

    def body(_, carry):
        xbc, dt, state = carry
        y, state = call(xbc, dt, a, d, state)
        # The first token's values change with each call, so that nothing can be computed ahead of the loop.
        xbc = lax.dynamic_update_slice(xbc, (1e-3 * y[:, -1:]).astype(xbc.dtype), (0, 0, 0))
        dt = lax.dynamic_update_slice(dt, 1e-3 * jnp.abs(y[:, -1:, :heads]), (0, 0, 0))
        return xbc, dt, state

    interpreted = isinstance(call, functools.partial)
    found, (_, _, last) = microseconds(body, (xbc, dt, state), loops, repeats, compiled=not interpreted)
    assert bool(jnp.isfinite(last).all()), "the loop left numbers that are none"
    return found


def floor_us(shape, batch, tokens) -> float:
    """An H200's time to read x, B, C and dt and to write y, once."""
    heads, p, e, groups = shape
    moved = batch * tokens * (2 * (heads * p + 2 * groups * e) + 4 * heads + 4 * heads * p)
    return moved / BYTES_PER_SECOND * 1e6


def cases(small: bool):
    """(name, shape, batch, tokens), from the cheapest to the dearest."""
    if small:
        yield from ((name, shape, 1, tokens) for name, shape in SMALL.items() for tokens in (5, 150))
        return
    for batch, tokens in ((1, 2), (1, 64), (3, 77), (1, 1000), (2, 2048), (1, 8191), (1, 8192)):
        for name, shape in shapes.SHAPES.items():
            yield name, shape, batch, tokens
    yield "nemotron-h-8b", shapes.SHAPES["nemotron-h-8b"], 1, 32768


def timed(small: bool):
    if small:
        yield "small", SMALL["small"], 1, 150
        return
    every = shapes.SHAPES
    for tokens in (8192, 2048, 512, 32768):
        yield "nemotron-h-8b", every["nemotron-h-8b"], 1, tokens
    for name in ("nemotron-h-8b, 8 ranks", "nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b", "nemotron-h-56b"):
        yield name, every[name], 1, 8192
    yield "nemotron-h-8b", every["nemotron-h-8b"], 8, 2048


def checks(small: bool) -> Iterator[tuple]:
    """What `Program.check` takes."""
    for seed, (name, shape, batch, tokens) in enumerate(cases(small)):
        for form in ("xla", "mosaic_gpu"):
            row = {"kernel": "chunk_scan", "shape": name, "form": form, "batch": batch, "tokens": tokens}
            yield row, functools.partial(check, seed, form, shape, batch, tokens)


def times(small: bool) -> Iterator[tuple]:
    """What `Program.time` takes."""
    for name, shape, batch, tokens in timed(small):
        forms = {}
        for form in FORMS:
            loops = ((0, 1), 1) if small else ((2, 10), 5) if form == "reference" else ((4, 24), 5)
            forms[form] = functools.partial(time_form, form, shape, batch, tokens, *loops)
        floor = {"floor_us": floor_us(shape, batch, tokens)}
        row = {"kernel": "chunk_scan", "shape": name, "batch": batch, "tokens": tokens}
        yield row, forms, lambda us, floor=floor: floor


def main() -> None:
    program = Program(__doc__)
    program.check(checks(program.small))
    program.time(times(program.small))
    program.end()


if __name__ == "__main__":
    main()
