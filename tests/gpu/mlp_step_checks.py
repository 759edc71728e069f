"""An MLP in one launch against two launches of matvec and against plain products, on one real GPU. A program:

    python -m tests.gpu.mlp_step_checks --seconds 100 --out FILE

Memory is filled with NaN before each call, and each call is repeated on equal inputs to find results that move. Then
thousands of calls follow back to back, each on what the one before has left; all must have the bits of two products one
after the other. Times in a loop on the device come last, over different matrices, more than the second-level cache
holds. Blocks that wait for each other for ever end the program a minute behind its time. With --small it runs little
shapes anywhere, without a GPU in the interpreter, whose time is not taken: that shows that the program works.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import matvec
from pallas_kernels.matvec.product import Tiling
from pallas_kernels.mlp_step import mlp_step, mosaic_gpu, reference, shapes, supported
from tests.gpu.decode_kernel_checks import error, poison
from tests.gpu.loops import microseconds
from tests.gpu.program import Program

# Float32 results are near what was rounded between the products, which may go to the other side of a step.
BOUND = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-3}
RANKS = (1, 2, 4, 8)
CALLS = 10_000  # back to back, in all
CHAIN = 4
COPIES_BYTES = 400 << 20  # of different matrices that calls take turns on
FORMS = ("nothing", "plain", "two matvec", "mlp_step", "mlp_step, two warpgroups")
SMALL_CUTS = mosaic_gpu.Cuts(Tiling(72, 64, 4, 1, 2), Tiling(64, 64, 4, 1, 2), 9)


def problem(seed: int, rows: int, hidden: int, wide: int, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    """(x, up, down); what comes out is about as large as x."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (rows, hidden), dtype)
    up = jax.random.normal(keys[1], (wide, hidden), dtype) * jnp.asarray(hidden**-0.5, dtype)
    down = jax.random.normal(keys[2], (hidden, wide), dtype) * jnp.asarray((1.5 * wide) ** -0.5, dtype)
    return x, up, down


def kernel(*operands: jax.Array, out_dtype: Any = None, cuts: mosaic_gpu.Cuts | None = None) -> jax.Array:
    """One launch."""
    out = jnp.dtype(out_dtype or operands[0].dtype)
    if jax.default_backend() == "gpu":
        if cuts is None:
            return mlp_step(*operands, out_dtype=out, implementation="mosaic_gpu")
        return mosaic_gpu.mlp_step(*operands, out_dtype=out, cuts=cuts)
    from tests.pallas_kernels.interpreter import interpreter

    with interpreter() as interpret:
        call = functools.partial(mosaic_gpu.mlp_step, cuts=SMALL_CUTS, interpret=interpret)
        return jax.block_until_ready(call(*operands, out_dtype=out))


def two(x: jax.Array, up: jax.Array, down: jax.Array, out_dtype: Any = None) -> jax.Array:
    """Two launches."""
    how = "mosaic_gpu" if jax.default_backend() == "gpu" else "reference"
    h = matvec.matvec(x, up, squared_relu=True, implementation=how)
    return matvec.matvec(h, down, out_dtype=out_dtype, implementation=how)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(call) if jax.default_backend() == "gpu" else call


