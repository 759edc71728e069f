"""Kernels of a decode step against their plain references on one real GPU, and what they cost. Also a program:

    python -m tests.gpu.decode_kernel_checks --seconds 60 --out FILE

Memory is filled with NaN before each kernel, inputs are new each time, and each call is repeated on equal inputs to
find results that move.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_jax.cache import AttentionCache, Rows
from nemotron_jax.layers import attention
from pallas_kernels import rms_norm, selection
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import shapes as attention_shapes
from pallas_kernels.mamba_step import mamba_step, mosaic_gpu, shapes
from tests.gpu.loops import microseconds
from tests.gpu.program import Program

BOUND = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}
LIMIT = (0.001, float("inf"))


def poison() -> None:
    """Leave NaN in memory that the next allocations get."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        for _ in range(4):
            jnp.full((size,), jnp.nan, jnp.float32).block_until_ready()


def problem(seed, shape, rows, dtype, state_dtype="float32", bias=True):
    """Operands of `mamba_step` in the order of its arguments, and the number of groups."""
    heads, p, e, groups = shape
    inner, channels = heads * p, heads * p + 2 * groups * e
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(shape, dtype="float32", scale=1.0):
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    alive = (jax.random.uniform(next(keys), (rows,)) < 0.7).at[0].set(True).astype(jnp.int32)
    return (
        normal((rows, inner + channels + heads), dtype),
        normal((rows, shapes.TAPS - 1, channels), dtype),
        normal((rows, heads, p, e), state_dtype),
        normal((channels, 1, shapes.TAPS), scale=0.5),
        normal((channels,), scale=0.1) if bias else None,
        jnp.log(jax.random.uniform(next(keys), (heads,), minval=1.0, maxval=16.0)),
        normal((heads,)),
        normal((heads,), scale=3.0),
        1 + normal((inner,), scale=0.1),
        alive,
    ), groups


def attention_problem(seed, heads, slots, lengths, dtype="bfloat16", alive=None):
    """Operands of `decode_attention`; slots that hold no token hold NaN."""
    q_heads, kv_heads = heads
    rows, d = len(lengths), attention_shapes.HEAD_DIM
    keys = jax.random.split(jax.random.key(seed), 3)
    qkv = jax.random.normal(keys[0], (rows, q_heads + 2 * kv_heads, d)).astype(dtype)
    length = jnp.array(lengths, jnp.int32)
    empty = (jnp.arange(slots) >= length[:, None])[:, :, None, None]

    def cache(key):
        return jnp.where(empty, jnp.nan, jax.random.normal(key, (rows, slots, kv_heads, d))).astype(dtype)

    return qkv, cache(keys[1]), cache(keys[2]), length, None if alive is None else jnp.array(alive, jnp.int32)


def error(found, wanted) -> float:
    found, wanted = (np.asarray(x.astype(jnp.float32), np.float64) for x in (found, wanted))
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))  # NaN where anything is NaN


def check_mamba_step(seed, shape, rows, dtype, state_dtype="float32", *, bias=True, alive=True, limit=LIMIT, repeats=3):
    """One shape: errors of (y, state) relative to the reference.

    Raises:
        AssertionError: beyond the bounds; a finished row changed; a window is not the reference's; results move.
    """
    operands, groups = problem(seed, shape, rows, dtype, state_dtype, bias)
    if not alive:
        operands = (*operands[:-1], None)

    def call(implementation):
        return jax.jit(
            lambda *a: mamba_step(*a, groups=groups, eps=1e-5, time_step_limit=limit, implementation=implementation)
        )

    with jax.default_matmul_precision("highest"):
        wanted = call("reference")(*operands)
    kernel = call("mosaic_gpu")
    first = None
    for _ in range(repeats):
        poison()
        found = jax.tree.map(np.asarray, kernel(*operands))
        first = found if first is None else first
        for a, b in zip(first, found, strict=True):
            assert a.tobytes() == b.tobytes(), "the result moves"
    y, window, state = map(jnp.asarray, first)
    assert (np.asarray(window) == np.asarray(wanted[1])).all(), "window"
    if alive:
        still = np.flatnonzero(np.asarray(operands[-1]) == 0)
        assert (np.asarray(state)[still] == np.asarray(operands[2])[still]).all(), "a finished row's state changed"
    errors = error(y, wanted[0]), error(state, wanted[2])
    assert errors[0] <= BOUND[dtype], f"y is off by {errors[0]:.1e}"
    assert errors[1] <= BOUND[state_dtype] + (BOUND[dtype] if dtype != "float32" else 0), f"state: {errors[1]:.1e}"
    return errors


