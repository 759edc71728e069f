#!/usr/bin/env python3
"""Where a decode step's or a prefill's time goes: every kernel that the device ran, by name, from JAX's profiler.

    python scripts/kernel_times.py decode nemotron-h-8b --kernels none auto
    python scripts/kernel_times.py prefill nemotron-h-8b --tokens 8192 --kernels chunk_scan

Runs the programs that `nemotron-jax bench` times, with random weights, on one device or with --tensor-parallel on
several (times are then those of the first). Kernels that differ in a number alone are taken together. The profiler
slows the host down: what the device waits for is told by the difference to the time that `bench` measures.
"""

import argparse
import collections
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def kernels(folder: Path) -> list[tuple[str, float]]:
    """Name and microseconds of everything that the first device ran; on a CPU, of XLA's operations."""
    from jax.profiler import ProfileData

    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = {plane.name: plane for plane in ProfileData.from_file(str(file)).planes}
    plane = planes.get("/device:GPU:0")
    found = []
    for line in (plane or planes["/host:CPU"]).lines:
        # derived lines show the same time once more, by module and by source
        if plane is None or line.name.startswith("Stream"):
            for event in line.events:
                if plane is not None or "hlo_op" in dict(event.stats):
                    found.append((event.name, event.duration_ns / 1e3))
    return found


def by_name(found: list[tuple[str, float]], runs: int) -> list[dict]:
    """Rows (kernel, calls a run, microseconds a call and a run), the dearest first, with the names taken together."""
    times: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, us in found:
        times[re.sub(r"[._]?\d+(?=_|\.|$)", "", name)][name].append(us)
    rows = []
    for name, each in times.items():
        calls, us = sum(map(len, each.values())), sum(map(sum, each.values()))
        means = {one: round(sum(values) / len(values), 2) for one, values in each.items()}
        rows.append({"kernel": name, "calls": calls / runs, "us_per_call": us / calls, "us": us / runs, "each": means})
    return sorted(rows, key=lambda row: -row["us"])


def trace(call, runs: int) -> list[dict]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        return by_name(kernels(Path(folder)), runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("model", help="preset or folder; weights are random")
    parser.add_argument("--kernels", nargs="+", default=["none"], metavar="KERNELS", help="settings of PALLAS_KERNELS")
    parser.add_argument("--plans", nargs="+", default=["none"], metavar="PLAN")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--layers", type=int, help="only the first N blocks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048, help="decode: tokens before")
    parser.add_argument("--tokens", type=int, default=8192, help="prefill: new tokens")
    parser.add_argument("--steps", type=int, default=16, help="decode: steps in the trace")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="kernels to print")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all of them as JSON")
    args = parser.parse_args()
    numbers = {name: getattr(args, name) for name in ("layers", "batch", "context", "tokens", "steps", "top")}
    if bad := [name for name, value in numbers.items() if value is not None and value < 1]:
        parser.error(f"--{bad[0]}: found {numbers[bad[0]]}, accepted 1 or more")

    import jax
    import jax.numpy as jnp

    from nemotron_jax import NemotronH, make_mesh, timing
    from nemotron_jax.experiments.execute import first_layers
    from nemotron_jax.fusion import parse_plan
    from nemotron_jax.inspection import read_config
    from pallas_kernels import selection

    try:
        for setting in args.kernels:
            selection.parse(setting, "--kernels")
        config = first_layers(read_config(args.model)[1], args.layers or 0)
        for plan in args.plans:
            parse_plan(plan, config.hybrid_override_pattern)
        jnp.dtype(args.dtype)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    model = NemotronH(config, mesh=make_mesh(args.tensor_parallel), dtype=args.dtype, rngs=0)
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "command": " ".join(sys.argv[1:])}
    runs: list[dict] = []
    for plan, setting in itertools.product(args.plans, args.kernels):
        model.fusion = plan
        with selection.use(setting):
            if args.what == "decode":
                program, _ = timing.decode_program(
                    model, args.batch, args.context, args.steps, args.context + args.steps
                )
                call, steps = program(args.steps), args.steps
            else:
                call, steps = timing.prefill_call(model, args.batch, args.tokens), 1
            for _ in range(2):
                call()
            rows = trace(call, steps)
        busy = sum(row["us"] for row in rows)
        runs.append({"plan": plan, "kernels": setting, "busy_us": busy, "rows": rows})
        print(f"plan {plan}, kernels {setting}: {busy:.1f} us of kernels, {sum(r['calls'] for r in rows):.0f} of them")
        for row in rows[: args.top]:
            print(f"  {row['us']:10.1f} us  {row['calls']:7.1f} x {row['us_per_call']:8.2f}  {row['kernel'][:90]}")
        sys.stdout.flush()
        if args.out:
            key = ", ".join(f"{r['plan']} {r['kernels']}: {r['busy_us']:.0f} us busy" for r in runs)
            args.out.write_text(json.dumps({"key": key, **result, "profiles": runs}, indent=1) + "\n")
        del call
    return 0


if __name__ == "__main__":
    sys.exit(main())
