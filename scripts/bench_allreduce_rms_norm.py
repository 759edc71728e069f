#!/usr/bin/env python3
"""Time all-reduce + residual + RMSNorm per call, every implementation against what jax does without it.

    python scripts/bench_allreduce_rms_norm.py                                     one process, all GPUs
    python scripts/launch_local.py --devices 0,0 --join -- scripts/bench_allreduce_rms_norm.py --max-blocks 66
    XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels= python scripts/bench_allreduce_rms_norm.py \\
        --label psum_nccl --variants none,psum                                          the psum through NCCL

A call is timed inside a loop on the device, each iteration using the last one's results: the time per call is the slope
between a short and a long loop, so what a program costs to start is not in it. `none` is the same loop without the
operation (an addition), `norm` with the residual add and norm but no sum over devices: their difference to the others
is what the sum costs. A loop of one call is bound by what the host needs to launch an iteration, some 10 us, and hides
differences below that; `--per-iteration 8` puts eight calls into each, as the layers of a model are. `--unrolled N`
times programs of N and 2N calls without a loop: the slope is what one more call site costs a program that is started
from the host every time.

Variants: none, norm (XLA), psum, gather, one_shot, two_shot, flags; a number behind a colon caps the blocks:
one_shot:264. Results are checked against each other before anything is timed.

What a call of one_shot is made of, by leaving parts out (for measuring alone: nothing orders the devices any more, so
the results mean nothing and are not checked): one_shot-exit does not wait for its peers at the end, one_shot-exit-entry
is not started together with them either (XLA's barrier in front of the kernel). The rows' `parts_us` are the
differences: `entry` barrier, `kernel` (reading the peers' rows, sum, norm), `exit` round.
"""

import argparse
import concurrent.futures
import faulthandler
import functools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
from pallas_kernels.allreduce_rms_norm import (  # noqa: E402
    allreduce_rms_norm,
    flags_state_specs,
    make_flags_state,
    signals,
)
from pallas_kernels.allreduce_rms_norm.one_shot import one_shot  # noqa: E402
from pallas_kernels.allreduce_rms_norm.reference import exact  # noqa: E402
from pallas_kernels.rms_norm import rows  # noqa: E402
from pallas_kernels.rms_norm.reference import add_rms_norm  # noqa: E402

EPS = 1e-5
VARIANTS = "none,norm,psum,gather,one_shot,two_shot,flags"
COMMUNICATING = ("psum", "gather", "one_shot", "two_shot", "flags")
PARTIAL = ("one_shot-exit", "one_shot-exit-entry")


def one_call(variant, partial, residual, weight, state, max_blocks):
    """One operation of the named variant: (normed, new_residual)."""
    name, _, cap = variant.partition(":")
    cap = int(cap) if cap else max_blocks
    kwargs = dict(eps=EPS, unit_offset=False, out_dtype=partial.dtype)
    if name == "none":
        return (partial + residual).astype(partial.dtype), residual
    if name == "norm":
        return add_rms_norm(partial.astype(jnp.float32), residual, weight, **kwargs)
    if name in PARTIAL:
        return without_parts(name, partial, residual, weight, cap, kwargs)
    if name == "gather":
        return exact(partial, residual, weight, axis_name="tensor", **kwargs)
    return allreduce_rms_norm(
        partial, residual, weight, axis_name="tensor", eps=EPS, implementation=name, state=state, max_blocks=cap
    )


def without_parts(name, partial, residual, weight, max_blocks, kwargs):
    """one_shot with its synchronisation left out, for the time of what is left."""
    nothing = lambda *args, **kwargs: None  # noqa: E731
    parameters = functools.partial(rows.compiler_params, skip_device_barrier=name.endswith("-entry"))
    with (
        mock.patch.object(signals.Peers, "signal_all", nothing),
        mock.patch.object(signals.Peers, "wait_all", nothing),
        mock.patch.object(rows, "compiler_params", parameters),
    ):
        # not through allreduce_rms_norm: calls that look alike share what was traced first
        return one_shot(
            partial,
            residual,
            weight,
            axis_name="tensor",
            world=lax.axis_size("tensor"),
            max_blocks=max_blocks,
            **kwargs,
        )


