"""What the host spends per call and per token: the arguments and results of the real programs, but none of the work.

A model of many layers and tiny sizes has as many arguments as a large one. Its programs are replaced by ones that hand
their buffers through, so that what is timed is Python, argument handling, dispatch and fetching tokens.

    python scripts/bench_host_overhead.py --write benchmarks/host_overhead.md

Prints a table; ``call`` is one ``model(ids, cache)`` per token, ``loop`` is ``Generator.generate`` with 32 tokens per
call.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

SIZES = dict(
    vocab_size=512, hidden_size=32, intermediate_size=32, num_attention_heads=8, num_key_value_heads=8, head_dim=4,
    mamba_num_heads=8, mamba_head_dim=4, ssm_state_size=4, n_groups=8, chunk_size=8, max_position_embeddings=8192,
)  # fmt: skip
STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--preset", default="nemotron-h-8b", help="whose pattern of layers")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--platform", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--write", type=Path, help="also write the table, with this command, to a Markdown file")
    args = parser.parse_args()

    import jax

    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(args.tensor_parallel))
    lines = [
        "| ranks | arguments of a call | call, us per token | loop of 32, us per token | of it inside the program |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for tensor in args.tensor_parallel:
        lines.append("| {} | {} | {:.0f} | {:.1f} | {:.1f} |".format(tensor, *measure(tensor, args.preset, args.rows)))
        print(lines[-1], flush=True)
    if args.write:
        kind = jax.devices()[0].device_kind
        command = "python scripts/bench_host_overhead.py " + " ".join(sys.argv[1:])
        args.write.parent.mkdir(exist_ok=True)
        args.write.write_text(
            "# Host time per token\n\n"
            f"`{command}`: jax {jax.__version__}, {len(jax.devices())} x {kind}, {args.rows} row(s), the layers of "
            f"{args.preset} at tiny sizes.\nThe programs do no work: the times are what the host adds to a step. "
            "Each is the lowest tenth of its repeats, since the machine may be busy.\n\n" + "\n".join(lines) + "\n"
        )


def measure(tensor: int, preset: str, rows: int) -> tuple[int, float, float, float]:
    """(arguments, us per token of one call per token, us per token of the loop, of which inside the program's call)."""
    import jax
    import numpy as np

    from nemotron_jax import NemotronH, NemotronHConfig, make_mesh
    from nemotron_jax.generation import Generator

    pattern = NemotronHConfig.preset(preset).hybrid_override_pattern
    config = NemotronHConfig.from_dict({"model_type": "nemotron_h", "hybrid_override_pattern": pattern, **SIZES})
    model = NemotronH(config, mesh=make_mesh(tensor), fusion="none", rngs=0)
    hollow(model)
    ids = np.ones((rows, 1), np.int32)
    cache = model.new_cache(rows, 64)  # few slots: a call copies what it is not given
    arguments = len(model.weights) + len(jax.tree.leaves(cache)) + 1

    def call():
        model(ids, cache=cache).logits.block_until_ready()

    generator = Generator(model, eos=None, max_new_tokens=16 * STEPS, steps_per_call=STEPS)
    prompt = [[1] * 8] * rows
    INSIDE.clear()

    def loop():
        generator.generate(prompt)

    one = timed(call, 200) * 1e6
    INSIDE.clear()
    many = timed(loop, 20) / (16 * STEPS) * 1e6
    return arguments, one, many, lowest_tenth(INSIDE) / STEPS * 1e6


INSIDE: list[float] = []


def hollow(model) -> None:
    """Let every program of ``model`` take its arguments and hand its buffers through."""
    import dataclasses

    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from nemotron_jax.generation import decoding
    from nemotron_jax.generation.programs import Written
    from nemotron_jax.generation.sampling import Controls

    logits = P(model.rows_spec, model.vocab_spec)
    columns = model.config.vocab_size

    def forward_program(batch, tokens, *, masked, capacity, capture=False, last_only=False):
        key = ("hollow", batch, tokens, capacity)
        if key not in model._programs:
            specs = model.cache_shapes(batch, capacity).specs

            def local(network, state, ids, mask, cache):
                shape = (batch, tokens, columns // model.axis.size)
                return jnp.zeros(shape, jnp.float32), dataclasses.replace(cache, length=cache.length + tokens), None

            model._programs[key] = compile_kept(
                model, local, (P(), None, specs), (P(None, None, model.vocab_spec), specs, None)
            )
        return model._programs[key]

    model.forward_program = forward_program

    def read_program(model, batch, tokens, capacity):
        key = ("hollow read", batch, tokens, capacity)
        if key not in model._programs:
            specs = model.cache_shapes(batch, capacity).specs

            def local(network, state, ids, new, cache, logits):
                return cache, logits

            model._programs[key] = compile_kept(model, local, (P(), P(), specs, logits), (specs, logits), donate=(2, 3))
        return model._programs[key]

    def write_program(model, batch, capacity, steps, traits, logprobs):
        key = ("hollow write", batch, capacity, steps)
        if key not in model._programs:
            specs = model.cache_shapes(batch, capacity).specs
            controls = Controls(P(), P(), P(), P(), None)

            def local(network, state, cache, logits, used, left, controls):
                tokens = jnp.where(jnp.arange(steps)[:, None] < left, 7, -1)
                return cache, logits, None, Written(tokens.astype(jnp.int32))

            program = compile_kept(
                model, local, (specs, logits, None, P(), controls), (specs, logits, None, Written(P())), donate=(0, 1)
            )

            def timed_program(*args):
                start = time.perf_counter()
                out = program(*args)
                INSIDE.append(time.perf_counter() - start)
                return out

            model._programs[key] = timed_program
        return model._programs[key]

    decoding.read_program, decoding.write_program = read_program, write_program


def compile_kept(model, local, in_specs, out_specs, donate=()):
    """``model.compile`` for a program that uses none of its weights and still takes them all."""
    import jax

    jit = jax.jit

    def keeping(f, **options):
        return jit(f, keep_unused=True, **options)

    jax.jit = keeping
    try:
        return model.compile(local, in_specs, out_specs, donate=donate)
    finally:
        jax.jit = jit


def timed(function, repeats: int) -> float:
    """Seconds of a call that nothing else delayed: the lowest tenth of ``repeats``, after two to warm up."""
    function(), function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return lowest_tenth(seconds)


def lowest_tenth(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 10]


if __name__ == "__main__":
    main()
