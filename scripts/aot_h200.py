#!/usr/bin/env python3
"""What N H200 would run, without one: collectives, kernels and bytes of full-size programs, as a Markdown table.

    python scripts/aot_h200.py --presets nemotron-h-8b nemotron-h-47b --degrees 2 4 8 --plans none all/flags
    python scripts/aot_h200.py                       # every preset at tensor parallel 8, plans none and all/flags

Programs are lowered for CUDA, which takes seconds; --compile compiles them, which takes a minute each and also gives
the memory of temporaries. It needs jax's CUDA plugin, no driver:
pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt (of this jax's version) nvidia-cuda-nvcc nvidia-nvvm
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemotron_jax import NemotronH, NemotronHConfig  # noqa: E402
from nemotron_jax.inspection import fits, inspect  # noqa: E402
from nemotron_jax.presets import PRESETS  # noqa: E402
from nemotron_jax.targets import DEVICES, absent, can_compile, without_gpus  # noqa: E402

HEAD = (
    "| preset | tensor | plan | all-reduce | all-gather | kernels | promised | exchanged KB | weights GB | cache MB | "
    "temp MB | fits | predicted ms |"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS), metavar="NAME")
    parser.add_argument("--degrees", nargs="+", type=int, default=[8], metavar="N")
    parser.add_argument("--plans", nargs="+", default=["none", "all/flags"], metavar="PLAN")
    parser.add_argument("--device", choices=list(DEVICES), default="h200")
    parser.add_argument("--tokens", type=int, default=1, help="new tokens per row")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.compile and not can_compile():
        parser.error("--compile: no CUDA plugin is installed (see --help)")
    without_gpus()
    target = absent(args.device, max(args.degrees), compile=args.compile)
    print(HEAD)
    print("|" + "---|" * (HEAD.count("|") - 1), flush=True)
    kept = True
    for name in args.presets:
        for degree in args.degrees:
            for plan in args.plans:
                begin = time.perf_counter()
                try:
                    kept &= row(args, target, name, degree, plan)
                except ValueError as error:
                    print(f"| {name} | {degree} | `{plan}` | refused: {error} |", flush=True)
                print(f"{name} x {degree} {plan}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    return 0 if kept else 1


def row(args: argparse.Namespace, target, name: str, degree: int, plan: str) -> bool:
    """Print one line; whether the program holds what the plan promises."""
    config = NemotronHConfig.preset(name)
    model = NemotronH(config, mesh=target.mesh(degree), dtype=args.dtype, fusion=plan)
    report = inspect(
        model, batch=args.batch, tokens=args.tokens, context=args.context, target=target, compile=args.compile
    )
    ops, cache = report["collectives"], sum(report["cache_bytes_per_device"].values())
    kept = ops == report["promised"]
    cells = [
        name,
        str(degree),
        f"`{plan}`",
        str(ops.get("all-reduce", 0)),
        str(ops.get("all-gather", 0)),
        str(sum(report["kernels"].values())),
        "yes" if kept else f"NO: {report['promised']}",
        f"{sum(report['collective_bytes'].values()) / 1e3:.1f}",
        f"{report['bytes_per_device'] / 1e9:.2f}",
        f"{cache / 1e6:.1f}",
        f"{report['memory']['temp'] / 1e6:.1f}" if report["memory"] else "",
        "yes" if fits(report["bytes_per_device"], cache, target.device) else "no",
        f"{report['predicted_on_h200']['ms']:.2f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)
    return kept


if __name__ == "__main__":
    sys.exit(main())