def parts(us):
    """Microseconds of one_shot's parts, where the variants that tell them apart have run."""
    if not {"none", "one_shot", *PARTIAL} <= us.keys():
        return {}
    no_exit, kernel = (us[name] for name in PARTIAL)
    found = {"entry": no_exit - kernel, "kernel": kernel - us["none"], "exit": us["one_shot"] - no_exit}
    return {name: round(value, 2) for name, value in found.items()}


def program(mesh, variant, calls, unrolled, state, max_blocks, per_iteration=1):
    """A jitted program of `calls` (iterations of) dependent calls; takes (partial, residual, weight, state)."""

    def body(partial, residual, weight, state):
        def step(carry):
            p, r = carry
            normed, r = one_call(variant, p, r, weight, state, max_blocks)
            if mesh.size == 1:
                return normed, r
            return (normed * (0.5 + 0.25 * lax.axis_index("tensor").astype(normed.dtype))).astype(p.dtype), r

        carry = (partial[0], residual)
        if unrolled:
            for _ in range(calls):
                carry = step(carry)
        else:

            def iteration(_, carry):
                for _ in range(per_iteration):
                    carry = step(carry)
                return carry

            carry = lax.fori_loop(0, calls, iteration, carry)
        return carry[0][None], carry[1][None]

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("tensor"), P(), P(), flags_state_specs(state)),
            out_specs=P("tensor"),
            check_vma=False,  # `norm` and `none` leave the sum out on purpose
        )
    )


