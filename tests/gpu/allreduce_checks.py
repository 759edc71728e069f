"""Checks of allreduce_rms_norm on real GPUs. They run under pytest (one process for all GPUs,
test_allreduce_rms_norm.py) and as a program of several processes:

    python scripts/launch_local.py --devices 0,0 --join -- tests/gpu/allreduce_checks.py --max-blocks 66

Each check raises AssertionError, and returns the number of comparisons that it made.
"""

import argparse
import faulthandler
import functools
import itertools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))
from pallas_kernels.allreduce_rms_norm import (  # noqa: E402
    allreduce_rms_norm,
    flags_state_specs,
    make_flags_state,
    unreachable_reason,
)
from pallas_kernels.allreduce_rms_norm.flags_state import table_words  # noqa: E402
from pallas_kernels.allreduce_rms_norm.probe import nccl_version  # noqa: E402
from tests.pallas_kernels import allreduce_cases as cases  # noqa: E402

EXACT = ("reference", "gather", "one_shot", "two_shot", "flags")


def world_mesh(world=None):
    devices = jax.devices()[:world]
    return jax.sharding.Mesh(np.array(devices), ("tensor",))


def put(mesh, x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def local(x):
    """What this process holds of an array whose first dimension is one entry per device, stacked."""
    return np.concatenate(
        [np.asarray(s.data) for s in sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)]
    )


def operation(mesh, implementation, state=None, max_blocks=None, body=None):
    """A jitted function (partial [world, tokens, hidden], residual, weight, state) -> per-device results."""

    def call(partial, residual, weight, state):
        return allreduce_rms_norm(
            partial,
            residual,
            weight,
            axis_name="tensor",
            eps=cases.EPS,
            implementation=implementation,
            state=state,
            max_blocks=max_blocks,
        )

    def default(op, partial, residual, weight):
        return op(partial, residual)

    def mapped(partial, residual, weight, state):
        op = lambda p, r: call(p, r, weight, state)  # noqa: E731
        outs = (body or default)(op, partial[0], residual, weight)
        return jax.tree.map(lambda out: _per_device(out), outs)

    return jax.jit(
        jax.shard_map(
            mapped,
            mesh=mesh,
            in_specs=(P("tensor"), P(), P(), flags_state_specs(state)),
            out_specs=P("tensor"),
        )
    )


def _per_device(x):
    missing = () if "tensor" in jax.typeof(x).manual_axis_type.varying else ("tensor",)
    return (lax.pcast(x, missing, to="varying") if missing else x)[None]


def state_for(mesh, implementation, tokens, hidden, dtype, max_blocks):
    if implementation != "flags":
        return None
    return make_flags_state(mesh, "tensor", max(tokens, 1), hidden, dtype, max_blocks)


def check_values(
    mesh, implementation, tokens, hidden, *, dtype="bfloat16", residual="bfloat16", max_blocks=None, seed=0
):
    """One call on fresh random data against the oracles, and on payloads that have broken such kernels elsewhere."""
    world = mesh.size
    case = cases.problem(seed, world, tokens, hidden, dtype=dtype, residual=residual)
    if tokens > 1:  # -0.0, subnormals, one huge channel, a row of zeros, cancellation of large values
        kind = cases.NUMPY[dtype]
        case.partial[:, 0, :8] = kind(-0.0)
        case.residual[0, :8] = cases.NUMPY[residual](-0.0)
        case.partial[:, 0, 8:16] = kind(-1e-39 if dtype != "float16" else -3e-7)
        case.partial[:, 0, 16] = kind(75000.0 if dtype != "float16" else 50000.0 / world)
        case.partial[:, 1] = case.residual[1] = 0
        big = kind(3e38 if dtype != "float16" else 6e4) / kind(4)
        case.partial[0, 0, 17], case.partial[1, 0, 17] = big, -big
    state = state_for(mesh, implementation, tokens, hidden, dtype, max_blocks)
    call = operation(mesh, implementation, state, max_blocks)
    args = put(mesh, case.partial, P("tensor")), put(mesh, case.residual, P()), put(mesh, case.weight, P())
    normed, new_residual = (local(x) for x in call(*args, state))
    shown = cases.Problem(np.repeat(case.partial[:1], len(normed), 0), case.residual, case.weight)
    object.__setattr__(shown, "total_float32", case.total_float32)  # the sum is over all ranks, the devices are ours
    cases.check(shown, normed, new_residual, exact=implementation in EXACT)
    return 1


