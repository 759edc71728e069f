"""Timings after a correctness check: ``decode`` and ``prefill`` of a model with random weights of real shapes, or of
a checkpoint; ``kernels``: the operations of its blocks one by one, in each implementation, on one device.

The time per token is the slope over two lengths of the generator's own device loop. Each plan's logits are first
compared with those of the unfused plan; a plan that differs gets no time. Plans that come to the same at every boundary
are one program, which is timed once.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

from nemotron_jax.cli import DONE, FAILED, add_model_arguments, build_mesh, device_names, positive, print_json
from nemotron_jax.files import named

# Two equally valid orders of rounding in bfloat16 differ by a few per cent after some fifty layers.
AGREE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("decode", "prefill", "kernels"))
    parser.add_argument("model", nargs="?", help="preset, folder or hub id (default: the shipped model)")
    add_model_arguments(parser)
    parser.add_argument(
        "--plans", nargs="+", metavar="PLAN", help="fusion plans to time side by side (default: --fusion)"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["auto"],
        metavar="KERNELS",
        help="settings of PALLAS_KERNELS to time side by side: none, or names with commas, auto among them (default: "
        "auto); none always comes first, since it is what the others are checked by",
    )
    parser.add_argument(
        "--skip-plain",
        action="store_true",
        help="leave out the row of plain JAX that nobody asked for; the others are checked by the first one",
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], metavar="N")
    parser.add_argument(
        "--context", type=positive, nargs="+", metavar="N", help="decode: tokens before (default: 2048)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="prefill: new tokens (default: 8192); kernels: a prefill's operations at so many tokens too",
    )
    parser.add_argument(
        "--steps", type=positive, nargs=2, default=[32, 160], metavar="N", help="the loop's two lengths"
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="only the first N blocks of a preset")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the copy and matrix product rates")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object there")


def run(args: argparse.Namespace) -> int:
    short, long = args.steps
    if long <= short or long % short:
        raise ValueError(
            f"--steps: found {short} {long}, accepted two numbers, the second a larger multiple of the first"
        )
    unused = {"decode": "tokens", "prefill": "context", "kernels": "context"}[args.what]
    if getattr(args, unused):
        raise ValueError(f"--{unused}: found it with {args.what}, which does not use it")
    from pallas_kernels import selection

    for setting in args.kernels:
        selection.parse(setting, "--kernels")
    mesh = build_mesh(args)
    import jax
    import numpy as np

    from nemotron_jax import timing

    result: dict = {
        "what": args.what,
        "devices": device_names(mesh),
        "versions": {"jax": jax.__version__},
        "command": " ".join(sys.argv[1:]),
        "rows": [],
    }
    copy = matmul = None
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    if not args.no_ceilings and on_gpu:
        copy, matmul = timing.copy_rate(), timing.matmul_rate()
        result |= {"copy_bytes_per_second": copy, "matmul_flops_per_second": matmul}
    if args.what == "kernels":
        return _kernels(args, mesh, result)
    begin = time.perf_counter()
    model = _model(args, mesh)
    jax.block_until_ready(model.weights)
    result["setup_seconds"] = round(time.perf_counter() - begin, 1)
    ok = True
    plain = [] if args.skip_plain else [("none", "none")]
    for batch in args.batch:
        for size in args.context or [2048] if args.what == "decode" else args.tokens or [8192]:
            expected, timed = None, {}
            reference = ""  # the row that the others are checked by
            plans = ["none", *(args.plans or [args.fusion])] if model.axis.size > 1 else ["none"]
            for plan, kernels in dict.fromkeys([*plain, *itertools.product(plans, args.kernels)]):
                model.fusion = plan
                resolved = model.plan(batch, *((1, args.steps[0]) if args.what == "decode" else (size,)))
                where = {
                    "model": str(args.model or "shipped"),
                    "tensor": model.axis.size,
                    "batch": batch,
                    "context" if args.what == "decode" else "tokens": size,
                    "plan": plan,
                    "kernels": kernels,
                    "ran": resolved.letters,
                }
                begin = time.perf_counter()
                program = (resolved.letters, kernels if on_gpu else "none")
                if program not in timed:
                    try:
                        with selection.use(kernels):
                            if args.what == "decode":
                                timed[program] = timing.decode(model, batch, size, tuple(args.steps), args.repeats)
                            else:
                                timed[program] = timing.prefill(model, batch, size, args.repeats)
                    except Exception as error:
                        if not timed:
                            raise
                        ok = False  # the others may run all the same
                        row = {**where, "ms": None, "problem": f"{type(error).__name__}: {error}"[:2000]}
                        result["rows"].append(row)
                        print(f"{plan}, kernels {kernels}: {row['problem']}", file=sys.stderr, flush=True)
                        _keep(args, result)
                        continue
                found, logits = timed[program]
                if args.what == "decode":
                    floor = timing.decode_bytes(model, batch, size) / timing.HBM_BYTES_PER_SECOND
                    ceiling = copy and timing.decode_bytes(model, batch, size) / copy
                else:
                    flops = timing.prefill_flops(model, batch, size)
                    floor, ceiling = flops / timing.FLOPS_PER_SECOND, matmul and flops / matmul
                if expected is None:
                    expected, reference = logits, f"plan {plan}, kernels {kernels}"
                error = float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))
                agrees = bool(np.isfinite(logits).all() and error <= AGREE[str(model.dtype)])
                ok &= agrees
                row = {
                    **where,
                    "reference": reference,
                    "relative_rms": error,
                    "ms": found.median * 1e3 if agrees else None,
                    "ms_low": found.low * 1e3,
                    "ms_high": found.high * 1e3,
                    "share_of_floor": floor / found.median,
                    "share_of_ceiling": ceiling / found.median if ceiling else None,
                    "wall_seconds": round(time.perf_counter() - begin, 1),
                    "peak_bytes": _peak(mesh),
                }
                result["rows"].append(row)
                print(_line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
                _keep(args, result)
    if args.json:
        print_json(result)
    return DONE if ok else FAILED


def _keep(args: argparse.Namespace, result: dict) -> None:
    """Write what there is, after each row: a run that is cut short has told what it knew."""
    if args.out:
        with named(args.out, "a file for the results, on a disk that has room"):
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def _kernels(args: argparse.Namespace, mesh, result: dict) -> int:
    if mesh.size > 1:
        raise ValueError(f"bench kernels: found a mesh of {mesh.size} devices, accepted one")
    from nemotron_jax import kernel_timing, kernel_timing_prefill
    from nemotron_jax.inspection import read_config

    _, config = read_config(args.model)
    dtype = args.dtype or config.dtype
    for rows in args.batch:
        prefill = [kernel_timing_prefill.operations(config, rows, n, dtype) for n in args.tokens or ()]
        for operation in itertools.chain(kernel_timing.operations(config, rows, dtype), *prefill):
            for row in kernel_timing.measure(operation, dtype, tuple(args.steps), args.repeats):
                result["rows"].append(row)
                ms, name = row["ms"], f"{row['operation']} {row['shape']} {row['implementation']}"
                text = row["problem"] if ms is None else f"{ms * 1e3:.1f} us, {row['share_of_floor']:.0%} of the floor"
                print(f"{name}: {text}", file=sys.stderr if args.json else sys.stdout, flush=True)
                _keep(args, result)
    if args.json:
        print_json(result)
    return FAILED if any("differs" in row.get("problem", "") for row in result["rows"]) else DONE


def _peak(mesh) -> int | None:
    """Most bytes of one device that were in use so far, where the device tells."""
    stats = next((d.memory_stats() for d in mesh.local_devices), None) or {}
    return stats.get("peak_bytes_in_use")


def _line(row: dict) -> str:
    size = row.get("context", row.get("tokens"))
    ms = "wrong" if row["ms"] is None else f"{row['ms']:.3f} ms ({row['ms_low']:.3f}..{row['ms_high']:.3f})"
    ceiling = "" if row["share_of_ceiling"] is None else f", {row['share_of_ceiling']:.0%} of this machine's own rate"
    return (
        f"{row['model']} tp {row['tensor']} batch {row['batch']} at {size}, plan {row['plan']}, "
        f"kernels {row['kernels']}: {ms}, "
        f"{row['share_of_floor']:.0%} of the floor{ceiling}; "
        f"differs from {row['reference']} by {row['relative_rms']:.1e}"
    )


def _model(args: argparse.Namespace, mesh):
    from nemotron_jax import NemotronH, NemotronHConfig, load
    from nemotron_jax.config import PRESETS

    if args.model not in PRESETS and args.layers:
        raise ValueError(f"--layers: found it with {args.model or 'the shipped model'}, accepted with a preset alone")
    if args.model not in PRESETS:
        return load(args.model, mesh=mesh, dtype=args.dtype, conversion_cache=args.conversion_cache)
    config = NemotronHConfig.preset(args.model)
    if args.layers:
        pattern = config.hybrid_override_pattern[: args.layers]
        config = dataclasses.replace(
            config, hybrid_override_pattern=pattern, block_configs=config.block_configs[: args.layers]
        )
    return NemotronH(config, mesh=mesh, dtype=args.dtype, rngs=args.seed)
