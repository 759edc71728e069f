"""A few rows times a matrix against plain JAX on one real GPU, as a program or through pytest:

    python -m tests.gpu.matvec_checks --seconds 300 --out FILE

Checks first, in at most half of the time: every released shape cut for 1, 2, 4 and 8 ranks, edges, memory filled with
NaN before each call and calls repeated on equal inputs to find results that move. Then times in a loop on the device
over different matrices, more than the second-level cache holds, of the kernel's tilings beside XLA's product.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_jax.layers.linear import project
from pallas_kernels import selection
from pallas_kernels.matvec import chosen_matvec, matvec, mosaic_gpu, shapes, supported, tiling
from tests.gpu.decode_kernel_checks import error, poison
from tests.gpu.loops import BYTES_PER_SECOND, microseconds
from tests.gpu.program import LOOP_ALONE, Program

BOUND = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-5}  # by the result's dtype
STEP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}
COPIES_BYTES = 400 << 20  # of different matrices that calls take turns on
RANKS = (1, 2, 4, 8)


def problem(seed, rows, outputs, inputs, dtype="bfloat16"):
    """Operands of `matvec` whose results are about 1 in size."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, inputs), dtype)
    return x, jax.random.normal(keys[1], (outputs, inputs), dtype) * jnp.asarray(inputs**-0.5, dtype)


def compare(found, wanted) -> float:
    """Error relative to what is wanted.

    Raises:
        AssertionError: beyond the bound, by value or as a whole.
    """
    dtype = str(found.dtype)
    assert found.shape == wanted.shape
    off = error(found, wanted)
    assert off <= BOUND[dtype], f"off by {off:.1e}"
    found, wanted = (np.asarray(v.astype(jnp.float32)) for v in (found, wanted))
    # squared ReLU doubles the step of the rounding before it
    assert np.all(np.abs(found - wanted) <= 4 * STEP[dtype] * np.maximum(np.abs(wanted), 0.25)), "one value is far off"
    return off


