"""The grouped matrix product against plain forms on one real GPU, as a program or through pytest:

    python -m tests.gpu.grouped_matmul_checks --seconds 60

Padding and unused tiles hold NaN and so do matrices that no tile names: what reaches a result shows. Each call is
repeated on equal inputs, with NaN left in memory before, to find results that move. Times: scripts/bench_experts.py.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_jax.layers.experts import expert_sum, kernel_fault
from pallas_kernels import selection
from pallas_kernels.grouped_matmul import grouped_matmul, shapes
from tests.gpu.decode_kernel_checks import error, poison
from tests.gpu.program import Program

BOUND = {"bfloat16": 4e-3, "float16": 1e-3}


def problem(seed, row_tile, tiles, used, groups, outputs, inputs, dtype="bfloat16"):
    """Operands of `grouped_matmul`, and which rows are real: every tile but the last of the used ones lacks some."""
    rng = np.random.default_rng(seed)
    tile_group = np.sort(rng.integers(0, groups, tiles)).astype(np.int32)
    filled = rng.integers(1, row_tile + 1, tiles)
    real = (np.arange(row_tile) < filled[:, None]) & (np.arange(tiles) < used)[:, None]
    x = np.where(real.reshape(-1, 1), rng.standard_normal((tiles * row_tile, inputs), np.float32), np.nan)
    matrices = jax.random.normal(jax.random.key(seed), (groups, outputs, inputs), dtype) / inputs**0.5
    named = np.isin(np.arange(groups), tile_group[:used])
    matrices = jnp.where(named[:, None, None], matrices, jnp.nan).astype(dtype)
    operands = jnp.asarray(x, dtype), matrices, jnp.asarray(tile_group), jnp.asarray([used], jnp.int32)
    return operands, real.reshape(-1)


def compare(found, wanted, real, dtype) -> float:
    """Error of the real rows relative to the reference's.

    Raises:
        AssertionError: beyond the bound, by value or as a whole.
    """
    found, wanted = (np.asarray(v.astype(jnp.float32))[real] for v in (found, wanted))
    off = error(jnp.asarray(found), jnp.asarray(wanted)) if real.any() else 0.0
    assert off <= BOUND[dtype], f"off by {off:.1e}"
    step = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    # squared ReLU doubles the step of the rounding before it
    assert np.all(np.abs(found - wanted) <= 4 * step * np.maximum(np.abs(wanted), 0.25)), "one value is far off"
    return off


def check(seed, shape, *, dtype="bfloat16", squared_relu=False, repeats=3) -> float:
    """One shape (row_tile, tiles, used, groups, outputs, inputs): the kernel's error relative to the reference.

    Raises:
        AssertionError: beyond the bound; results move.
    """
    operands, real = problem(seed, *shape, dtype)

    def call(implementation):
        return jax.jit(lambda *a: grouped_matmul(*a, squared_relu=squared_relu, implementation=implementation))

    wanted = call("reference")(*operands)
    kernel, first = call("mosaic_gpu"), None
    for _ in range(repeats):
        poison()
        found = kernel(*operands)
        bits = np.asarray(found)[real].tobytes()
        first = bits if first is None else first
        assert first == bits, "the result moves"
    return compare(found, wanted, real, dtype)


def check_experts(seed, shape, tokens, repeats=3) -> float:
    """A block's routed experts (experts, choices, width, input width), `grouped` beside `dense`; some choices are
    another rank's and experts that nobody chose hold NaN."""
    experts, k, f, width = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, width), "bfloat16")
    up = jax.random.normal(keys[1], (experts, f, width), "bfloat16") / width**0.5
    down = jax.random.normal(keys[2], (experts, width, f), "bfloat16") / f**0.5
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, experts + 4)), -1)[:, :k].astype(np.int32)
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    with selection.use("grouped_matmul"):
        return _check_experts(x, up, down, chosen, weights, repeats)


def _check_experts(x, up, down, chosen, weights, repeats) -> float:
    experts, fault = up.shape[0], kernel_fault(chosen.size, up)
    assert fault is None, f"the kernel {fault}"  # its place would be taken by plain JAX
    run = jax.jit(expert_sum, static_argnames="implementation")
    wanted = run(x, up, down, chosen, weights, implementation="dense")
    named = np.isin(np.arange(experts), chosen)[:, None, None]
    up, down = (jnp.where(named, m, jnp.nan).astype(m.dtype) for m in (up, down))
    first = None
    for _ in range(repeats):
        poison()
        found = run(x, up, down, chosen, weights, implementation="grouped")
        first = np.asarray(found).tobytes() if first is None else first
        assert first == np.asarray(found).tobytes(), "the result moves"
    off = error(found, wanted)
    assert off <= BOUND["bfloat16"], f"off by {off:.1e}"
    return off


def cases():
    """(shape, options) of `check`: every row tile, edges in both dimensions, no tile at all, one, and many."""
    yield (8, 6, 5, 4, 208, 144), {}
    yield (16, 40, 37, 9, 464, 2688), {"squared_relu": True}
    yield (32, 300, 211, 16, 2688, 464), {}
    yield (64, 90, 90, 12, 672, 1024), {"squared_relu": True}
    yield (128, 150, 131, 20, 1856, 2688), {"squared_relu": True}
    yield (128, 150, 131, 20, 2688, 1856), {}
    yield (128, 3, 0, 2, 256, 128), {}
    yield (8, 1, 1, 1, 128, 64), {"dtype": "float16"}
    yield (24, 60, 59, 5, 1024, 336), {"dtype": "float16", "squared_relu": True}


def expert_cases():
    """(shape, tokens) of `check_experts`."""
    for name, tokens in (("nano", 1), ("nano", 8), ("nano", 513), ("nano_ep8", 64), ("super_tp4", 64)):
        yield shapes.SHAPES[name], tokens


def checks() -> Iterator[tuple]:
    """What `Program.check` takes."""
    todo = [("grouped_matmul", check, shape, options) for shape, options in cases()]
    todo += [("experts", check_experts, shape, {"tokens": tokens}) for shape, tokens in expert_cases()]
    for seed, (kernel, what, shape, options) in enumerate(todo):
        row = {"kernel": kernel, "shape": shape, "form": "mosaic_gpu", **options}
        yield row, functools.partial(what, seed, shape, **options)


def main() -> None:
    program = Program(__doc__, lacks=("small", "times"))
    program.check(checks())
    program.end()


if __name__ == "__main__":
    main()
