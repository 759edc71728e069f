"""Text from prompts: the answers on stdout, logs and progress on stderr."""

import argparse
import sys

from nemotron_jax import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub id; default the small model that is shipped")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add_sampling_arguments(parser)
    cli.add_model_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of generation that ``chat`` takes too."""
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="most tokens per answer (default: 128)")


def run(args: argparse.Namespace) -> int:
    if not args.prompt:
        raise ValueError("no prompt: give --prompt TEXT")
    mesh = cli.build_mesh(args)
    from nemotron_jax import load
    from nemotron_jax.generation import Generator

    model = load(args.model, mesh=mesh, dtype=args.dtype, fusion=args.fusion)
    generator = Generator(model, max_new_tokens=args.max_new_tokens)
    outputs = generator.generate(args.prompt)
    if args.json:
        cli.print_json(
            {
                "outputs": [
                    {"prompt": c.prompt, "text": c.text, "tokens": list(c.tokens), "finish_reason": c.finish_reason}
                    for c in outputs
                ],
                "tensor_parallel": args.tensor_parallel,
                "fusion": args.fusion,
                "fused_boundaries": model.plan(len(args.prompt), 1).fused_boundaries,
                "devices": cli.device_names(mesh),
            }
        )
    else:
        for c in outputs:
            sys.stdout.write(c.prompt + c.text + "\n")
    return cli.DONE
