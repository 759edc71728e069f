"""The operations of a block one by one, at a model's shapes on one device: each implementation checked, then timed.

An operation is timed in a loop on the device, eight calls or more in an iteration, in which each call uses the last
one's results; the time of a call is the slope over the number of calls. Where one call's data would stay in the
second-level cache, calls take turns on copies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers import experts
from nemotron_jax.layers.linear import project
from nemotron_jax.timing import FLOPS_PER_SECOND, HBM_BYTES_PER_SECOND, slope
from pallas_kernels import Unsupported, matvec, rms_norm, selection
from pallas_kernels.mamba_step import mamba_step
from pallas_kernels.mamba_step.shapes import TAPS

CACHE_BYTES = 256 << 20  # copies together exceed an H200's second-level cache of 60 MB several times
MOST_COPIES = 8
CALLS_TOGETHER = 8
AGREE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}  # relative rms to the first implementation


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation at one shape.

    Attributes:
      name, shape: as they are printed.
      implementations: names; the first one is what the others are compared with.
      call: ``(implementation, chained, copy) -> (chained, copy)``: uses both, and returns what the next call takes.
      chained: small operands that go from call to call.
      copies: large operands, of which each call has its own.
      bytes: fewest that one call moves.
      flops: operations of its matrix products.
      result: what of an implementation is compared, where it is not what ``call`` gives.
    """

    name: str
    shape: str
    implementations: tuple[str, ...]
    call: Callable[[str, Any, Any], tuple[Any, Any]]
    chained: Any
    copies: list[Any]
    bytes: int
    flops: int = 0
    result: Callable[[str, Any, Any], Any] | None = None

    @property
    def floor(self) -> float:
        """Seconds that no implementation can be below on an H200."""
        return max(self.bytes / HBM_BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)


def measure(operation: Operation, dtype: str, steps: tuple[int, int], repeats: int) -> Iterator[dict[str, Any]]:
    """One row for each implementation: ``ms`` of a call, or None and ``problem`` where it is wrong or cannot run."""
    expected = None
    for name in operation.implementations:
        row: dict[str, Any] = {
            "operation": operation.name,
            "shape": operation.shape,
            "implementation": name,
            "ms": None,
        }
        try:
            one = jax.jit(functools.partial(operation.result or operation.call, name))
            results = jax.tree.leaves(one(operation.chained, operation.copies[0]))
            found = [np.asarray(x, np.float32) for x in results]
            expected = found if expected is None else expected
            row["relative_rms"] = max(_off(a, b) for a, b in zip(found, expected, strict=True))
            if row["relative_rms"] <= AGREE[dtype]:
                time = _time(operation, name, steps, repeats)
                row |= {"ms": time.median * 1e3, "ms_low": time.low * 1e3, "ms_high": time.high * 1e3}
                row["share_of_floor"] = operation.floor / time.median
            else:
                row["problem"] = f"differs from {operation.implementations[0]}"
        except Exception as error:  # an implementation that cannot serve a shape leaves the others their rows
            row["problem"] = f"{type(error).__name__}: {error}"[:500]
        yield row


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return math.inf
    return float(np.sqrt(np.mean((found - expected) ** 2) / max(np.mean(expected**2), 1e-30)))


