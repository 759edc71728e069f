"""The attention kernel for many tokens against its reference on one real GPU, and what it costs. A program:

    python -m tests.gpu.prefill_attention_checks --seconds 120 --out FILE

Slots that hold no token hold NaN, and so does memory before each call; inputs are new for each case; each call is
repeated on equal inputs to find results that move. Errors are also taken by head and by span of 64 queries, where a
fault of one warpgroup would drown in the whole. Cases that failed are not timed. With --small it runs little cases
anywhere, without a GPU the kernel in the interpreter: that shows that the program works, and its times mean nothing.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_jax.cache import Rows
from nemotron_jax.layers.attention import attend
from pallas_kernels.prefill_attention import mosaic_gpu, prefill_attention, reference, shapes
from tests.gpu.decode_kernel_checks import error, poison
from tests.gpu.loops import interpreted, microseconds
from tests.gpu.program import Program

BOUND = {"bfloat16": 4e-3, "float16": 1e-3}  # weights are rounded once and the result once
PART_BOUND = {"bfloat16": 8e-3, "float16": 2e-3}  # over one head, or 64 queries of a row
SPAN = 64
TILINGS = {
    "kernel": mosaic_gpu.Tiling(),
    "turns": mosaic_gpu.Tiling(turns=True),
    "3 stages": mosaic_gpu.Tiling(stages=3),
    "no overlap": mosaic_gpu.Tiling(overlap=False),
    "no overlap, turns": mosaic_gpu.Tiling(overlap=False, turns=True),
}


def problem(seed, heads, tokens, slots, start, new, dtype="bfloat16", head_dim=128):
    """(q, k, v, start, new); slots that hold no token hold NaN, and so do queries that are pads.

    q has KV heads behind the query heads, as a packed projection has.
    """
    q_heads, kv_heads = heads
    rows = len(start)
    keys = jax.random.split(jax.random.key(seed), 3)
    start, new = jnp.array(start, jnp.int32), jnp.array(new, jnp.int32)
    pad = (jnp.arange(tokens) >= new[:, None])[:, :, None, None]
    empty = (jnp.arange(slots) >= (start + new)[:, None])[:, :, None, None]
    # Scores of a spread of 2 or so: some weights dominate, and no single one.
    q = 2 * jax.random.normal(keys[0], (rows, tokens, q_heads + 2 * kv_heads, head_dim), jnp.float32)

    def cache(key):
        return jnp.where(empty, jnp.nan, jax.random.normal(key, (rows, slots, kv_heads, head_dim))).astype(dtype)

    return jnp.where(pad, jnp.nan, q).astype(dtype), cache(keys[1]), cache(keys[2]), start, new


@functools.partial(jax.jit, static_argnames=("q_heads", "span"))
def exact(q, k, v, start, new, *, q_heads, span=SPAN):
    """The reference, in spans of queries: scores of all would not fit."""
    rows, tokens, _, d = q.shape
    spans = -(-tokens // span)
    q = jnp.pad(q[:, :, :q_heads], ((0, 0), (0, spans * span - tokens), (0, 0), (0, 0)))
    clean = jnp.where((jnp.arange(v.shape[1]) < (start + new)[:, None])[:, :, None, None], v, 0)

    def one(i):
        mine = lax.dynamic_slice_in_dim(q, i * span, span, axis=1)
        left = jnp.clip(new - i * span, 0, span)
        return reference.prefill_attention(mine, k, clean, start + i * span, left, q_heads=q_heads)

    y = lax.map(one, jnp.arange(spans, dtype=jnp.int32))
    return jnp.moveaxis(y, 0, 1).reshape(rows, spans * span, q_heads, d)[:, :tokens]


def form(name: str, q_heads: int, clean: bool = False):
    """The function of `problem`'s operands: "xla", what the attention layer runs without the kernel, or a tiling."""
    if name == "xla":

        def plain(q, k, v, start, new):
            return attend(q[:, :, :q_heads], k, v, Rows(start, new, None, clean=clean))

        return jax.jit(plain)
    if jax.default_backend() != "gpu":
        return functools.partial(_interpreted, q_heads=q_heads, tiling=TILINGS[name])
    if name == "kernel":
        return jax.jit(
            lambda *o: prefill_attention(*o, q_heads=q_heads, clean=clean, implementation="mosaic_gpu"),
        )

    def tiled(q, k, v, start, new):
        if not clean:
            v = jnp.where((jnp.arange(v.shape[1]) < (start + new)[:, None])[:, :, None, None], v, 0)
        return mosaic_gpu.prefill_attention(q, k, v, start, new, q_heads=q_heads, tiling=TILINGS[name])

    return jax.jit(tiled)


