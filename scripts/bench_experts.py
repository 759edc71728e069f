#!/usr/bin/env python3
"""Check and time the routed experts' products (nemotron_jax.layers.experts) at the released models' shapes.

    python scripts/bench_experts.py [--shapes nano,super] [--tokens 1,8,64,512,8192] [--implementations gather,grouped]
    python scripts/bench_experts.py --shapes tiny --tokens 1,9 --ceiling 256          # a dry run, on any machine

Each implementation is first compared with `dense` on some of the tokens, with NaN in the experts that no token chose
and in freed memory, twice, and both results must have the same bits. Then it is timed in one compiled loop, in which
every turn goes to other experts. TFLOP/s count the products asked for, not those of padding; GB/s the chosen experts'
matrices, read once. Beside them stands what a large square product of the same dtype reaches in the same run.
--tilings OUTPUTSxWARPGROUPSxSTAGES,... times `grouped` with other cuts of its kernel too.

One line per case on stderr, a table on stdout at the end. Exit status 1 where a check failed. With --seconds what is
not begun in time is left out, and said.
"""

import argparse
import contextlib
import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemotron_jax.layers.experts import GATHER_CHOICES_PER_EXPERT, IMPLEMENTATIONS, expert_sum, kernel_fault  # noqa: E402
from pallas_kernels import selection  # noqa: E402
from pallas_kernels.grouped_matmul.shapes import SHAPES  # noqa: E402

SHAPES = {"tiny": (16, 3, 144, 128)} | SHAPES
BOUND = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
CHECKED = 64  # tokens at either end that are compared
REPEATS = 3


@functools.partial(jax.jit, static_argnames="implementation")
def one(x, up, down, chosen, weights, implementation):
    return expert_sum(x, up, down, chosen, weights, implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def loop(x, up, down, chosen, weights, implementation):
    def body(i, v):
        y = expert_sum(v, up, down, chosen[i], weights, implementation)
        return (v + 1e-3 * y).astype(v.dtype)  # the next turn waits for this one

    return jax.lax.fori_loop(0, chosen.shape[0], body, x)


def seconds(run) -> float:
    """The best of some runs, after one that compiles."""
    run().block_until_ready()
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best


def ceiling(size: int, dtype: str, turns: int = 8) -> float:
    """TFLOP/s of a square matrix product."""
    a = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype) / size**0.5
    run = jax.jit(lambda a: jax.lax.fori_loop(0, turns, lambda _, v: (v @ a).astype(a.dtype), a))
    return 2 * size**3 * turns / seconds(lambda: run(a)) / 1e12


def poison() -> None:
    for size in (1 << 12, 1 << 18, 1 << 24):
        jnp.full((size,), jnp.nan, jnp.float32).block_until_ready()


def check(x, up, down, chosen, weights, implementation: str) -> float:
    """Error relative to `dense` on the first and last tokens.

    Raises:
        AssertionError: beyond the bound; two runs differ.
    """
    n = x.shape[0]
    some = np.arange(n) if n <= 2 * CHECKED else np.r_[:CHECKED, n - CHECKED : n]
    wanted = np.asarray(one(x[some], up, down, chosen[some], weights[some], "dense"), np.float64)
    named = jnp.isin(jnp.arange(up.shape[0]), chosen)[:, None, None]
    up, down = (jnp.where(named, m, jnp.nan) for m in (up, down))
    found = []
    for _ in range(2):
        poison()
        found.append(np.asarray(one(x, up, down, chosen, weights, implementation)))
    assert found[0].tobytes() == found[1].tobytes(), "two runs differ"
    off = found[0][some].astype(np.float64) - wanted
    error = float(np.sqrt((off**2).mean() / max((wanted**2).mean(), 1e-30)))  # no expert may be here: all zero
    assert error <= BOUND[str(x.dtype)], f"off by {error:.1e}"
    return error


@contextlib.contextmanager
def cut(tiling: str | None):
    """`grouped`'s kernel cut as this says."""
    if tiling is None:
        yield
        return
    from pallas_kernels.grouped_matmul import mosaic_gpu

    default = mosaic_gpu.default_tiling
    mosaic_gpu.default_tiling = lambda *_: mosaic_gpu.Tiling(*map(int, tiling.split("x")))
    jax.clear_caches()
    try:
        yield
    finally:
        mosaic_gpu.default_tiling = default
        jax.clear_caches()


