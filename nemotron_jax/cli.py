"""The ``nemotron-jax`` program: arguments, devices, exit statuses. What each command does is in
``nemotron_jax/commands``.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from nemotron_jax import files, interrupts, processes

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
MOST = 1 << 30  # of anything that is counted: positions and sizes are 32-bit numbers
MOST_CPU_DEVICES = 256
BAD = (ValueError, OSError)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong: the usage is long, and --help has it."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
      0 done, 1 a comparison or check failed, 2 bad input (one line on stderr).
    """
    parser = _Parser(prog="nemotron-jax", description="Nemotron-H in JAX.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules, parsers = {}, {}
    for name, summary in COMMANDS.items():
        try:
            modules[name] = importlib.import_module(f"nemotron_jax.commands.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"nemotron_jax.commands.{name}":
                raise
            continue
        sub = parsers[name] = commands.add_parser(
            name, help=summary, description=modules[name].__doc__, allow_abbrev=False
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
        sub.add_argument("--verbose", "-v", action="store_true", help="log more, on stderr")
        processes.add_arguments(sub)
        modules[name].add_arguments(sub)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parsers[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        processes.join(processes.settings(args))
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
        logging.getLogger("nemotron_jax").setLevel(logging.INFO if args.verbose else logging.WARNING)
        if processes.active():
            own = ("coordinator", "process_id", "local_devices")
            processes.agree("command", {k: str(v) for k, v in vars(args).items() if k not in own})
        status = modules[args.command].run(args)
        processes.leave()
        return status
    except BrokenPipeError as error:
        if processes.active():
            processes.fail(error, DONE, "nobody reads the output any more")
        sys.stderr.close()
        return DONE
    except BAD as error:
        if args.verbose and not processes.active():
            raise
        return _ended(error, BAD_INPUT, f"nemotron-jax {args.command}: {files.reason(error)}")
    except FloatingPointError as error:
        return _ended(error, FAILED, f"nemotron-jax {args.command}: {error}")
    except KeyboardInterrupt as error:
        if processes.active():
            processes.fail(error, 130, "interrupted")
        return interrupts.said()
    except BaseException as error:
        if not processes.active():
            raise
        if isinstance(error, SystemExit):
            return _ended(error, int(error.code or 0), "asked to end")
        return _ended(error, FAILED, traceback.format_exc())


def _ended(error: BaseException, status: int, text: str) -> int:
    """Say what ended this process; with several, it ends here."""
    if processes.active():
        processes.fail(error, status, text)
    print(text, file=sys.stderr)
    return status


def add_model_arguments(parser: argparse.ArgumentParser, *, loads: bool = True) -> None:
    """The options that every command with a model takes; ``loads``: whether it reads the weights."""
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="ranks of the tensor axis")
    parser.add_argument("--data-parallel", type=positive, default=1, metavar="N", help="ranks of the data axis")
    parser.add_argument(
        "--fusion",
        default="auto",
        metavar="PLAN",
        help="none | all[/IMPL] | auto | kinds:M*[/IMPL] | layers:LETTERS (default: auto)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of matrices and activations")
    if loads:
        parser.add_argument(
            "--conversion-cache",
            metavar="DIR",
            help="keep the converted weights in DIR (`on`: in the user's cache folder) and restore them next time "
            "(default: NEMOTRON_JAX_CONVERSION_CACHE, for quantised checkpoints; unset is off)",
        )


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"found {text}, accepted 1 to {MOST}")
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}, accepted a number of 0 or more")
    return value


def tell_fallbacks(plan) -> None:
    """One line on stderr where the plan (a FusionPlan) names what cannot run here."""
    if plan.fallbacks and processes.first():
        print(f"nemotron-jax: fusion plan {plan.spec!r}: {'; '.join(plan.fallbacks)}", file=sys.stderr)


def what_ran(args: argparse.Namespace, mesh, plan) -> dict[str, Any]:
    """Keys that commands which run a model share: how it was cut, the plan as asked for and as it ran, the devices."""
    return {
        "tensor_parallel": args.tensor_parallel,
        "fusion": args.fusion,
        "plan": plan.letters,
        "fused_boundaries": plan.fused_boundaries,
        "fallbacks": list(plan.fallbacks),
        "devices": device_names(mesh),
    }


def setup_devices(count: int) -> None:
    """Make ``count`` devices available before JAX starts: GPUs where there are enough, otherwise virtual CPU devices
    (one line says so).
    """
    import jax

    if processes.active():
        _setup_shares(count)
    elif os.environ.get("JAX_PLATFORMS") == "cpu" or gpus() < count:
        if count > MOST_CPU_DEVICES:
            raise ValueError(
                f"devices: found {count} asked for, accepted at most {MOST_CPU_DEVICES} virtual CPU devices"
            )
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        if count > 1:
            print(f"nemotron-jax: running on {count} virtual CPU devices", file=sys.stderr)


def _setup_shares(count: int) -> None:
    """The same for several processes: their GPUs, or virtual CPU devices, as many in each; all take the same kind."""
    import jax

    cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not gpus()
    processes.agree("devices", "cpu" if cpu else "gpu")
    if not cpu:
        return
    share, rest = divmod(max(count, processes.count()), processes.count())
    if rest:
        raise ValueError(
            f"devices: found {count} for {processes.count()} processes, accepted a multiple of the number of processes"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", share)
    print(f"nemotron-jax: running in {processes.count()} processes of {share} virtual CPU devices", file=sys.stderr)


def gpus() -> int:
    """How many GPUs this process may take. JAX is not asked: it could not be given virtual devices afterwards."""
    if not any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
        return 0
    number = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
            return 0
    except (OSError, AttributeError):
        return 0
    visible = os.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    return number.value if visible == "all" else min(number.value, len(visible.split(",")))


def build_mesh(args: argparse.Namespace):
    """The mesh that the options ask for, on devices set up for it."""
    setup_devices(args.tensor_parallel * args.data_parallel)
    from nemotron_jax.sharding import make_mesh

    if processes.active():
        return _shared_mesh(args)
    return make_mesh(args.tensor_parallel, args.data_parallel)


def _shared_mesh(args: argparse.Namespace):
    """Over the devices of all processes; the degrees that come of it are put back into the options."""
    import jax

    from nemotron_jax.sharding import make_mesh
    from pallas_kernels.allreduce_rms_norm import unreachable_reason

    machines = processes.hosts()
    args.tensor_parallel, args.data_parallel = processes.mesh_shape(
        args.tensor_parallel, args.data_parallel, jax.device_count(), machines
    )
    mesh = make_mesh(args.tensor_parallel, args.data_parallel)
    shape = f"data={args.data_parallel} x tensor={args.tensor_parallel}"
    line = f"nemotron-jax: mesh {shape} over {len(machines)} processes on {len(set(machines))} machines"
    rows = [{machines[d.process_index] for d in row} for row in mesh.devices]
    if any(len(row) > 1 for row in rows):
        line += "; sums over tensor go between machines"
    if args.tensor_parallel > 1 and (reason := unreachable_reason(mesh)) is not None:
        line += f"; sums go through XLA's collectives, not through kernels that use peers' memory: {reason}"
    print(line, file=sys.stderr)
    return mesh


def device_names(mesh) -> list[str]:
    """What ``devices`` holds in every JSON object."""
    return [f"{d.platform}:{d.id} {d.device_kind}" for d in mesh.devices.flat]


def print_json(result: dict) -> None:
    print(json.dumps(result, ensure_ascii=False))
