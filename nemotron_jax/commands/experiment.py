"""Run a sharding experiment from a TOML file; results.json, results.md and plots go into a folder.

A run that is in results.json already is not run again, so an experiment that was stopped goes on where it was.
Exit status 1: a run failed or its results were wrong (a refused one has its reason recorded, and is no failure).
"""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

from nemotron_jax import cli, processes
from nemotron_jax.files import make_folder

RESULTS = "results.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("spec", metavar="SPEC.toml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also write a trace of each run that is timed")
    parser.add_argument("--list", action="store_true", help="print the runs that the file expands into, and stop")


def run(args: argparse.Namespace) -> int:
    from nemotron_jax.experiments.spec import read_spec

    runs = read_spec(args.spec)
    if args.list:
        for one in runs:
            print(f"{one.key}  {one.title()}")
        return cli.DONE
    processes.from_first(functools.partial(make_folder, args.out))
    if all(one.devices for one in runs):
        from nemotron_jax.targets import without_gpus

        without_gpus()
    else:
        cli.setup_devices(max(one.tensor * one.data for one in runs if not one.devices))
    from nemotron_jax.experiments.execute import Executor
    from nemotron_jax.experiments.report import plots, table
    from nemotron_jax.experiments.results import run_all

    execute = Executor(args.profile)

    def announced(one):
        print(f"nemotron-jax: {one.title()}", file=sys.stderr, flush=True)
        return execute(one)

    with tempfile.TemporaryDirectory() as scratch:
        out = args.out
        held = processes.from_first(lambda: (out / RESULTS).read_text("utf-8") if (out / RESULTS).exists() else None)
        if not processes.first():  # the first process keeps the results; the others go through the same runs
            out = Path(scratch)
            if held is not None:
                (out / RESULTS).write_text(held, encoding="utf-8")
        entries = run_all(runs, out, announced)
        text = table(entries)
        (out / "results.md").write_text(text, encoding="utf-8")
        written = plots(entries, out)
    if args.json:
        import jax

        devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
        cli.print_json({"runs": entries, "devices": devices, "plots": [str(path) for path in written]})
    else:
        print(text)
    return cli.FAILED if any(e["status"] in ("failed", "wrong") for e in entries) else cli.DONE
