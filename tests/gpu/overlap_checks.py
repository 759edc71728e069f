"""Kernels of a decode step that begin while the one in front still runs, on one real GPU:

    python -m tests.gpu.overlap_checks --seconds 100 --out FILE

A decode step of three blocks' kernels, repeated on the device with each result going into the next step, with and
without overlap and with and without command buffers: all must give the same bits. Then microseconds per step of each.
"""

import argparse
import faulthandler
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import matvec, rms_norm, selection
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.mamba_step import mamba_step

GROUPS, STATE, TAPS, SLOTS = 8, 128, 4, 512
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}


def step(x, residual, cache, weights, length):
    """A Mamba block, an MLP block and an attention block of one set of weights: (x, residual, cache)."""
    window, state, k, v = cache
    w = weights
    normed, residual = rms_norm(x, residual, w["norm"], eps=1e-5)
    y, window, state = mamba_step(
        matvec.matvec(normed, w["in_proj"]), window, state, w["conv"], None, w["a_log"], w["d"], w["dt_bias"],
        w["gate_norm"], None, groups=GROUPS, eps=1e-5, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    normed, residual = rms_norm(matvec.matvec(y, w["out_proj"]), residual, w["norm"], eps=1e-5)
    h = matvec.matvec(matvec.matvec(normed, w["up"], squared_relu=True), w["down"])
    normed, residual = rms_norm(h, residual, w["norm"], eps=1e-5)
    qkv = matvec.matvec(normed, w["qkv"]).reshape(x.shape[0], -1, 128)
    y, k, v = decode_attention(qkv, k, v, length)
    return matvec.matvec(y.reshape(x.shape[0], -1), w["o"]), residual, (window, state, k, v)


def problem(seed: int, layers: int, rows: int, hidden: int, inner: int, wide: int, heads: int, kv_heads: int):
    """Random weights of each layer, and what a step starts from."""
    mamba_heads, channels = inner // 64, inner + 2 * GROUPS * STATE
    keys = iter(jax.random.split(jax.random.key(seed), 24 * layers))

    def matrix(outputs, inputs):
        return jax.random.normal(next(keys), (outputs, inputs), "bfloat16") * jnp.bfloat16(inputs**-0.5)

    def layer():
        return dict(
            norm=1 + 0.1 * jax.random.normal(next(keys), (hidden,), "bfloat16"),
            in_proj=matrix(inner + channels + mamba_heads, hidden),
            conv=0.5 * jax.random.normal(next(keys), (channels, 1, TAPS), "bfloat16"),
            a_log=jax.random.normal(next(keys), (mamba_heads,)),
            d=jax.random.normal(next(keys), (mamba_heads,)),
            dt_bias=jax.random.normal(next(keys), (mamba_heads,)) - 3,
            gate_norm=1 + 0.1 * jax.random.normal(next(keys), (inner,), "bfloat16"),
            out_proj=matrix(hidden, inner),
            up=matrix(wide, hidden),
            down=matrix(hidden, wide),
            qkv=matrix((heads + 2 * kv_heads) * 128, hidden),
            o=matrix(hidden, heads * 128),
        )

    def cache():
        window = jax.random.normal(next(keys), (rows, TAPS - 1, channels), "bfloat16")
        state = jax.random.normal(next(keys), (rows, mamba_heads, 64, STATE))
        k, v = (jax.random.normal(next(keys), (rows, SLOTS, kv_heads, 128), "bfloat16") for _ in range(2))
        return window, state, k, v

    x, residual = (jax.random.normal(next(keys), (rows, hidden), "bfloat16") for _ in range(2))
    return x, residual, [cache() for _ in range(layers)], [layer() for _ in range(layers)]


STEPS = 120


def program(weights, kernels: str, options: dict, arguments):
    """STEPS steps through all layers in a loop on the device, compiled: a function of (x, residual, caches)."""

    def run(x, residual, caches, weights):
        def one(i, carry):
            x, residual, caches = carry
            caches = list(caches)
            for n, w in enumerate(weights):
                length = jnp.full(x.shape[0], 100, jnp.int32) + i % 50
                x, residual, caches[n] = step(x, residual, caches[n], w, length)
            return x, (residual * jnp.bfloat16(0.5)).astype(residual.dtype), caches

        return lax.fori_loop(0, STEPS, one, (x, residual, caches))

    with selection.use(kernels):
        lowered = jax.jit(run).lower(*arguments, weights)
    assert ("uses_pdl" in lowered.as_text()) == ("overlap" in kernels), "the kernels were not used"
    compiled = lowered.compile(compiler_options=options)
    return lambda *carry: compiled(*carry, weights)


def bits(tree) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    plain = "mamba_step,rms_norm,decode_attention,matvec"
    rows, failed = [], 0
    shapes = {
        "8b, 1 row": (4, 1, 4096, 8192, 21504, 32, 8),
        "nano-3 at two ranks, 1 row": (6, 1, 2688, 2048, 1856, 16, 2),
        "small, 3 rows": (3, 3, 1024, 1024, 2048, 8, 2),
    }
    for number, (name, shape) in enumerate(shapes.items()):
        x, residual, caches, weights = problem(number, *shape)
        carry, first = (x, residual, caches), None
        for graph, options in (("graph", {}), ("no graph", NO_GRAPH)):
            for kernels in (plain, f"{plain},overlap"):
                row = dict(shape=name, graph=graph, overlap="overlap" in kernels)
                rows.append(row)
                try:
                    run = program(weights, kernels, options, carry)
                    found = {bits(run(*carry)) for _ in range(args.repeats)}
                    first = first or found.copy()
                    row["ok"] = found == first and len(found) == 1
                    begin = time.perf_counter()
                    for _ in range(5):
                        last = run(*carry)
                    jax.block_until_ready(last)
                    row["us"] = (time.perf_counter() - begin) / 5 / STEPS * 1e6
                except Exception as error:
                    row |= dict(ok=False, error=f"{type(error).__name__}: {str(error)[:300]}")
                failed += not row["ok"]
                print(row, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(dict(device=jax.devices()[0].device_kind, rows=rows), indent=1))
    print(f"{len(rows) - failed} of {len(rows)} programs gave the same bits, {args.repeats} times each", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
