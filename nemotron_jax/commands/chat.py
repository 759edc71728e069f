"""A conversation in the terminal: the answer appears as it is written; an empty line or end of input leaves."""

import argparse
import sys

from nemotron_jax import cli, processes
from nemotron_jax.commands.generate import add_sampling_arguments, check_settings, generator_settings, record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub id; default the small model that is shipped"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)
    cli.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = generator_settings(args)
    mesh = cli.build_mesh(args)
    from nemotron_jax import load
    from nemotron_jax.generation import Conversation, Generator
    from nemotron_jax.generation.prompt_files import FilePrompt

    tokenizer = check_settings(args, mesh, settings)
    model = load(
        args.model,
        mesh=mesh,
        dtype=args.dtype,
        fusion=args.fusion,
        mtp=args.speculative_tokens > 0,
        conversion_cache=args.conversion_cache,
    )
    plan = model.plan(args.data_parallel, 1)
    cli.tell_fallbacks(plan)
    conversation = Conversation(Generator(model, tokenizer=tokenizer, steps_per_call=8, **settings), system=args.system)
    if conversation.plain:
        print(
            "nemotron-jax chat: no chat template in this checkpoint: the model goes on with your text", file=sys.stderr
        )
    turns = []
    while (text := processes.from_first(_ask)) is not None:
        for piece in conversation.say(text, seed=args.seed + conversation.turns):
            if not args.json:
                print(piece.text, end="", flush=True)
        answer = piece.completion
        if not args.json:
            print(flush=True)
        turns.append(record(FilePrompt(text), answer))
    if args.json:
        cli.print_json({"outputs": turns, **cli.what_ran(args, mesh, plan)})
    return cli.DONE


def _ask() -> str | None:
    """The next line; None at its end. The prompt sign is for people only."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    text = line.rstrip("\n")
    return text if line and text else None