def check(
    seed, rows, outputs, inputs, *, dtype="bfloat16", out_dtype=None, squared_relu=False, cut=None, repeats=3
) -> float:
    """One shape: the kernel's error relative to the product in float32.

    Raises:
        AssertionError: beyond the bound; results move; a row with NaN in it reaches another one.
    """
    x, w = problem(seed, rows, outputs, inputs, dtype)
    out = jnp.dtype(out_dtype or dtype)
    exact = jax.jit(lambda x, w: jnp.dot(x, w.T, precision="highest", preferred_element_type=jnp.float32))
    wanted = exact(x, w).astype(out)
    if squared_relu:
        wanted = jnp.square(jax.nn.relu(wanted.astype(jnp.float32))).astype(out)
    options = dict(out_dtype=out, squared_relu=squared_relu)
    if cut is None:
        kernel = jax.jit(lambda x, w: matvec(x, w, **options, implementation="mosaic_gpu"))
    else:
        kernel = jax.jit(lambda x, w: mosaic_gpu.matvec(x, w, **options, tiling=cut))
    first = None
    for _ in range(repeats):
        poison()
        found = kernel(x, w)
        bits = np.asarray(found).tobytes()
        first = bits if first is None else first
        assert first == bits, "the result moves"
    off = compare(found, wanted)
    if rows > 1:
        hidden = kernel(x.at[rows // 2].set(jnp.nan), w)
        others = np.arange(rows) != rows // 2
        assert np.asarray(hidden)[others].tobytes() == np.asarray(found)[others].tobytes(), "a row reaches another"
    return off


def check_project(seed, rows, outputs, inputs) -> float:
    """The layers' product with the kernel switched on, with a bias, beside the product without it."""
    x, w = problem(seed, rows, outputs, inputs)
    bias = jax.random.normal(jax.random.key(seed + 1), (outputs,))
    wanted = project(x[:, None], w, bias)
    with selection.use("matvec"):
        run = jax.jit(lambda *a: project(*a))
        text = run.lower(x[:, None], w, bias).as_text()
        assert text.count("mosaic_gpu_v2") == 1, "the kernel was not used"
        return compare(run(x[:, None], w, bias), wanted)


def check_chosen(seed, rows, k, matrices, outputs, inputs, *, squared_relu=False, repeats=3) -> float:
    """Products with chosen matrices beside the reference's, both of a block's; matrices that nobody chose hold NaN."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (rows, inputs), "bfloat16")
    chosen = jax.random.randint(keys[1], (rows, k), 0, matrices, jnp.int32)
    named = jnp.zeros(matrices, bool).at[chosen].set(True)[:, None, None]
    w = jax.random.normal(keys[2], (matrices, outputs, inputs), "bfloat16") * jnp.bfloat16(inputs**-0.5)
    w = jnp.where(named, w, jnp.nan).astype(x.dtype)
    exact = jnp.einsum("ri,rkoi->rko", x.astype(jnp.float32), w[chosen].astype(jnp.float32), precision="highest")
    wanted = exact.astype(x.dtype)
    if squared_relu:
        wanted = jnp.square(jnp.maximum(wanted.astype(jnp.float32), 0)).astype(x.dtype)
    kernel = jax.jit(lambda *a: chosen_matvec(*a, squared_relu=squared_relu, implementation="mosaic_gpu"))
    first = None
    for _ in range(repeats):
        poison()
        found = kernel(x, w, chosen)
        first = np.asarray(found).tobytes() if first is None else first
        assert first == np.asarray(found).tobytes(), "the result moves"
    off = error(found, wanted)
    # a value next to a step of the rounding may go to the other side, and its square is twice as far off
    assert off <= BOUND["bfloat16"] * (2 if squared_relu else 1), f"off by {off:.1e}"
    each = kernel(jnp.broadcast_to(x[:, None], (rows, k, inputs)), w, chosen)
    assert np.asarray(each).tobytes() == first, "an x for each choice makes a difference"
    return off


def edges() -> Iterator[tuple[tuple[int, int, int], dict]]:
    """((rows, outputs, inputs), options) of `check`: what no released shape has."""
    yield (1, 64, 64), {}
    yield (3, 72, 80), {"out_dtype": "float32"}
    yield (1, 21504, 4096), {"squared_relu": True}
    yield (5, 3712, 2688), {"squared_relu": True, "dtype": "float16"}
    yield (7, 1000, 336), {"dtype": "float16"}
    yield (2, 2056, 4112), {}
    yield (1, 3136, 1568), {}  # low tiles, the last moved back, and fewer steps than stages, one of them not whole
    yield (8, 3136, 2560), {}  # and all steps whole
    yield (8, 33800, 1040), {"out_dtype": "float32"}
    yield (16, 4096, 4096), {}
    yield (12, 4096, 21504), {}
    yield (24, 18560, 4096), {}
    yield (32, 21504, 4096), {"squared_relu": True}
    yield (33, 4104, 1056), {"out_dtype": "float32"}
    yield (64, 2688, 4096), {}
    for cut in tilings(5, 4096):
        yield (5, 4096, 2048), {"cut": cut}
    for cut in tilings(2, 131072):
        yield (2, 131072, 512), {"cut": cut, "out_dtype": "float32"}


def released(rows: tuple[int, ...] = (1, 5, 8, 2)) -> Iterator[tuple[int, int, int]]:
    """(rows, outputs, inputs) of every released shape and number of ranks that the kernel serves, each once."""
    sizes = dict.fromkeys(shapes.of_rank(name, ranks) for name in shapes.SHAPES for ranks in RANKS)
    for n in rows:
        for size in sizes:
            if size is not None and supported(rows=n, outputs=size[0], inputs=size[1], dtype="bfloat16") is None:
                yield n, *size


def tilings(rows: int, outputs: int) -> list[tiling.Tiling]:
    """To compare: the default one; two warpgroups; a shorter ring; longer and shorter steps; two blocks on a
    multiprocessor.
    """
    make = tiling.default_tiling
    usual = make(rows, outputs)
    found = [
        usual,
        make(rows, outputs, warpgroups=2),
        make(rows, outputs, shared_bytes=112 * 1024),
        make(rows, outputs, slot_bytes=32 * 1024),
        make(rows, outputs, slot_bytes=8 * 1024),
        make(rows, outputs, blocks=2 * tiling.MULTIPROCESSORS, shared_bytes=110 * 1024),
    ]
    return list(dict.fromkeys(t for t in found if t.shared_bytes(rows) <= tiling.SHARED_BYTES))


def name_of(t: tiling.Tiling) -> str:
    return f"{t.outputs}x{t.depth} stages {t.stages} warpgroups {t.warpgroups} blocks {t.blocks}"


def time_call(call, rows, outputs, inputs, seconds: float = 0.03, repeats: int = 5) -> float:
    """Microseconds of one call: each waits for the one before and takes another matrix."""
    size = outputs * inputs * 2
    count = max(2, -(-COPIES_BYTES // size))
    x, w = problem(1, rows, outputs, inputs)
    copies = [w * jnp.bfloat16(1 + i / 128) for i in range(count)]

    def body(_, carry):
        x, copies = carry
        for w in copies:
            # one value of y, of which XLA must compute all: the next product waits for this one
            y = lax.optimization_barrier(call(x, w))
            x = x + (y[0, 0] * 1e-6).astype(x.dtype)
        return x, copies

    loops = max(2, int(seconds / (count * (size / 4e12 + 3e-6))))
    us, (x, _) = microseconds(body, (x, copies), (loops, 3 * loops), repeats)
    assert np.isfinite(np.asarray(x, np.float32)).all()
    return us / count


def nothing(x, w):
    """What is left of the loop without its products."""
    return x


def xla(x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def tiled(x, w, cut: tiling.Tiling):
    return mosaic_gpu.matvec(x, w, out_dtype=x.dtype, tiling=cut)


def plan() -> Iterator[tuple[tuple[str, ...], int, int, bool]]:
    """(names, ranks, rows, whether in every tiling), what matters most first; what comes again is timed once."""
    eight = tuple(n for n in shapes.SHAPES if n.startswith("8b"))
    yield ("8b in_proj", "8b down", "8b o"), 1, 1, True
    yield eight, 1, 1, False
    yield ("8b in_proj", "8b down"), 8, 1, True
    yield eight, 8, 1, False
    yield eight, 4, 1, False
    yield eight, 2, 1, False
    yield eight, 1, 8, False
    for model in ("9b", "nano-3", "47b"):
        yield tuple(n for n in shapes.SHAPES if n.startswith(model)), 1, 1, False
    yield eight, 1, 16, False


def checks() -> Iterator[tuple]:
    """What `Program.check` takes."""
    todo = [("matvec", check, shape, options) for shape, options in edges()]
    todo += [("project", check_project, shape, {}) for shape in ((1, 4096, 4096), (8, 2320, 4096))]
    todo += [
        ("chosen", check_chosen, (1, 6, 128, 1856, 2688), {"squared_relu": True}),
        ("chosen", check_chosen, (1, 6, 128, 2688, 1856), {}),
        ("chosen", check_chosen, (3, 6, 128, 2688, 928), {}),
        ("chosen", check_chosen, (2, 22, 64, 336, 1024), {"squared_relu": True}),
    ]
    todo += [("matvec", check, shape, {}) for shape in released()]
    for seed, (kernel, what, (rows, *shape), options) in enumerate(todo):
        cut = options.get("cut") or tiling.default_tiling(rows, shape[-2])
        row = {"kernel": kernel, "shape": tuple(shape), "form": name_of(cut) if kernel == "matvec" else "mosaic_gpu"}
        row |= {"rows": rows} | {key: str(value) for key, value in options.items() if key != "cut"}
        yield row, functools.partial(what, seed, rows, *shape, **options)


def times() -> Iterator[tuple]:
    """What `Program.time` takes. A kernel's time without the loop is about what a profiler says of it."""
    seen = set()
    for names, ranks, rows, every_tiling in plan():
        for name in names:
            size, case = shapes.of_rank(name, ranks), (name, ranks, rows)
            if case in seen or size is None:
                continue
            seen.add(case)
            outputs, inputs = size
            if supported(rows=rows, outputs=outputs, inputs=inputs, dtype="bfloat16") is not None:
                continue
            calls = {LOOP_ALONE: nothing, "xla": xla}
            for cut in tilings(rows, outputs) if every_tiling else [tiling.default_tiling(rows, outputs)]:
                calls[name_of(cut)] = functools.partial(tiled, cut=cut)
            forms = {form: functools.partial(time_call, call, rows, *size) for form, call in calls.items()}
            row = {"kernel": "matvec", "shape": size, "matrix": name, "ranks": ranks, "rows": rows}
            floor_us = 2 * outputs * inputs / BYTES_PER_SECOND * 1e6
            yield row, forms, lambda us, floor_us=floor_us: {"share": floor_us / us}


def main() -> None:
    program = Program(__doc__, lacks=("small",))
    program.check(checks())
    program.time(times())
    program.end()


if __name__ == "__main__":
    main()
