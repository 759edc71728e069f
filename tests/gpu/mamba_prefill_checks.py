"""What is around the chunk scan in a Mamba block's prefill, against its references on one real GPU. A program:

    python -m tests.gpu.mamba_prefill_checks --seconds 120 --out FILE

It checks and times the convolution and the gated norm. Memory is filled with NaN before each call, and so are the
columns of the packed projection that a kernel has no business with; each call is repeated on equal inputs to find
results that move, and every element is compared. Shapes that failed are not timed. With --small it runs little shapes
anywhere, without a GPU the kernels in the interpreter: that shows that the program works, and its times mean nothing.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.causal_conv import mosaic_gpu as conv_kernel
from pallas_kernels.causal_conv import shapes as conv_shapes
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gated_norm import mosaic_gpu as norm_kernel
from pallas_kernels.gated_norm import shapes as norm_shapes
from pallas_kernels.gated_norm.api import FEWEST_ROWS
from tests.gpu.decode_kernel_checks import poison
from tests.gpu.loops import BYTES_PER_SECOND, interpreted, microseconds
from tests.gpu.program import Program

FORMS = ("reference", "mosaic_gpu")
EPS = 1e-5
RELATIVE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 4e-6}  # two neighbours of a rounding
ABSOLUTE = 2e-5
SMALL = {
    "gated_norm": {"small": (256, 2, 600), "small, groups of 192": (192, 1, 400)},
    "causal_conv": {"small": (128, 256, 400), "small, odd channels": (5, 150, 168)},
}
SHAPES = {"gated_norm": norm_shapes.SHAPES, "causal_conv": conv_shapes.SHAPES}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def norm_problem(seed, shape, batch, tokens, dtype="bfloat16"):
    """(y, packed, weight) with NaN in the columns that are no gate; y's size differs from row to row."""
    inner, _, columns = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    y = jax.random.normal(keys[0], (batch, tokens, inner))
    y = y * jnp.exp(2 * jax.random.normal(keys[1], (batch, tokens, 1)))
    packed = jnp.full((batch, tokens, columns), jnp.nan, dtype)
    packed = packed.at[..., :inner].set((3 * jax.random.normal(keys[2], y.shape)).astype(dtype))
    return y, packed, 1 + 0.1 * jax.random.normal(keys[3], (inner,))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def conv_problem(seed, shape, batch, tokens, dtype="bfloat16", bias=True):
    """(packed, weight, bias, window) with NaN in the columns that are not convolved."""
    start, channels, columns = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    packed = jnp.full((batch, tokens, columns), jnp.nan, dtype)
    inputs = jax.random.normal(keys[0], (batch, tokens, channels)).astype(dtype)
    packed = packed.at[..., start : start + channels].set(inputs)
    weight = jax.random.normal(keys[1], (channels, 1, conv_shapes.TAPS))
    window = jax.random.normal(keys[3], (batch, conv_shapes.TAPS - 1, channels)).astype(dtype)
    return packed, weight, jax.random.normal(keys[2], (channels,)) if bias else None, window


def problem(what, seed, shape, batch, tokens):
    return (norm_problem if what == "gated_norm" else conv_problem)(seed, shape, batch, tokens)


def form(what, name, shape):
    """The compiled function of `problem`'s operands."""
    options = dict(groups=shape[1], eps=EPS) if what == "gated_norm" else dict(start=shape[0])
    if name == "mosaic_gpu" and jax.default_backend() != "gpu":
        kernel = norm_kernel.gated_norm if what == "gated_norm" else conv_kernel.causal_conv
        return functools.partial(interpreted, kernel, **options)
    call = gated_norm if what == "gated_norm" else causal_conv
    return jax.jit(lambda *o: call(*o, **options, implementation=name))


def compare(found, wanted) -> float:
    """Every element within one step of the rounding; the share of elements that differ.

    Raises:
        AssertionError: one is further away, or no number.
    """
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    differ, wrong, at = jax.device_get(_compare(found, wanted))
    place = np.unravel_index(int(at), found.shape)
    assert not wrong, f"{wrong} elements are off, at {tuple(map(int, place))} {found[place]} instead of {wanted[place]}"
    return float(differ)


@jax.jit
def _compare(found, wanted):
    relative = RELATIVE[found.dtype.name]
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    near = jnp.abs(found - wanted) <= relative * jnp.abs(wanted) + ABSOLUTE  # not where one is NaN
    return jnp.mean(found != wanted), jnp.sum(~near), jnp.argmin(near.ravel())


