"""Convert Hugging Face layout (a folder or hub id) to Orbax, or an Orbax folder back. Every tensor is carried."""

import argparse
import dataclasses
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder in either layout, or a hub id")
    parser.add_argument("target", metavar="DST", help="folder to write: new, empty, or an Orbax checkpoint to replace")
    parser.add_argument("--revision", metavar="REV", help="of a hub id: branch, tag or commit")
    parser.add_argument("--overwrite", action="store_true", help="also replace a checkpoint in Hugging Face layout")


def run(args: argparse.Namespace) -> int:
    import jax

    from nemotron_jax.cli import DONE, print_json
    from nemotron_jax.weights import convert

    jax.config.update("jax_platforms", "cpu")  # no device is used, so no GPU is taken

    done = convert(args.source, args.target, revision=args.revision, overwrite=args.overwrite)
    if args.json:
        print_json(dataclasses.asdict(done) | {"devices": []})
    else:
        size, rate = done.bytes / 1e6, done.bytes / max(done.seconds, 1e-9) / 1e6
        line = f"{done.format}: {done.tensors} tensors, {size:.1f} MB in {done.seconds:.1f} s ({rate:.0f} MB/s)"
        print(line, file=sys.stderr)
    return DONE