def check_infinities(mesh, implementation, max_blocks=None):
    """Infinities and NaN go where they belong, and nowhere else."""
    case = cases.problem(5, mesh.size, 4, 4096)
    case.partial[0, 1, 3] = np.inf
    case.partial[1, 2, 5] = np.nan
    state = state_for(mesh, implementation, 4, 4096, "bfloat16", max_blocks)
    call = operation(mesh, implementation, state, max_blocks)
    args = put(mesh, case.partial, P("tensor")), put(mesh, case.residual, P()), put(mesh, case.weight, P())
    normed, new_residual = (local(x)[0].astype(np.float32) for x in call(*args, state))
    want = case.new_residual().astype(np.float32)
    assert (np.isnan(new_residual) == np.isnan(want)).all() and np.isnan(want).sum() == 1
    assert (np.isinf(new_residual) == np.isinf(want)).all() and np.isinf(want).sum() == 1
    assert np.isfinite(normed[[0, 3]]).all()
    assert np.isnan(normed[1, 3]) and (normed[1, :3] == 0).all() and np.isnan(normed[2]).all()
    return 1


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)


def check_repeats(mesh, implementation, tokens, hidden, *, repeats=100, dtype="bfloat16", max_blocks=None):
    """The same input again and again gives the same bits: catches races that move the result by a rounding or by per
    cent. All calls are one call site of a loop: plain JAX compiled at two places may round differently at each."""

    def body(op, partial, residual, weight):
        def again(i, carry):
            bad, first = carry
            # The barrier ties the call to the iteration; without it the compiler takes it out of the loop.
            p, r, _ = lax.optimization_barrier((partial, residual, bad))
            found = op(p, r)
            first = tuple(jnp.where(i == 0, a, b) for a, b in zip(found, first, strict=True))
            return bad + sum((_bits(a) != _bits(b)).sum() for a, b in zip(found, first, strict=True)), first

        nothing = jnp.zeros_like(residual)
        bad, first = lax.fori_loop(0, repeats, again, (jnp.int32(0), (nothing, nothing)))
        return bad, *first

    state = state_for(mesh, implementation, tokens, hidden, dtype, max_blocks)
    case = cases.problem(1, mesh.size, tokens, hidden, dtype=dtype, residual=dtype)
    args = put(mesh, case.partial, P("tensor")), put(mesh, case.residual, P()), put(mesh, case.weight, P())
    bad, normed, new_residual = operation(mesh, implementation, state, max_blocks, body)(*args, state)
    bad = local(bad)
    assert (bad == 0).all(), f"{implementation} {tokens} x {hidden}: {bad} elements changed in {repeats} repeats"
    if state is not None:
        counts = local(state.control)[:, table_words(mesh.size) :]
        used = counts[:, : min(tokens, state.blocks)]
        assert (used == repeats).all(), f"calls were lost or the state was copied: {counts}"
    return repeats