def put(mesh, x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def first_local(x):
    return np.asarray(x.addressable_shards[0].data)


def seconds(call, repetitions):
    """Median and least wall-clock seconds of one run."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return float(np.median(times)), min(times)


def bench_shape(mesh, tokens, hidden, args, pool):
    dtype = jnp.dtype(args.dtype)
    rng = np.random.default_rng(0)
    world = mesh.size
    partial = put(mesh, rng.normal(size=(world, tokens, hidden)).astype(dtype), P("tensor"))
    residual = put(mesh, rng.normal(size=(tokens, hidden)).astype(dtype), P())
    weight = put(mesh, rng.uniform(0.5, 1.5, size=hidden).astype(dtype), P())
    short, long = (int(n) for n in args.loops.split(","))
    steps = (long - short) * args.per_iteration
    variants = [
        v for v in args.variants.split(",") if world > 1 or v.partition(":")[0] not in (*COMMUNICATING, *PARTIAL)
    ]
    states = {
        v: make_flags_state(mesh, "tensor", tokens, hidden, dtype, int(v.partition(":")[2] or 0) or args.max_blocks)
        for v in variants
        if v.startswith("flags") and world > 1
    }
    jobs = {}
    lengths = [(1, True), (short, False), (long, False)] + (
        [(args.unrolled, True), (2 * args.unrolled, True)] if args.unrolled else []
    )
    for v in variants:
        for calls, unrolled in lengths:
            try:
                lowered = program(mesh, v, calls, unrolled, states.get(v), args.max_blocks, args.per_iteration).lower(
                    partial, residual, weight, states.get(v)
                )
                jobs[v, calls, unrolled] = pool.submit(lowered.compile)
            except Exception as error:
                jobs[v, calls, unrolled] = error
    row = dict(
        world=world,
        tokens=tokens,
        hidden=hidden,
        dtype=str(dtype),
        per_iteration=args.per_iteration,
        us={},
        us_min={},
        unrolled_us={},
        notes={},
    )
    expected = None
    for v in variants:
        try:
            runs = {}
            for calls, unrolled in lengths:
                job = jobs[v, calls, unrolled]
                if isinstance(job, Exception):
                    raise job
                compiled = job.result()
                runs[calls, unrolled] = lambda c=compiled, v=v: c(partial, residual, weight, states.get(v))
            if v.partition(":")[0] in COMMUNICATING:
                got = [first_local(x).astype(np.float32) for x in runs[1, True]()]
                if expected is None:
                    expected = got
                for name, a, b in zip(("normed", "residual"), got, expected, strict=True):
                    error = np.linalg.norm(a - b) / np.linalg.norm(b)
                    if not error < 1e-2:
                        raise AssertionError(f"{name} is off by {error:.2g} (relative rms) from the first variant's")
            fast, slow = seconds(runs[short, False], args.repetitions), seconds(runs[long, False], args.repetitions)
            row["us"][v] = round((slow[0] - fast[0]) / steps * 1e6, 2)
            row["us_min"][v] = round((slow[1] - fast[1]) / steps * 1e6, 2)
            if args.unrolled:
                fewer = seconds(runs[args.unrolled, True], args.repetitions)[0]
                more = seconds(runs[2 * args.unrolled, True], args.repetitions)[0]
                row["unrolled_us"][v] = round((more - fewer) / args.unrolled * 1e6, 2)
        except Exception as error:
            row["notes"][v] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    if found := parts(row["us"]):
        row["parts_us"] = found
    return row


def machine():
    def shell(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    return dict(
        devices=[d.device_kind for d in jax.devices()],
        processes=jax.process_count(),
        jax=jax.__version__,
        python=platform.python_version(),
        driver=shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        command=" ".join(sys.argv),
    )


def key_figure(rows):
    """The two best of each shape, in words."""
    best = [(row, sorted((us, v) for v, us in row["us"].items() if v in COMMUNICATING)[:2]) for row in rows]
    named = [f"{row['tokens']}: " + " ".join(f"{v} {us:.1f}" for us, v in found) for row, found in best]
    return f"x {rows[0]['hidden']}, us: " + ", ".join(named)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,64,512,2048")
    parser.add_argument("--hidden", default="2688,4096,8192")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--loops", default="20,120", help="the two loop lengths")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--per-iteration", type=int, default=1, help="calls in one iteration of the loop")
    parser.add_argument(
        "--unrolled", type=int, default=0, help="also time programs of so many calls, and twice as many"
    )
    parser.add_argument("--max-blocks", type=int, help="block cap of the kernels; 132 // ranks when ranks share a GPU")
    parser.add_argument("--max-bytes", type=int, help="leave out larger messages")
    parser.add_argument("--world", type=int, help="use the first so many devices")
    parser.add_argument("--label", default="default")
    parser.add_argument("--watchdog", type=float, default=500.0, help="seconds after which a hanging run is ended")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.watchdog, exit=True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: args.world]), ("tensor",))
    shapes = [(int(t), int(h)) for h in args.hidden.split(",") for t in args.tokens.split(",")]
    shapes = [s for s in shapes if not args.max_bytes or s[0] * s[1] * jnp.dtype(args.dtype).itemsize <= args.max_bytes]
    report = dict(label=args.label, machine=machine(), rows=[])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for tokens, hidden in shapes:
            row = bench_shape(mesh, tokens, hidden, args, pool)
            report["rows"].append(row)
            if jax.process_index() == 0:
                times = "  ".join(f"{v} {us:.1f}" for v, us in row["us"].items())
                unrolled = "  ".join(f"{v} {us:.1f}" for v, us in row["unrolled_us"].items())
                print(f"{tokens} x {hidden}: {times}" + (f"\n    unrolled: {unrolled}" if unrolled else ""), flush=True)
                if "parts_us" in row:
                    print("    one_shot: " + ", ".join(f"{k} {us}" for k, us in row["parts_us"].items()), flush=True)
                for v, note in row["notes"].items():
                    print(f"    {v}: {note}", flush=True)
            if args.out and jax.process_index() == 0:
                report["key"] = key_figure(report["rows"])
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