def check_rms_norm(seed, tokens, hidden, dtype, residual_dtype, repeats=3) -> float:
    """One shape: error of normed relative to the reference; the new residual has its bits."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (tokens, hidden)).astype(dtype)
    old = jax.random.normal(keys[1], (tokens, hidden)).astype(residual_dtype)
    weight = 1 + 0.1 * jax.random.normal(keys[2], (hidden,))

    def call(implementation):
        return jax.jit(lambda *a: rms_norm(*a, eps=1e-5, implementation=implementation))

    wanted = call("reference")(x, old, weight)
    first = None
    for _ in range(repeats):
        poison()
        found = jax.tree.map(np.asarray, call("mosaic_gpu")(x, old, weight))
        first = found if first is None else first
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, found, strict=True)), "the result moves"
    assert (first[1] == np.asarray(wanted[1])).all(), "new residual"
    off = error(jnp.asarray(first[0]), wanted[0])
    assert off <= BOUND[dtype], f"off by {off:.1e}"
    return off


def check_decode_attention(seed, heads, slots, lengths, dtype="bfloat16", *, alive=None, repeats=3) -> float:
    """One shape: error of y relative to the reference; slots without a token hold NaN, and the cache has its bits.

    Raises:
        AssertionError: beyond the bound in any row; the new cache is not the reference's; results move.
    """
    operands = attention_problem(seed, heads, slots, lengths, dtype, alive)

    def call(implementation):
        return jax.jit(lambda *a: decode_attention(*a, implementation=implementation))

    wanted = call("reference")(*operands)
    kernel = call("mosaic_gpu")
    first = None
    for _ in range(repeats):
        poison()
        found = jax.tree.map(np.asarray, kernel(*operands))
        first = found if first is None else first
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, found, strict=True)), "the result moves"
    for name, a, b in zip("kv", first[1:], wanted[1:], strict=True):
        assert a.tobytes() == np.asarray(b).tobytes(), f"new {name}"
    worst = 0.0
    for row, (y, y_wanted) in enumerate(zip(first[0], wanted[0], strict=True)):
        if not np.asarray(y_wanted).any():  # a row that sees nothing
            assert not y.astype(np.float32).any(), f"row {row} is not 0"
            continue
        off = error(jnp.asarray(y), y_wanted)
        assert off <= BOUND[dtype], f"row {row} is off by {off:.1e}"
        worst = max(worst, off)
    return worst


def check_beyond_32_bits(seed=0, rows=20, slots=131072, heads=(8, 8)) -> float:
    """A cache of more than 2 ** 31 elements: its last row against a call on that row alone, and the row's new key."""
    assert rows * slots * heads[1] * attention_shapes.HEAD_DIM > 2**31
    qkv, k, v, length, _ = attention_problem(seed, heads, slots, (slots - 5,), "bfloat16")
    many = jax.jit(
        lambda qkv, k, v, n: decode_attention(
            jnp.repeat(qkv, rows, 0),
            jnp.concatenate([jnp.full((rows - 1, *k.shape[1:]), jnp.nan, k.dtype), k]),
            jnp.concatenate([jnp.full((rows - 1, *v.shape[1:]), jnp.nan, v.dtype), v]),
            jnp.concatenate([jnp.zeros(rows - 1, jnp.int32), n]),
            implementation="mosaic_gpu",
        )
    )
    y, new_k, _ = many(qkv, k, v, length)
    alone = jax.jit(lambda *a: decode_attention(*a, implementation="reference"))(qkv, k, v, length)
    assert (np.asarray(new_k[-1, slots - 5]) == np.asarray(qkv[0, heads[0] : heads[0] + heads[1]])).all(), "new key"
    off = error(y[-1:], alone[0])
    assert off <= BOUND["bfloat16"], f"off by {off:.1e}"
    assert (np.asarray(y[0]) == np.asarray(qkv[0, -heads[1] :])).all(), "a first token sees its own value alone"
    return off


