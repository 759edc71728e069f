"""Timings that can be compared: seconds per step from the slope over two lengths of a device loop, and the machine's
ceilings.

A program of n steps takes ``a + n * step``: the difference of two lengths removes dispatch, the first token and copies.
Weights are arguments, states are random, caches are donated, and each timed call is waited for.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from nemotron_jax import processes
from nemotron_jax.cache import AttentionCache, Cache
from nemotron_jax.generation.programs import empty, read_program, vocab_columns, write_program
from nemotron_jax.generation.sampling import Sampling, controls
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import DATA, axis_size, bytes_of

HBM_BYTES_PER_SECOND = 4.8e12  # H200 data sheet
FLOPS_PER_SECOND = 790e12  # dense bf16 products measured on one H200
STEPS = (32, 160)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds: median, smallest and largest of the repeats."""

    median: float
    low: float
    high: float


def repeat(call: Callable[[], object], repeats: int = 10, warm: int = 3) -> Timing:
    """Seconds of ``call``, which must wait for its own result. Warm-up covers compilation, graph recording and the
    first replay.
    """
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def slope(program: Callable[[int], Callable[[], object]], steps: tuple[int, int] = STEPS, repeats: int = 10) -> Timing:
    """Seconds per step, where ``program(n)`` gives a call of n steps."""
    short, long = (repeat(program(n), repeats) for n in steps)
    n = steps[1] - steps[0]
    return Timing((long.median - short.median) / n, (long.low - short.high) / n, (long.high - short.low) / n)


