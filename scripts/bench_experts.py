#!/usr/bin/env python3
"""Time the routed experts' products (nemotron_jax.layers.experts) at the released models' shapes, each after a check.

    python scripts/bench_experts.py [--tokens 1,8,64,2048] [--shapes nano,super] [--implementations gather,blocks]

One line per case on stdout: microseconds per block, and GB/s of the chosen experts' matrices read once. Every
repetition goes to other experts, inside one compiled loop.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_jax.layers.experts import IMPLEMENTATIONS, expert_sum

# experts on a rank, choices, width of an expert on a rank, width of its input
SHAPES = {
    "nano": (128, 6, 1856, 2688),
    "nano_tp8": (128, 6, 232, 2688),
    "nano_ep4": (32, 6, 1856, 2688),
    "super_tp4": (512, 22, 672, 1024),
    "super_tp8": (512, 22, 336, 1024),
}


@functools.partial(jax.jit, static_argnames="implementation")
def loop(x, up, down, chosen, weights, implementation):
    def body(i, v):
        y = expert_sum(v, up, down, chosen[i], weights, implementation)
        return (v + 1e-3 * y).astype(v.dtype)

    return jax.lax.fori_loop(0, chosen.shape[0], body, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,2048,8192")
    parser.add_argument("--shapes", default="nano,nano_tp8,super_tp4")
    parser.add_argument("--implementations", default="gather,blocks")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print("shape tokens implementation max_abs_difference us GB/s", flush=True)
    for name in args.shapes.split(","):
        experts, k, f, width = SHAPES[name]
        keys = jax.random.split(jax.random.key(0), 2)
        up = jax.random.normal(keys[0], (experts, f, width), args.dtype) / width**0.5
        down = jax.random.normal(keys[1], (experts, width, f), args.dtype) / f**0.5
        for tokens in map(int, args.tokens.split(",")):
            repeats = max(4, min(100, 4096 // tokens))
            everyone = np.argsort(rng.random((repeats, tokens, max(experts, 128))), -1)[..., :k].astype(np.int32)
            x = jnp.asarray(rng.standard_normal((tokens, width)), args.dtype)
            weights = jnp.full((tokens, k), 1.0 / k, jnp.float32)
            chosen = jnp.asarray(everyone)
            reference = None
            for implementation in args.implementations.split(","):
                if implementation == "gather" and tokens * k > 4 * experts:
                    continue
                assert implementation in IMPLEMENTATIONS
                try:
                    one = jax.jit(expert_sum, static_argnames="implementation")(
                        x, up, down, chosen[0], weights, implementation
                    )
                    run = functools.partial(loop, x, up, down, chosen, weights, implementation)
                    run().block_until_ready()
                    best = float("inf")
                    for _ in range(3):
                        start = time.perf_counter()
                        run().block_until_ready()
                        best = min(best, time.perf_counter() - start)
                except jax.errors.JaxRuntimeError as error:
                    print(name, tokens, implementation, "failed:", str(error).splitlines()[0][:100], flush=True)
                    continue
                one = np.asarray(one, np.float32)
                reference = one if reference is None else reference
                distinct = np.mean([len(np.unique(c[c < experts])) for c in everyone])
                read = distinct * 2 * f * width * up.dtype.itemsize
                us = best / repeats * 1e6
                print(
                    name,
                    tokens,
                    implementation,
                    f"{np.abs(one - reference).max():.2g} {us:.1f} {read / us / 1e3:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