def time_decode_attention(heads, rows, slots, implementation, layers=4, loops=(4, 20), repeats=5) -> float:
    """Microseconds of one call, cache write included, inside a loop over `layers` caches on the device; all rows are
    almost full. "plain" is what the attention layer runs without the kernel."""
    q_heads, kv_heads = heads
    qkv, k, v, length, _ = attention_problem(0, heads, slots, (slots - 1,) * rows)
    caches = [(k + i, v + i) for i in range(layers)]
    state = Rows(length, jnp.ones(rows, jnp.int32), None, clean=True)

    def once(qkv, k, v):
        if implementation == "mosaic_gpu":
            return decode_attention(qkv, k, v, length, implementation=implementation)
        q, new_k, new_v = jnp.split(qkv[:, None], (q_heads, q_heads + kv_heads), axis=2)
        cache = attention.write(AttentionCache(k, v), new_k, new_v, state)
        return attention.attend(q, cache.k, cache.v, state)[:, 0], cache.k, cache.v

    def body(_, carry):
        qkv, caches = carry
        new = []
        for k, v in caches:
            y, k, v = once(qkv, k, v)
            qkv = lax.dynamic_update_slice(qkv, y, (0, 0, 0))  # the next call waits for this one
            new.append((k, v))
        return qkv, new

    time_of_all, _ = microseconds(body, (qkv, caches), loops, repeats)
    return time_of_all / layers


def attention_bytes(heads, rows, slots) -> int:
    """Keys and values read once."""
    return rows * slots * heads[1] * attention_shapes.HEAD_DIM * 2 * 2


def time_mamba_step(shape, rows, implementation, layers=8, loops=(4, 20), repeats=5) -> float:
    """Microseconds of one call inside a loop over `layers` different states on the device.

    Args:
        implementation: of `mamba_step`, or the number of blocks of the kernel's clusters.
    """
    operands, groups = problem(0, shape, rows, "bfloat16")
    if isinstance(implementation, int):
        step = functools.partial(mosaic_gpu.mamba_step, blocks=implementation)
    else:
        step = functools.partial(mamba_step, implementation=implementation)
    zx, window, state, *rest, alive = operands
    states = [state + 0.01 * i for i in range(layers)]
    windows = [window + 0 * i for i in range(layers)]

    def body(_, carry):
        zx, states, windows = carry
        new_states, new_windows = [], []
        for s, w in zip(states, windows, strict=True):
            y, w, s = step(zx, w, s, *rest, alive, groups=groups, eps=1e-5, time_step_limit=LIMIT)
            zx = lax.dynamic_update_slice(zx, y, (0, 0))  # the next call waits for this one
            new_states.append(s)
            new_windows.append(w)
        return zx, new_states, new_windows

    time_of_all, _ = microseconds(body, (zx, states, windows), loops, repeats)
    return time_of_all / layers


def mamba_bytes(shape, rows) -> int:
    """State and window read and written, activations read and written once."""
    heads, p, e, groups = shape
    inner, channels = heads * p, heads * p + 2 * groups * e
    return rows * (8 * inner * e + 2 * 2 * 3 * channels + 2 * (2 * inner + channels + heads))


def cases():
    """(shape, rows, dtype, state dtype, options) from the cheapest to the dearest."""
    every = shapes.SHAPES
    yield every["nemotron-h-8b"], 1, "bfloat16", "float32", {}
    yield every["nemotron-h-8b"], 3, "float32", "float32", {}
    yield every["nemotron-nano-9b-v2"], 3, "bfloat16", "float32", {}
    yield every["nemotron-3-nano-4b"], 5, "bfloat16", "float32", {"bias": False}
    yield every["nemotron-3-nano-30b-a3b"], 8, "bfloat16", "float32", {"alive": False}
    yield every["nemotron-h-56b"], 3, "bfloat16", "float32", {}
    yield every["nemotron-h-8b, 8 ranks"], 7, "float16", "bfloat16", {"limit": (0.01, 0.2)}
    yield (6, 32, 64, 3), 2, "float32", "float32", {}
    yield (8, 80, 96, 2), 3, "bfloat16", "float32", {}
    yield (5, 64, 256, 1), 4, "bfloat16", "float32", {}  # rows that begin at odd places
    yield every["nemotron-h-8b"], 129, "bfloat16", "float32", {"repeats": 2}