def check_stress(mesh, implementation, tokens, hidden, *, calls=10_000, delays=False, max_blocks=None):
    """Back-to-back calls whose data changes every time, each checked on the device; optionally with random delays per
    rank.

    The data are small integers, so every sum is exact and every device can work out what its peers have sent.
    """
    world = mesh.size

    def numbers(i, who):
        row = lax.broadcasted_iota(jnp.int32, (tokens, hidden), 0)
        column = lax.broadcasted_iota(jnp.int32, (tokens, hidden), 1)
        mixed = (row * 31 + column * 17 + i * 7 + who * 11) * 40503
        return ((mixed >> 7) % 29 - 14).astype(jnp.bfloat16)

    def body(op, partial, residual, weight):
        del partial, residual
        rank = lax.axis_index("tensor")

        def one(i, bad):
            mine = numbers(i, rank)
            if delays:
                rounds = ((i * 7919 + rank * 104729) * 40503 >> 9) % 6
                late = lax.fori_loop(0, rounds, lambda _, x: jnp.sin(x) + 1, jnp.float32(i))
                mine = jnp.where(late > 1e9, jnp.bfloat16(0), mine)
            old = numbers(i, 77)
            total = sum(numbers(i, who).astype(jnp.float32) for who in range(world)) + old.astype(jnp.float32)
            rstd = lax.rsqrt(jnp.mean(total * total, -1, keepdims=True) + cases.EPS)
            want = total * rstd * weight.astype(jnp.float32)
            normed, new_residual = op(mine, old)
            wrong = (new_residual.astype(jnp.float32) != total).sum()
            # ~(<=) counts NaN as wrong
            wrong += (~(jnp.abs(normed.astype(jnp.float32) - want) <= jnp.abs(want) * 2.0**-7)).sum()
            return bad + wrong

        bad = lax.pcast(jnp.int32(0), "tensor", to="varying") if delays else jnp.int32(0)
        return lax.fori_loop(0, calls, one, bad)

    state = state_for(mesh, implementation, tokens, hidden, "bfloat16", max_blocks)
    case = cases.problem(2, world, tokens, hidden)
    args = put(mesh, case.partial, P("tensor")), put(mesh, case.residual, P()), put(mesh, case.weight, P())
    bad = local(operation(mesh, implementation, state, max_blocks, body)(*args, state))
    assert (bad == 0).all(), f"{implementation} {tokens} x {hidden}: {bad} wrong elements in {calls} calls"
    return calls


def check_changing_tokens(mesh, implementation, *, hidden=2688, rounds=3, max_blocks=None):
    """Token counts that grow and shrink, several executables in turn on one state, dispatched without waiting."""
    counts = (1, 8, 300, 0, 133, 4096, 3)
    state = state_for(mesh, implementation, 4096, hidden, "bfloat16", max_blocks)
    call = operation(mesh, implementation, state, max_blocks)
    problems = {n: cases.problem(100 + n, mesh.size, n, hidden) for n in counts}
    args = {
        n: (put(mesh, c.partial, P("tensor")), put(mesh, c.residual, P()), put(mesh, c.weight, P()))
        for n, c in problems.items()
    }
    results = [(n, call(*args[n], state)) for n in counts * rounds]
    first = {}
    for n, (normed, new_residual) in results:
        normed, new_residual = local(normed), local(new_residual)
        if n not in first:
            first[n] = cases.bits(problems[n].new_residual()), cases.bits(normed[0])
        for device in range(len(normed)):
            assert (cases.bits(new_residual[device]) == first[n][0]).all(), f"{implementation}: {n} tokens are wrong"
            assert (cases.bits(normed[device]) == first[n][1]).all(), f"{implementation}: {n} tokens change"
    return len(results)