def check(seed, rows, hidden, wide, *, dtype="bfloat16", out_dtype=None, cuts=None, repeats=20) -> float:
    """The error relative to products in float32 that are rounded where the kernel rounds.

    Raises:
        AssertionError: it is beyond the bound; results move; they are not those of two products, bit for bit (with one
            warpgroup that multiplies); a row with NaN in it reaches another one.
    """
    x, up, down = problem(seed, rows, hidden, wide, dtype)
    out = jnp.dtype(out_dtype or dtype)
    call = compiled(functools.partial(kernel, out_dtype=out, cuts=cuts))
    first, found = None, x
    for _ in range(repeats):
        poison()
        found = call(x, up, down)
        bits = np.asarray(found).tobytes()
        first = bits if first is None else first
        assert first == bits, "the result moves"
    assert found.shape == x.shape and found.dtype == out
    if jax.default_backend() == "gpu" and (cuts is None or cuts.up.warpgroups == 1):
        wanted = jax.jit(functools.partial(two, out_dtype=out))(x, up, down)
        assert np.asarray(wanted).tobytes() == first, f"not the bits of two products: off by {error(found, wanted):.1e}"

    @jax.jit
    def plain(x, up, down):
        product = functools.partial(jnp.dot, precision="highest", preferred_element_type=jnp.float32)
        h = jnp.square(jax.nn.relu(product(x, up.T).astype(dtype).astype(jnp.float32))).astype(dtype)
        return product(h, down.T).astype(out)

    off = error(found, plain(x, up, down))
    assert off <= BOUND[str(out)], f"off by {off:.1e}"
    if rows > 1:
        hidden_row = np.asarray(call(x.at[rows // 2].set(jnp.nan), up, down))
        others = np.arange(rows) != rows // 2
        assert hidden_row[others].tobytes() == np.asarray(found)[others].tobytes(), "a row reaches another"
    return off


def many(seed: int, rows: int, hidden: int, wide: int, calls: int, chain: int = CHAIN) -> int:
    """How many calls gave the bits of two products: chains of so many, each call on the result of the one in front,
    each chain on new numbers.

    Raises:
        AssertionError: one had others, or ended in no numbers.
    """
    x, up, down = problem(seed, rows, hidden, wide)

    def chained(call, x):
        for _ in range(chain):
            x = call(x, up, down)
        return x

    def body(i, carry):
        wrong, lost = carry
        x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), (rows, hidden), up.dtype)
        one, other = chained(kernel, x), chained(two, x)
        bits = [lax.bitcast_convert_type(y, jnp.int16) for y in (one, other)]
        return wrong + jnp.any(bits[0] != bits[1]), lost + jnp.any(~jnp.isfinite(one))

    zero = jnp.int32(0)
    if jax.default_backend() == "gpu":
        wrong, lost = jax.jit(lambda: lax.fori_loop(0, calls // chain, body, (zero, zero)))()
    else:
        wrong, lost = zero, zero
        for i in range(calls // chain):
            wrong, lost = body(i, (wrong, lost))
    assert not lost, f"{lost} of {calls // chain} chains end in no numbers"
    assert not wrong, f"{wrong} of {calls // chain} chains of {chain} calls have other bits"
    return calls // chain * chain


def cuts_of(name: str, rows: int, hidden: int, wide: int) -> mosaic_gpu.Cuts | None:
    return mosaic_gpu.default_cuts(rows, hidden, wide, warpgroups=2) if name.endswith("two warpgroups") else None


def time_form(name: str, rows: int, hidden: int, wide: int, small: bool) -> float:
    """Microseconds of one call: each waits for the one before and takes other matrices."""
    size = 4 * hidden * wide
    count = 2 if small else max(2, -(-COPIES_BYTES // size))
    x, up, down = problem(1, rows, hidden, wide)
    copies = [(up * jnp.bfloat16(1 + i / 128), down * jnp.bfloat16(1 + i / 128)) for i in range(count)]
    call = {
        "nothing": lambda x, up, down: x,
        "plain": functools.partial(reference.mlp_step, out_dtype=x.dtype),
        "two matvec": two,
    }.get(name, functools.partial(kernel, cuts=cuts_of(name, rows, hidden, wide)))

    def body(_, carry):
        x, copies = carry
        for pair in copies:
            # one value of the result, of which XLA must compute all: the next call waits for this one
            y = lax.optimization_barrier(call(x, *pair))
            x = x + (y[0, 0] * 1e-6).astype(x.dtype)
        return x, copies

    loops = 1 if small else max(2, int(0.03 / (count * (size / 4e12 + 5e-6))))
    us, (x, _) = microseconds(
        body, (x, copies), (loops, 3 * loops), 1 if small else 5, compiled=jax.default_backend() == "gpu"
    )
    assert np.isfinite(np.asarray(x, np.float32)).all()
    return us / count


def released(rows: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(name, (rows, hidden, wide)) of every released shape and number of ranks that the kernel serves."""
    for n in rows:
        for ranks in RANKS:
            for name in shapes.SHAPES:
                size = shapes.of_rank(name, ranks)
                if size and supported(rows=n, hidden=size[0], wide=size[1], dtype="bfloat16") is None:
                    yield f"{name} / {ranks}", (n, *size)


def edges() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """((rows, hidden, wide), options) of `check`: what no released shape has."""
    yield (1, 64, 64), {"out_dtype": "float32"}
    yield (3, 80, 2064), {"dtype": "float16"}  # narrow patterns; hardly any tiles of the second product
    yield (8, 4112, 80), {}  # and of the first
    yield (5, 2688, 21504), {"out_dtype": "float32"}
    yield (8, 1040, 33808), {}  # several tiles of a block in the first product
    yield (2, 33808, 1040), {}  # and in the second
    for warpgroups, blocks in ((1, 132), (1, 66), (1, 1), (2, 132), (2, 66), (2, 1), (3, 132), (3, 66)):
        yield (4, 512, 1536), {"cuts": mosaic_gpu.default_cuts(4, 512, 1536, warpgroups=warpgroups, blocks=blocks)}


def todo(small: bool) -> Iterator[tuple[str, dict[str, Any], str, Callable[[], Any]]]:
    """What matters most first."""
    if small:
        shape = (3, 128, 208)
        yield "small", {"check": shape}, "error", functools.partial(check, 0, *shape, repeats=2)
        yield "small", {"many": shape}, "calls", functools.partial(many, 0, *shape, calls=2, chain=1)
        return
    seed = 0
    for rows in ((1,), (8,), (5,)):
        for name, shape in released(rows):
            seed += 1
            yield name, {"check": name, "shape": shape}, "error", functools.partial(check, seed, *shape, repeats=5)
        if rows == (1,):
            for name, shape in released((3,)):
                if name in ("8b / 1", "8b / 8", "9b / 2", "nano-3 shared / 1"):
                    call = functools.partial(many, seed, *shape, calls=CALLS)
                    yield name, {"many": name, "shape": shape}, "calls", call
            for shape, options in edges():
                seed += 1
                row = {"check": "edges", "shape": shape, "options": {k: str(v) for k, v in options.items()}}
                yield "edges", row, "error", functools.partial(check, seed, *shape, **options)


def main() -> None:
    program = Program(__doc__)
    small = program.small
    program.check(list(todo(small)))
    table = []
    timed = [("small", (2, 128, 208))] if small else [*released((1,)), *released((8,))]
    for name, shape in timed:
        if program.late(1):
            program.say({"left out": f"timings of {name}, {shape[0]} rows"})
            continue
        us = {}
        for form in FORMS[:3] if small else FORMS:
            wrong = form.startswith("mlp_step") and name in program.failed
            found = "failed" if wrong else program.tried(name, time_form, form, *shape, small)
            us[form] = round(found, 2) if isinstance(found, float) else found
        table.append({"time": name, "shape": shape, "us": us})
        program.say(table[-1])
    print(f"\n| shape | rows, hidden, wide | {' us | '.join(FORMS)} us |\n|{'---|' * (2 + len(FORMS))}")
    for row in table:
        print(f"| {row['time']} | {row['shape']} | {' | '.join(map(str, row['us'].values()))} |")
    program.end()


if __name__ == "__main__":
    main()