def _interpreted(q, k, v, start, new, *, q_heads, tiling):
    v = jnp.where((jnp.arange(v.shape[1]) < (start + new)[:, None])[:, :, None, None], v, 0)
    return interpreted(mosaic_gpu.prefill_attention, q, k, v, start, new, q_heads=q_heads, tiling=tiling)


def compare(found, wanted, new, dtype) -> dict:
    """Errors relative to the reference over all real queries, the worst head and the worst span.

    Raises:
        AssertionError: beyond the bounds; a pad is not 0.
    """
    errors = {"whole": 0.0, "head": 0.0, "span": 0.0}
    found, wanted = (np.asarray(x.astype(jnp.float32)) for x in (found, wanted))
    for row, real in enumerate(np.asarray(new)):
        assert not found[row, real:].any(), f"row {row}: a pad is not 0"
        a, b = found[row, :real], wanted[row, :real]
        if not real:
            continue
        errors["whole"] = max(errors["whole"], error(jnp.asarray(a), jnp.asarray(b)))
        square, size = ((a - b).astype(np.float64) ** 2).mean(-1), (b.astype(np.float64) ** 2).mean(-1)
        errors["head"] = max(errors["head"], float(np.sqrt(square.mean(0) / size.mean(0)).max()))
        for first in range(0, real, SPAN):
            part = slice(first, first + SPAN)
            errors["span"] = max(errors["span"], float(np.sqrt(square[part].mean() / size[part].mean())))
        assert np.isfinite(a).all(), f"row {row} has numbers that are none"
    assert errors["whole"] <= BOUND[dtype], f"off by {errors['whole']:.1e}"
    for part in ("head", "span"):
        assert errors[part] <= PART_BOUND[dtype], f"one {part} is off by {errors[part]:.1e}"
    return {name: float(f"{value:.1e}") for name, value in errors.items()}


def check(seed, name, heads, tokens, slots, start, new, *, dtype="bfloat16", head_dim=128, repeats=3) -> dict:
    """One form on one case: its errors.

    Raises:
        AssertionError: as `compare`, or a result that moves.
    """
    operands = problem(seed, heads, tokens, slots, start, new, dtype, head_dim)
    wanted = exact(*operands, q_heads=heads[0])
    run, first = form(name, heads[0]), None
    for _ in range(repeats):
        poison()
        found = run(*operands)
        bits = np.asarray(found).tobytes()
        first = bits if first is None else first
        assert first == bits, "the result moves"
    return compare(found, wanted, new, dtype)


def check_beyond_32_bits(seed=0, rows=20, slots=131072, heads=(8, 8), tokens=128) -> dict:
    """A cache of more than 2 ** 31 elements: its last row against a call on that row alone."""
    assert rows * slots * heads[1] * 128 > 2**31
    q, k, v, start, new = problem(seed, heads, tokens, slots, (slots - 200,), (tokens - 3,))
    wanted = exact(q, k, v, start, new, q_heads=heads[0])

    @jax.jit
    def many(q, k, v, start, new):
        k, v = (jnp.concatenate([jnp.zeros((rows - 1, *x.shape[1:]), x.dtype), jnp.nan_to_num(x)]) for x in (k, v))
        start, new = (jnp.concatenate([jnp.zeros(rows - 1, jnp.int32), x]) for x in (start, new))
        q = jnp.repeat(q, rows, 0)
        return prefill_attention(q, k, v, start, new, q_heads=heads[0], clean=True, implementation="mosaic_gpu")

    y = many(q, k, v, start, new)
    assert not np.asarray(y[0], np.float32).any(), "a row without tokens is not 0"
    return compare(y[-1:], wanted, new, "bfloat16")