def check_poisoned(mesh, implementation, max_blocks=None, repeats=200):
    """The partial's memory is overwritten right after the call, while a slower peer may still want it; skewed on
    purpose."""
    tokens, hidden = 256, 4096

    def body(op, partial, residual, weight):
        rank = lax.axis_index("tensor")
        first = op(partial, residual)

        def again(i, carry):
            bad, waste = carry
            p = jnp.where(waste > 1e30, jnp.bfloat16(0), partial)  # a fresh buffer, dead after the call
            out = op(p, residual)
            # Work of different length per rank after the call; whatever it allocates may land on the dead buffer.
            length = 1 + (rank + i) % 3
            poison = lax.fori_loop(0, length, lambda _, x: x * jnp.bfloat16(1.5) + jnp.bfloat16(jnp.nan), out[0])
            bad = bad + sum((_bits(a) != _bits(b)).sum() for a, b in zip(out, first, strict=True))
            return bad, jnp.where(jnp.isnan(poison[0, 0]), waste, waste + 1)

        zero = lax.pcast(jnp.int32(0), "tensor", to="varying"), lax.pcast(jnp.float32(0), "tensor", to="varying")
        return lax.fori_loop(0, repeats, again, zero)[0]

    state = state_for(mesh, implementation, tokens, hidden, "bfloat16", max_blocks)
    case = cases.problem(3, mesh.size, tokens, hidden)
    args = put(mesh, case.partial, P("tensor")), put(mesh, case.residual, P()), put(mesh, case.weight, P())
    bad = local(operation(mesh, implementation, state, max_blocks, body)(*args, state))
    assert (bad == 0).all(), f"{implementation}: {bad} elements differ after poisoning"
    return repeats


def plan(implementations, tokens, hiddens, max_blocks, quick):
    """The checks to run, as (label, function of a mesh)."""
    use = functools.partial
    for name in implementations:
        for t, h in itertools.product(tokens, hiddens):
            yield f"{name} values {t} x {h}", use(check_values, implementation=name, tokens=t, hidden=h)
        for dtype, residual in (("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")):
            yield (
                f"{name} values {dtype} + {residual}",
                use(check_values, implementation=name, tokens=9, hidden=3136, dtype=dtype, residual=residual),
            )
        yield f"{name} infinities", use(check_infinities, implementation=name)
        for t, h in ((1, 4096), (64, 4096), (300, 2688), (8, 8192)):
            yield f"{name} repeats {t} x {h}", use(check_repeats, implementation=name, tokens=t, hidden=h)
        for t, h in ((1, 4096),) if quick else ((1, 4096), (140, 2688)):
            yield f"{name} stress {t} x {h}", use(check_stress, implementation=name, tokens=t, hidden=h)
        yield (
            f"{name} stress with delays",
            use(check_stress, implementation=name, tokens=3, hidden=4096, calls=300, delays=True),
        )
        yield f"{name} poisoned", use(check_poisoned, implementation=name)
        yield f"{name} changing tokens", use(check_changing_tokens, implementation=name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--implementations", default="gather,one_shot,two_shot,flags")
    parser.add_argument("--tokens", default="0,1,3,133")
    parser.add_argument("--hidden", default="192,3136,8192")
    parser.add_argument("--max-blocks", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--match", default="", help="only the checks whose label holds this")
    parser.add_argument("--watchdog", type=float, default=240)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.watchdog, exit=True)
    mesh = world_mesh(args.world)
    reason = unreachable_reason(mesh)
    print(f"NCCL {nccl_version()}, peers' memory: {reason or 'reachable'}", flush=True)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    names = args.implementations.split(",")
    if jax.process_count() > 1 and "flags" in names:
        names.remove("flags")
        print("flags left out: it needs one process for all devices", flush=True)
    failures, compared, started = [], 0, time.time()
    slow = []
    for label, check in plan(names, numbers(args.tokens), numbers(args.hidden), args.max_blocks, args.quick):
        if args.match not in label:
            continue
        begin = time.time()
        print(f"{begin - started:6.1f} s  {label}", flush=True)  # the last line tells a hang from slowness
        try:
            compared += check(mesh, max_blocks=args.max_blocks)
        except Exception as error:
            failures.append(label)
            print(f"FAIL {label}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        slow.append((time.time() - begin, label))
    print("slowest:", "; ".join(f"{label} {seconds:.1f} s" for seconds, label in sorted(slow)[-4:]))
    print(
        f"{len(slow) - len(failures)} of {len(slow)} checks passed on {mesh.size} x {jax.devices()[0].device_kind}, "
        f"{compared} calls compared, {time.time() - started:.0f} s, jax {jax.__version__}",
        flush=True,
    )
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