def check(what, seed, shape, batch, tokens, repeats=3) -> float:
    """The share of elements that are rounded to the neighbour of the reference's.

    Raises:
        AssertionError: beyond the bounds, or a result that moves.
    """
    operands = problem(what, seed, shape, batch, tokens)
    wanted = form(what, "reference", shape)(*operands)
    run, first = form(what, "mosaic_gpu", shape), None
    for _ in range(repeats):
        poison()
        found = run(*operands)
        first = found if first is None else first
        assert bool(
            (lax.bitcast_convert_type(first, jnp.uint16) == lax.bitcast_convert_type(found, jnp.uint16)).all()
        ), "the result moves"
    return compare(first, wanted)


def time_form(what, name, shape, batch, tokens, loops, repeats) -> float:
    """Microseconds of one call in a loop on the device, each call on what the one before has left."""
    operands = [jnp.nan_to_num(v) for v in problem(what, 0, shape, batch, tokens)]
    call = form(what, name, shape)

    def body(_, carry):
        out = call(*carry)
        at = 1 if what == "gated_norm" else 0
        packed = carry[at]
        # The first token's values change with each call, so that nothing can be computed ahead of the loop.
        start = 0 if what == "gated_norm" else shape[0]
        packed = lax.dynamic_update_slice(packed, out[:, -1:].astype(packed.dtype), (0, 0, start))
        return (*carry[:at], packed, *carry[at + 1 :])

    interpreted = isinstance(call, functools.partial)
    found, left = microseconds(body, tuple(operands), loops, repeats, compiled=not interpreted)
    assert all(bool(jnp.isfinite(v).all()) for v in left), "the loop left numbers that are none"
    return found


def moved_bytes(what, shape, batch, tokens) -> int:
    """What must be read and written, once."""
    width = shape[0] if what == "gated_norm" else shape[1]
    return batch * tokens * width * (4 + 2 + 2 if what == "gated_norm" else 2 + 2)


def cases(small: bool):
    """(what, name, shape, batch, tokens), from the cheapest to the dearest."""
    if small:
        for what, shapes in SMALL.items():
            yield from ((what, name, shape, 2, tokens) for name, shape in shapes.items() for tokens in (8, 37))
        return
    some = ("nemotron-h-8b", "nemotron-3-nano-4b", "nemotron-h-8b, 8 ranks")
    for batch, tokens in ((1, 2), (1, 5), (1, 17), (3, 77), (2, 1000), (1, 4096), (1, 8191)):
        for what, shapes in SHAPES.items():
            if what == "gated_norm" and batch * tokens < FEWEST_ROWS:
                continue
            for name in shapes if (batch, tokens) in ((3, 77), (1, 4096)) else some:
                yield what, name, shapes[name], batch, tokens


def timed(small: bool):
    if small:
        for what, shapes in SMALL.items():
            yield what, "small", shapes["small"], 1, 37
        return
    for tokens in (4096, 8192, 1024):
        for what, shapes in SHAPES.items():
            yield what, "nemotron-h-8b", shapes["nemotron-h-8b"], 1, tokens
    for what, shapes in SHAPES.items():
        for name in ("nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b", "nemotron-h-56b", "nemotron-3-nano-4b"):
            yield what, name, shapes[name], 1, 4096
        yield what, "nemotron-h-8b, 8 ranks", shapes["nemotron-h-8b, 8 ranks"], 1, 8192


def checks(small: bool) -> Iterator[tuple]:
    """What `Program.check` takes."""
    for seed, (what, name, shape, batch, tokens) in enumerate(cases(small)):
        row = {"kernel": what, "shape": name, "form": "mosaic_gpu", "batch": batch, "tokens": tokens}
        yield row, functools.partial(check, what, seed, shape, batch, tokens)


def times(small: bool) -> Iterator[tuple]:
    """What `Program.time` takes."""
    loops = ((0, 1), 1) if small else ((8, 72), 5)
    for what, name, shape, batch, tokens in timed(small):
        forms = {form: functools.partial(time_form, what, form, shape, batch, tokens, *loops) for form in FORMS}
        row = {"kernel": what, "shape": name, "batch": batch, "tokens": tokens}
        yield row, forms, functools.partial(rates, moved_bytes(what, shape, batch, tokens))


def rates(moved: int, us: float) -> dict[str, float]:
    return {"tb_per_s": moved / us / 1e6, "floor_us": moved / BYTES_PER_SECOND * 1e6}


def main() -> None:
    program = Program(__doc__)
    program.check(checks(program.small), "share that differs")
    program.time(times(program.small))
    program.end()


if __name__ == "__main__":
    main()