def cases(small: bool):
    """(heads, tokens, slots, start, new, options) from the cheapest to the dearest."""
    if small:
        yield (2, 1), 150, 331, (0, 181), (150, 37), {}
        yield (1, 1), 70, 75, (4,), (70,), {"dtype": "float16", "head_dim": 64}
        return
    every = shapes.SHAPES
    yield every["nemotron-h-8b, 8 ranks"], 64, 64, (0,), (64,), {"repeats": 20}
    yield every["nemotron-h-8b"], 128, 128, (0,), (128,), {"repeats": 20}
    yield every["nemotron-h-8b"], 1024, 2048, (0,), (1024,), {"repeats": 20}
    yield every["nemotron-h-8b"], 1000, 4100, (3000,), (1000,), {}
    yield every["nemotron-nano-9b-v2"], 777, 777, (0,), (777,), {}
    yield every["nemotron-3-nano-30b-a3b"], 65, 130, (65,), (65,), {"dtype": "float16"}
    yield every["nemotron-h-8b"], 300, 1500, (0, 1, 127, 128, 1199), (300, 299, 1, 0, 300), {"repeats": 10}
    yield every["nemotron-h-56b"], 513, 1003, (0, 490, 100), (513, 513, 64), {}
    yield (4, 4), 200, 456, (56, 255, 256), (200, 129, 200), {"head_dim": 64}
    yield (6, 1), 127, 500, (1, 300), (127, 126), {"dtype": "float16", "head_dim": 64}
    yield every["nemotron-3-ultra-550b-a55b"], 512, 16384, (15000,), (512,), {}
    yield every["nemotron-h-8b"], 4096, 8192, (4096,), (4096,), {}
    yield every["nemotron-h-8b"], 8192, 8192, (0,), (8192,), {}
    yield every["nemotron-3-nano-30b-a3b"], 2048, 32768, (30000,), (2047,), {}


def timed(small: bool):
    """(heads, tokens, start)."""
    if small:
        yield (2, 1), 150, 100
        return
    names = ("nemotron-h-8b", "nemotron-3-nano-30b-a3b", "nemotron-nano-9b-v2")
    for tokens, start in ((8192, 0), (4096, 4096), (4096, 28672)):
        for name in names:
            yield shapes.SHAPES[name], tokens, start


def flop(heads, tokens, start, head_dim=128) -> int:
    """Of both products, for the slots that queries see."""
    return 4 * head_dim * heads[0] * (tokens * start + tokens * (tokens + 1) // 2)


def time_form(name, heads, tokens, start, loops, repeats) -> float:
    """Microseconds of one call in a loop on the device, each call on what the one before has left. All slots are
    filled."""
    q, k, v, begin, new = problem(0, heads, tokens, start + tokens, (start,), (tokens,))
    call = form(name, heads[0], clean=True)

    def body(_, q):
        y = call(q, k, v, begin, new)
        return lax.dynamic_update_slice(q, y[:, -1:].astype(q.dtype), (0, 0, 0, 0))

    compiled = not isinstance(call, functools.partial)
    found, last = microseconds(body, q, loops, repeats, compiled=compiled)
    assert bool(jnp.isfinite(last.astype(jnp.float32)).all()), "the loop left numbers that are none"
    return found


def checks(small: bool) -> Iterator[tuple]:
    """What `Program.check` takes."""
    for form in ("kernel",) if small else TILINGS:
        for seed, (heads, tokens, slots, start, new, options) in enumerate(cases(small)):
            row = {"kernel": "prefill_attention", "shape": heads, "form": form, "tokens": tokens, "slots": slots}
            call = functools.partial(check, seed, form, heads, tokens, slots, start, new, **options)
            yield row | {"start": start}, call
    if not small:
        row = {"kernel": "prefill_attention", "shape": "a cache beyond 2 ** 31 elements", "form": "kernel"}
        yield row, check_beyond_32_bits


def times(small: bool) -> Iterator[tuple]:
    """What `Program.time` takes."""
    for heads, tokens, start in timed(small):
        forms = {}
        for form in ("xla", *(("kernel",) if small else TILINGS)):
            loops = ((0, 1), 1) if small else ((1, 4), 4) if form == "xla" else ((3, 15), 4)
            forms[form] = functools.partial(time_form, form, heads, tokens, start, *loops)
        row = {"kernel": "prefill_attention", "shape": heads, "tokens": tokens, "start": start}
        work = flop(heads, tokens, start)
        yield row, forms, lambda us, work=work: {"tflop_per_s": work / us / 1e6}


def main() -> None:
    program = Program(__doc__)
    program.check(checks(program.small))
    program.time(times(program.small))
    program.end()


if __name__ == "__main__":
    main()