def attention_cases():
    """(heads, slots, lengths, options) from the cheapest to the dearest."""
    every = attention_shapes.SHAPES
    yield every["nemotron-h-8b"], 2048, (2047,), {}
    yield every["nemotron-h-8b, 8 ranks"], 64, (0, 1, 63, 64), {"alive": (1, 1, 1, 1)}
    yield every["nemotron-nano-9b-v2"], 1000, (0, 1, 64, 999, 1000), {"alive": (0, 1, 0, 1, 1)}
    yield every["nemotron-3-nano-30b-a3b"], 4104, (4099, 17, 2048), {}
    yield every["nemotron-h-56b"], 776, (700, 3), {"dtype": "float16"}
    yield every["nemotron-3-ultra-550b-a55b"], 32768, (32767, 1), {}
    yield (64, 1), 200, (199, 128), {}
    yield (3, 3), 136, (129, 128, 65), {}
    yield every["nemotron-h-8b"], 2048, tuple(range(7, 2048, 48)), {"repeats": 2}


# Shape, rows, and clusters of fewer blocks to compare.
MAMBA_TIMES: list[tuple[str, int, tuple[int, ...]]] = [
    ("nemotron-h-8b", 1, ()),
    ("nemotron-nano-9b-v2", 1, (4,)),
    ("nemotron-h-8b", 8, (4, 2)),
    ("nemotron-h-8b", 32, (4, 2)),
    ("nemotron-nano-9b-v2", 8, (4,)),
    ("nemotron-3-nano-30b-a3b", 1, (4,)),
    ("nemotron-3-nano-30b-a3b", 64, (4, 2)),
    ("nemotron-h-8b", 128, (4,)),
    ("nemotron-h-8b, 8 ranks", 1, ()),
    ("nemotron-h-56b", 1, ()),
]
ATTENTION_TIMES = [(slots, rows) for slots in (2048, 32768) for rows in (1, 8, 32)]


def checks() -> Iterator[tuple]:
    """What `Program.check` takes, from the cheapest to the dearest of each kernel."""
    use = functools.partial
    for seed, (shape, n, dtype, state_dtype, options) in enumerate(cases()):
        row = {"kernel": "mamba_step", "shape": shape, "form": "mosaic_gpu", "rows": n, "dtype": dtype}
        yield row, use(check_mamba_step, seed, shape, n, dtype, state_dtype, **options)
    for seed, (n, hidden) in enumerate(((1, 4096), (3, 2688), (64, 8192), (2, 200))):
        row = {"kernel": "rms_norm", "shape": hidden, "form": "mosaic_gpu", "rows": n}
        yield row, use(check_rms_norm, seed, n, hidden, "bfloat16", ("bfloat16", "float32")[seed % 2])
    for seed, (heads, slots, lengths, options) in enumerate(attention_cases()):
        row = {"kernel": "decode_attention", "shape": heads, "form": "mosaic_gpu", "rows": len(lengths), "slots": slots}
        yield row, use(check_decode_attention, seed, heads, slots, lengths, **options)
    row = {"kernel": "decode_attention", "shape": "a cache beyond 2 ** 31 elements", "form": "mosaic_gpu"}
    yield row, check_beyond_32_bits


def times() -> Iterator[tuple]:
    """What `Program.time` takes, what matters most first."""
    for name, n, blocks in MAMBA_TIMES:
        shape, layers = shapes.SHAPES[name], 8 if n <= 8 else 3
        row = {"kernel": "mamba_step", "shape": shape, "model": name, "rows": n}
        call = functools.partial(time_mamba_step, shape, n, layers=layers)
        yield row, *timed(call, ("mosaic_gpu", "reference", *blocks), mamba_bytes(shape, n))
    for name in ("nemotron-h-8b", "nemotron-3-nano-30b-a3b"):
        heads = attention_shapes.SHAPES[name]
        for slots, n in ATTENTION_TIMES:
            row = {"kernel": "decode_attention", "shape": heads, "model": name, "rows": n, "slots": slots}
            call = functools.partial(time_decode_attention, heads, n, slots)
            yield row, *timed(call, ("mosaic_gpu", "plain"), attention_bytes(heads, n, slots))


def timed(call: Callable[..., float], forms: tuple, moved: int) -> tuple:
    """A call for each form, and what its time means for the bytes that are moved."""
    calls = {str(form): functools.partial(call, form) for form in forms}
    return calls, lambda us: {"tb_per_s": moved / us / 1e6}


def main() -> None:
    program = Program(__doc__, lacks=("small",))
    program.check(checks())
    with selection.use("auto"):
        program.time(times())
    program.end()


if __name__ == "__main__":
    main()
