"""What would run, from shapes alone: sizes on each device, what happens at each boundary, counted collectives.

MODEL_OR_PRESET is a folder, a preset such as nemotron-h-8b, or a preset's hub id. No weights are read.
"""

import argparse

from nemotron_jax import cli

SMALL = 1 << 26  # parameter bytes up to which the program is compiled without being asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_PRESET", help="default: the shipped model")
    cli.add_model_arguments(parser, loads=False)
    parser.add_argument("--tokens", type=cli.positive, default=1, metavar="N", help="new tokens per row (default: 1)")
    parser.add_argument("--batch", type=cli.positive, metavar="N", help="rows (default: one per data rank)")
    parser.add_argument("--context", type=cli.positive, default=2048, metavar="N", help="tokens in the cache already")
    parser.add_argument(
        "--device",
        metavar="KIND",
        help="h200: the program for these GPUs, on a machine that has none (default: what is here)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="count in the optimised program and report its memory (default: for small models)",
    )


def device_names(target, mesh) -> list[str]:
    """As the program names them elsewhere; absent ones by their kind."""
    if target.name == "here":
        return cli.device_names(mesh)
    return [f"{target.device_kind} (absent)"] * mesh.size


def run(args: argparse.Namespace) -> int:
    from nemotron_jax.inspection import as_text, degrees, inspect, read_config
    from nemotron_jax.runtime import NemotronH
    from nemotron_jax.targets import H200, absent, here, parse, without_gpus

    name, config = read_config(args.model)
    ranks = args.tensor_parallel * args.data_parallel
    kind = None if args.device is None else parse(args.device)[0]
    if kind is None:
        cli.setup_devices(ranks)
        target = here()
    else:
        without_gpus()
        target = absent(kind, ranks, compile=args.compile is not False)
    mesh = target.mesh(args.tensor_parallel, args.data_parallel)
    model = NemotronH(config, mesh=mesh, dtype=args.dtype, fusion=args.fusion)
    batch = args.batch or args.data_parallel
    compile = args.compile
    if compile is None:
        compile = model.bytes_per_device() <= SMALL and target.how != "lower"
    report = {"model": name}
    report |= inspect(model, batch=batch, tokens=args.tokens, context=args.context, target=target, compile=compile)
    capacity = args.context + args.tokens
    table = degrees(config, target.device or H200, capacity=capacity, dtype=args.dtype)
    if args.json:
        cli.print_json({**report, "degrees": table, "devices": device_names(target, mesh)})
    else:
        print(as_text(report, table))
    return cli.DONE