def copy_rate(size: int = 2 << 30) -> float:
    """Bytes read plus written per second by a large copy on one device."""
    x = jnp.arange(size // 4, dtype=jnp.float32)

    def program(n):
        run = jax.jit(lambda x: lax.fori_loop(0, n, lambda i, x: x + 1.0, x))
        return lambda: jax.block_until_ready(run(x))

    return 2 * size / slope(program, (2, 10), 5).median


def matmul_rate(n: int = 8192) -> float:
    """Operations per second of an n^3 bfloat16 product on random data."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (0, 1))

    def program(steps):
        run = jax.jit(lambda a, b: lax.fori_loop(0, steps, lambda i, a: (a @ b * 0.01).astype(jnp.bfloat16), a))
        return lambda: jax.block_until_ready(run(a, b))

    return 2 * n**3 / slope(program, (2, 10), 5).median


def random_state(model: NemotronH, batch: int, capacity: int, length: int) -> tuple[Cache, jax.Array]:
    """Cache and logits of rows that have ``length`` tokens behind them, with random values in every slot."""
    cache, logits = empty(model, batch, capacity)

    def fill(tree):
        leaves, treedef = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        return treedef.unflatten(
            [
                jnp.full_like(x, length) if x.dtype == jnp.int32 else 0.1 * jax.random.normal(k, x.shape, x.dtype)
                for k, x in zip(keys, leaves, strict=True)
            ]
        )

    shardings = jax.tree.map(lambda x: x.sharding, (cache, logits))
    return jax.jit(fill, out_shardings=shardings, donate_argnums=0)((cache, logits))


@contextlib.contextmanager
def settled_routes(model: NemotronH) -> Generator[None]:
    """Inside, each router's bias alone says which experts are chosen, some at random in each block.

    Programs that round differently then go the same way, and their logits can be compared: otherwise one token that
    goes to another expert is as far off as a fault. Scores are in (0, 1), the biases 2 apart; those of one group of
    experts are all below those of the next, so that no two groups come near each other either.
    """
    rng = np.random.default_rng(0)

    def biases(bias: jax.Array) -> np.ndarray:
        groups = rng.permutation(model.config.n_group)[:, None]
        size = bias.size // groups.size
        return (2 * (groups * size + rng.permuted(np.tile(np.arange(size), (groups.size, 1)), axis=1))).reshape(-1)

    paths = [p.path for p in model.parameters if p.path[-2:] == ("router", "bias")]
    old = {path: model.parameter(*path) for path in paths}
    model.replace_weights({path: biases(bias).astype(bias.dtype) for path, bias in old.items()})
    try:
        yield
    finally:
        model.replace_weights(old)


Program = Callable[[int], Callable[[], object]]  # of n steps, a call that waits for its result


def decode_program(model: NemotronH, batch: int, context: int, steps: int, capacity: int) -> tuple[Program, np.ndarray]:
    """Calls of the generator's own greedy program, and the logits behind the first step with `settled_routes` (for a
    check).

    Every call starts from ``context`` tokens behind each row. One of n steps, a multiple of ``steps``, runs the program
    of ``steps`` steps as often as that takes, without waiting in between.
    """
    columns = vocab_columns(model)
    arguments = controls(Sampling(), np.zeros(batch, np.int64), (), columns)
    run = write_program(model, batch, capacity, steps)
    left = np.full(batch, steps, np.int32)
    holder = list(random_state(model, batch, capacity, context))
    length = processes.host(holder[0].length)
    # with one token left the same program stops every row after its first step, and keeps the logits behind it
    with settled_routes(model):
        cache, logits, _, _ = run(*holder, None, np.ones(batch, np.int32), arguments)
    first = np.asarray(processes.host(logits), np.float32)
    holder[:] = cache, logits

    def program(n):
        def call():
            holder[0] = dataclasses.replace(holder[0], length=jax.device_put(length, holder[0].length.sharding))
            for _ in range(n // steps):
                cache, logits, _, _ = run(*holder, None, left, arguments)
                holder[:] = cache, logits
            jax.block_until_ready(holder)

        return call

    return program, first


def decode(
    model: NemotronH, batch: int, context: int, steps: tuple[int, int] = STEPS, repeats: int = 10
) -> tuple[Timing, np.ndarray]:
    """Seconds per greedy step, and the logits behind the first one; see `decode_program`."""
    program, first = decode_program(model, batch, context, steps[0], context + max(steps))
    return slope(program, steps, repeats), first


def prefill_call(model: NemotronH, batch: int, tokens: int) -> Callable[[], jax.Array]:
    """A call that reads ``tokens`` new tokens in each row and gives the logits of the last ones."""
    run = read_program(model, batch, tokens, tokens)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, tokens), np.int32)
    ids = jax.device_put(ids)
    new = np.full(batch, tokens, np.int32)
    holder = list(empty(model, batch, tokens))

    def call():
        zero = jax.device_put(np.zeros(batch, np.int32), holder[0].length.sharding)
        holder[:] = run(ids, new, dataclasses.replace(holder[0], length=zero), holder[1])
        return jax.block_until_ready(holder[1])

    return call


def prefill(model: NemotronH, batch: int, tokens: int, repeats: int = 5) -> tuple[Timing, np.ndarray]:
    """Seconds to read ``tokens`` new tokens in each row, logits of the last one only, and these logits with
    `settled_routes`.
    """
    call = prefill_call(model, batch, tokens)
    timing = repeat(call, repeats, warm=2)
    with settled_routes(model):
        return timing, np.asarray(processes.host(call()), np.float32)


def decode_bytes(model: NemotronH, batch: int, context: int) -> int:
    """Fewest bytes that one device moves per decoded token: weights but the embedding's unread rows, states read and
    written,
    filled KV slots read.

    With few rows only the chosen experts are counted, each once a row.
    """
    config = model.config
    total = 0
    for p in model.parameters:
        size = p.bytes_per_device
        if p.path[0] == "embeddings" and not config.tie_word_embeddings:
            continue
        layer = config.layer(int(p.path[1])) if p.path[0] == "layers" else config
        if p.path[-1] in ("up", "down") and len(p.layout.shape) == 3:
            size = size * min(layer.n_routed_experts, batch * layer.num_experts_per_tok) // layer.n_routed_experts
        total += size
    shapes = model.cache_shapes(batch, context)
    for layer, spec in zip(shapes.tree.layers, shapes.specs.layers, strict=True):
        if layer is None:
            continue
        once = 1 if isinstance(layer, AttentionCache) else 2
        for leaf, leaf_spec in zip(
            jax.tree.leaves(layer), jax.tree.leaves(spec, is_leaf=lambda s: isinstance(s, P)), strict=True
        ):
            shards = math.prod(axis_size(model.mesh, name) for name in leaf_spec if name)
            total += once * bytes_of(leaf.shape, leaf.dtype) // shards
    return total


def prefill_flops(model: NemotronH, batch: int, tokens: int) -> int:
    """Operations of the matrix products and of attention on one device (the scan's are about 1 % more, not counted)."""
    config, total = model.config, 0
    for p in model.parameters:
        if p.path[0] in ("embeddings", "lm_head") or len(p.layout.shape) < 2:
            continue
        size = math.prod(p.layout.local_shape)
        if len(p.layout.shape) == 3:
            if p.path[-1] not in ("up", "down"):
                continue
            layer = config.layer(int(p.path[1]))
            size = size * layer.num_experts_per_tok // layer.n_routed_experts
        total += 2 * size * tokens
    heads = config.num_attention_heads // (model.axis.size if model.rules.q_heads else 1)
    total += config.hybrid_override_pattern.count("*") * 2 * heads * config.head_dim * tokens**2
    return total * batch // axis_size(model.mesh, DATA)
