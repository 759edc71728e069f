#!/usr/bin/env python3
"""Predicted times beside measured ones, as a Markdown table with the error of each.

    python scripts/prediction_error.py benchmarks/decode/*_b1.json  # what `nemotron-jax bench ... --out` wrote
    python scripts/prediction_error.py out/results.json             # what `nemotron-jax experiment` wrote

The prediction is nemotron_jax/experiments/predict.py with its numbers for the H200. No GPU is needed.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemotron_jax import NemotronH  # noqa: E402
from nemotron_jax.experiments.predict import predict  # noqa: E402
from nemotron_jax.inspection import read_config  # noqa: E402
from nemotron_jax.step import plan_for  # noqa: E402
from nemotron_jax.targets import absent, without_gpus  # noqa: E402


def rows(path: Path) -> list[dict]:
    """What either kind of file measured on H200: model, tensor, data, plan, asked, what, batch, size, dtype, ms."""
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise ValueError("holds no JSON object")
    if isinstance(held.get("runs"), list):
        return [
            {k: r[k] for k in ("model", "tensor", "data", "what", "batch", "dtype", "ms")}
            | {"plan": "layers:" + r["letters"], "asked": r["plan"], "size": r["tokens"], "kernels": ""}
            for r in held["runs"]
            if r.get("ms") and "H200" in r["ran_on"]["device_kind"] and not r["layers"]
        ]
    if held.get("what") not in ("decode", "prefill") or "--layers" in held.get("command", ""):
        return []
    if not any("H200" in device for device in held.get("devices", [])):
        return []
    return [
        {k: r[k] for k in ("model", "tensor", "batch", "ms")}
        | {"plan": "layers:" + r["ran"], "asked": r["plan"], "size": r.get("context", r.get("tokens"))}
        | {"data": 1, "what": held["what"], "dtype": r.get("dtype", "bfloat16"), "kernels": r.get("kernels", "none")}
        for r in held.get("rows", [])
        if r.get("ms")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    measured = []
    for path in args.files:
        try:
            measured += rows(path)
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        except KeyError as error:
            parser.error(f"{path}: a row has no {error}")
    if not measured:
        print("no measurement on H200 in these files", file=sys.stderr)
        return 1
    without_gpus()
    target = absent("h200", 64, compile=False)
    errors = []
    print("| model | what | batch x tokens | tensor | plan | kernels | measured ms | predicted ms | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in measured:
        _, config = read_config(None if r["model"] == "shipped" else r["model"])
        mesh = target.mesh(r["tensor"], r["data"])
        model = NemotronH(config, mesh=mesh, dtype=r["dtype"], fusion=r["plan"])
        new, context = (1, r["size"]) if r["what"] == "decode" else (r["size"], 0)
        found = predict(model, plan_for(model, r["batch"], new, target), r["batch"], new, context)
        ms = found.seconds * 1e3
        errors.append(ms / r["ms"] - 1)
        cells = [r["model"], r["what"], f"{r['batch']} x {r['size']}", str(r["tensor"]), f"`{r['asked']}`"]
        cells.append(r["kernels"])
        print("| " + " | ".join([*cells, f"{r['ms']:.3f}", f"{ms:.3f}", f"{errors[-1]:+.0%}"]) + " |")
    middle = statistics.median(errors)
    print(f"\n{len(errors)} rows: median {middle:+.0%}, from {min(errors):+.0%} to {max(errors):+.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