def _time(operation: Operation, name: str, steps: tuple[int, int], repeats: int):
    # several calls in each iteration: the host takes some 10 us to start one
    rounds = -(-CALLS_TOGETHER // len(operation.copies))
    loops = max(1, steps[0] // (rounds * len(operation.copies)))

    def body(_, carry):
        chained, copies = carry
        copies = list(copies)
        for i in range(rounds * len(copies)):
            place = i % len(copies)
            chained, copies[place] = operation.call(name, chained, copies[place])
        return chained, copies

    run = jax.jit(lambda carry: lax.fori_loop(0, loops, body, carry), donate_argnums=0)
    holder = [jax.tree.map(jnp.copy, (operation.chained, operation.copies))]

    def program(n: int):
        def call():
            for _ in range(n):
                holder[0] = run(holder[0])
            jax.block_until_ready(holder[0])

        return call

    time = slope(program, (1, max(2, steps[1] // steps[0])), repeats)
    calls = loops * rounds * len(operation.copies)
    return dataclasses.replace(time, median=time.median / calls, low=time.low / calls, high=time.high / calls)


# ------------------------------------------------------------------------------------------------- operations
def operations(config: NemotronHConfig, rows: int, dtype: Any) -> Iterator[Operation]:
    """Those of a decode step of ``rows`` rows that the model's blocks have."""
    yield norm(config, rows, dtype)
    if "M" in config.hybrid_override_pattern:
        yield mamba(config, rows, dtype)
    if "E" in config.hybrid_override_pattern:
        yield routed(config, rows, dtype)
    yield from projections(config, rows, dtype)


def _copies(make: Callable[[int], Any], size: int) -> list[Any]:
    return [make(i) for i in range(min(MOST_COPIES, max(1, -(-CACHE_BYTES // max(size, 1)))))]


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def norm(config: NemotronHConfig, rows: int, dtype: Any) -> Operation:
    hidden = config.hidden_size
    x, residual = normal(0, (rows, hidden), dtype), normal(1, (rows, hidden), dtype)
    weight = 1 + normal(2, (hidden,), jnp.float32, 0.1)

    def call(implementation, chained, copy):
        x, residual = chained
        return rms_norm(x, residual, copy, eps=1e-5, implementation=implementation), copy

    moved = 4 * rows * hidden * jnp.dtype(dtype).itemsize
    shape = f"{rows} x {hidden}"
    return Operation("rms_norm", shape, ("reference", "mosaic_gpu"), call, (x, residual), [weight], moved)


def mamba(config: NemotronHConfig, rows: int, dtype: Any) -> Operation:
    heads, p, e, groups = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups
    inner, channels = heads * p, heads * p + 2 * groups * e
    uniform = jax.random.uniform(jax.random.key(9), (heads,), minval=1.0, maxval=16.0)
    fixed = (
        normal(1, (channels, 1, TAPS), jnp.float32, 0.5),
        normal(2, (channels,), jnp.float32, 0.1),
        jnp.log(uniform),
        normal(3, (heads,), jnp.float32),
        normal(4, (heads,), jnp.float32, 3.0),
        1 + normal(5, (inner,), jnp.float32, 0.1),
        jnp.ones((rows,), jnp.int32),
    )

    def call(implementation, zx, copy):
        window, state = copy
        y, window, state = mamba_step(
            zx, window, state, *fixed, groups=groups, eps=1e-5, time_step_limit=(0.0, math.inf),
            implementation=implementation,
        )  # fmt: skip
        return lax.dynamic_update_slice(zx, y, (0, 0)), (window, state)  # the next call waits for this one

    def copy(i: int):
        return (
            normal(100 + i, (rows, TAPS - 1, channels), dtype),
            normal(200 + i, (rows, heads, p, e), jnp.float32),
        )

    state = rows * inner * e * 4
    itemsize = jnp.dtype(dtype).itemsize
    moved = 2 * state + rows * itemsize * (2 * 3 * channels + 2 * inner + channels + heads)
    zx = normal(0, (rows, inner + channels + heads), dtype)
    shape = f"{rows} x {heads} heads of {p}, state {e}, groups {groups}"
    return Operation("mamba_step", shape, ("reference", "mosaic_gpu"), call, zx, _copies(copy, state), moved)


def routed(config: NemotronHConfig, rows: int, dtype: Any) -> Operation:
    number, k, f = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size
    width = config.moe_latent_size or config.hidden_size
    rng = np.random.default_rng(0)
    weights = jnp.full((rows, k), 1.0 / k, jnp.float32)
    up = normal(1, (number, f, width), dtype, width**-0.5)
    down = normal(2, (number, width, f), dtype, f**-0.5)
    # many choices, so that no call finds another's experts in the cache
    chosen = [np.argsort(rng.random((rows, number)), -1)[:, :k].astype(np.int32) for _ in range(MOST_COPIES)]

    def result(implementation, chained, copy):
        x, up, down = chained
        if implementation != "gather, matvec":
            return experts.expert_sum(x, up, down, copy, weights, implementation)
        with selection.use("matvec"):
            if not experts.streams(x, up, down, copy):
                raise Unsupported("matvec: the kernel does not run here or cannot serve these shapes")
            return experts.expert_sum(x, up, down, copy, weights, "gather")

    def call(implementation, chained, copy):
        x, *matrices = chained
        return ((x + 1e-3 * result(implementation, chained, copy)).astype(x.dtype), *matrices), copy

    used = float(np.mean([len(np.unique(c)) for c in chosen]))
    moved = int(used * 2 * f * width * jnp.dtype(dtype).itemsize)
    few = ("gather", "gather, matvec") if rows * k <= 4 * number else ()
    names = (*(n for n in experts.IMPLEMENTATIONS if n != "gather"), *few)
    x = normal(0, (rows, width), dtype)
    copies = [jnp.asarray(c) for c in chosen]
    shape = f"{rows} x {k} of {number}, {f} x {width}"
    flops = 4 * rows * k * f * width
    return Operation("experts", shape, names, call, (x, up, down), copies, moved, flops, result)


def projections(config: NemotronHConfig, rows: int, dtype: Any) -> Iterator[Operation]:
    """The matrix products, by what they are for."""
    hidden, pattern = config.hidden_size, config.hybrid_override_pattern
    inner = config.mamba_num_heads * config.mamba_head_dim
    packed = 2 * inner + 2 * config.n_groups * config.ssm_state_size + config.mamba_num_heads
    found = {"head": (config.vocab_size, hidden)}
    if "M" in pattern:
        found |= {"in_proj": (packed, hidden), "out_proj": (hidden, inner)}
    if "-" in pattern:
        found |= {"up": (config.intermediate_size, hidden), "down": (hidden, config.intermediate_size)}
    if "*" in pattern:
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        found |= {"qkv": ((heads + 2 * kv) * config.head_dim, hidden), "o": (hidden, heads * config.head_dim)}
    for name, (out, width) in found.items():
        yield _projection(name, out, width, rows, dtype)


def _projection(name: str, out: int, width: int, rows: int, dtype: Any) -> Operation:
    def result(implementation, x, matrix):
        if implementation != "xla":
            return matvec.matvec(x, matrix, implementation=implementation)
        with selection.use("none"):
            return project(x, matrix)

    def call(implementation, x, matrix):
        y = result(implementation, x, matrix)
        # a reduction of all of y, so small that it changes nothing: the next product waits for this one
        return (x + 1e-6 * jnp.max(y.astype(jnp.float32), -1, keepdims=True)).astype(x.dtype), matrix

    size = out * width * jnp.dtype(dtype).itemsize
    copies = _copies(lambda i: normal(i, (out, width), dtype, width**-0.5), size)
    shape, x = f"{rows} x {width} by {out}", normal(99, (rows, width), dtype)
    return Operation(name, shape, ("xla", "mosaic_gpu"), call, x, copies, size, 2 * rows * out * width, result)