def measure(shape, tokens, dtype, implementation, tiling=None) -> dict:
    experts, k, f, width = shape
    rng = np.random.default_rng(tokens)
    keys = jax.random.split(jax.random.key(0), 2)
    up = (jax.random.normal(keys[0], (experts, f, width), dtype) / width**0.5).astype(dtype)
    down = (jax.random.normal(keys[1], (experts, width, f), dtype) / f**0.5).astype(dtype)
    turns = max(4, min(100, 4096 // tokens))
    # Of a rank with some of the experts, most choices are elsewhere.
    chosen = np.argsort(rng.random((turns, tokens, max(experts, 128))), -1)[..., :k].astype(np.int32)
    x = jnp.asarray(rng.standard_normal((tokens, width)), dtype)
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    here = float((chosen < experts).sum(axis=(1, 2)).mean())
    distinct = float(np.mean([len(np.unique(c[c < experts])) for c in chosen]))
    with cut(tiling):
        error = check(x, up, down, jnp.asarray(chosen[0]), weights, implementation)
        run = functools.partial(loop, x, up, down, jnp.asarray(chosen), weights, implementation)
        us = seconds(run) / turns * 1e6
    return {
        "error": error,
        "us": us,
        "tflop_per_s": here * 4 * f * width / us / 1e6,
        "gb_per_s": distinct * 2 * f * width * up.dtype.itemsize / us / 1e3,
    }


def table(rows: list[dict]) -> str:
    """A Markdown table: a line for each shape and number of tokens, microseconds for each implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = ["| shape | tokens | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for case in dict.fromkeys((row["shape"], row["tokens"]) for row in rows):
        found = {r["implementation"]: r for r in rows if (r["shape"], r["tokens"]) == case}
        cells = []
        for name in names:
            row = found.get(name)
            cells.append("" if row is None else "failed" if row["problem"] else f"{row['us']:.1f}")
        lines.append(f"| {case[0]} | {case[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,64,512,8192")
    parser.add_argument("--shapes", default="nano,super,nano_ep8", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--implementations", default="gather,gather_rows,blocks,grouped")
    parser.add_argument("--tilings", default="", help="further cuts of the kernel, such as 64x3x4")
    parser.add_argument("--dtype", default="bfloat16", choices=list(BOUND))
    parser.add_argument("--ceiling", type=int, default=8192, help="size of the square product")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", help="a JSON file, written after each case")
    args = parser.parse_args()
    names = args.implementations.split(",")
    shapes = args.shapes.split(",")
    tokens = [int(n) for n in args.tokens.split(",")]
    for what, given, accepted in (("--shapes", shapes, SHAPES), ("--implementations", names, IMPLEMENTATIONS)):
        if unknown := [name for name in given if name not in accepted]:
            parser.error(f"{what}: found {', '.join(unknown)}, accepted {', '.join(accepted)}")
    forms = [(name, None) for name in names] + [("grouped", t) for t in args.tilings.split(",") if t]
    cases = [(s, n, *form) for s in shapes for n in tokens for form in forms]
    begin, left_out = time.monotonic(), 0
    device = jax.devices()[0]
    report = {"device": device.device_kind, "jax": jax.__version__, "dtype": args.dtype, "rows": []}
    report["ceiling_tflop_per_s"] = ceiling(args.ceiling, args.dtype)
    with selection.use("grouped_matmul"):
        for shape, n, name, tiling in cases:
            experts, k, f, width = SHAPES[shape]
            if name.startswith("gather") and n * k > 2 * GATHER_CHOICES_PER_EXPERT * experts:
                continue  # not what it is for
            row = {"shape": shape, "tokens": n, "implementation": name + (f"[{tiling}]" if tiling else "")}
            row |= {"kernel_fault": None, "problem": None}
            if name == "grouped":
                row["kernel_fault"] = kernel_fault(n * k, jax.ShapeDtypeStruct((experts, f, width), args.dtype))
                if tiling and row["kernel_fault"]:
                    continue
            if time.monotonic() - begin > args.seconds:
                left_out += 1
                continue
            try:
                row |= measure(SHAPES[shape], n, args.dtype, name, tiling)
            except Exception as error:  # every case is tried, and said
                row["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
            report["rows"].append(row)
            print(f"{time.monotonic() - begin:6.1f} s {row}", file=sys.stderr, flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    failed = sum(bool(row["problem"]) for row in report["rows"])
    print(f"{report['device']}, jax {report['jax']}, {args.dtype}: microseconds of a block's routed experts; a square")
    print(f"product of {args.ceiling} reaches {report['ceiling_tflop_per_s']:.1f} TFLOP/s")
    print(table(report["rows"]))
    plain = {row["kernel_fault"] for row in report["rows"] if row["kernel_fault"]}
    for reason in sorted(plain):
        print(f"grouped ran in plain JAX: {reason}")
    if left_out:
        print(f"time was up: {left_out} cases left out")
    print(f"{failed} failed")
    return 1 if failed or not report["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
