"""The ``nemotron-jax`` program: arguments, devices, exit statuses. What each command does is in
``nemotron_jax/commands``.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "generate": "text from prompts",
    "chat": "interactive, streaming",
    "score": "log-likelihood and perplexity of texts",
    "compare": "every array of a PyTorch reference against ours",
    "inspect": "what would run, from shapes alone",
    "convert": "Hugging Face layout to Orbax and back",
    "experiment": "a sharding experiment from a TOML file",
    "bench": "timings after a correctness check",
    "selftest": "device, link and kernel check before a long run",
}
DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
      0 done, 1 a comparison or check failed, 2 bad input (one line on stderr).
    """
    parser = argparse.ArgumentParser(prog="nemotron-jax", description="Nemotron-H in JAX.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {}
    for name, summary in COMMANDS.items():
        try:
            modules[name] = importlib.import_module(f"nemotron_jax.commands.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"nemotron_jax.commands.{name}":
                raise
            continue
        sub = commands.add_parser(name, help=summary, description=modules[name].__doc__, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
        sub.add_argument("--verbose", "-v", action="store_true", help="log more, on stderr")
        modules[name].add_arguments(sub)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("nemotron_jax").setLevel(logging.INFO if args.verbose else logging.WARNING)
    try:
        return modules[args.command].run(args)
    except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        if args.verbose:
            raise
        print(f"nemotron-jax {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()
        return DONE
    except KeyboardInterrupt:
        print("nemotron-jax: interrupted", file=sys.stderr)
        return 130


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every command with a model takes."""
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="ranks of the tensor axis")
    parser.add_argument("--data-parallel", type=positive, default=1, metavar="N", help="ranks of the data axis")
    parser.add_argument(
        "--fusion",
        default="auto",
        metavar="PLAN",
        help="none | all[/IMPL] | auto | kinds:M*[/IMPL] | layers:LETTERS (default: auto)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of matrices and activations")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}, accepted 1 or more")
    return value


def setup_devices(count: int) -> None:
    """Make ``count`` devices available before JAX starts: GPUs where there are enough, otherwise virtual CPU devices
    (one line says so).
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu" or not _enough_gpus(count):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        if count > 1:
            print(f"nemotron-jax: running on {count} virtual CPU devices", file=sys.stderr)


def _enough_gpus(count: int) -> bool:
    """Whether JAX finds that many GPUs. Nothing is initialised on a machine whose jaxlib has no GPU plugin."""
    import jax

    if not any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
        return False
    try:
        return len(jax.devices("gpu")) >= count
    except RuntimeError:
        return False


def build_mesh(args: argparse.Namespace):
    """The mesh that the options ask for, on devices set up for it."""
    setup_devices(args.tensor_parallel * args.data_parallel)
    from nemotron_jax.sharding import make_mesh

    return make_mesh(args.tensor_parallel, args.data_parallel)


def device_names(mesh) -> list[str]:
    """What ``devices`` holds in every JSON object."""
    return [f"{d.platform}:{d.id} {d.device_kind}" for d in mesh.devices.flat]


def print_json(result: dict) -> None:
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
