"""Compare a model with a reference: PyTorch's outputs, or a saved run of our own.

compare MODEL REFERENCE.npz       run MODEL and compare
compare REFERENCE.npz             the model that the package ships
compare RUN.npz REFERENCE.npz     two saved runs; no model is needed
compare MODEL --save RUN.npz      run and save, on the ids of a reference or on random ones

Exit status 0: within tolerance (or no tolerance applies), 1: not, 2: bad input.
"""

import argparse
import functools
from pathlib import Path

import numpy as np

from nemotron_jax import cli, processes
from nemotron_jax.files import check_writable, named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model, or a saved run (default: the shipped model)")
    parser.add_argument("reference", nargs="?", metavar="REFERENCE.npz", help="what to compare with")
    cli.add_model_arguments(parser)
    parser.add_argument(
        "--variant", default="fixed", choices=("hf", "fixed", "kernel"), help="of the reference (default: fixed)"
    )
    parser.add_argument(
        "--tolerance",
        type=cli.not_negative,
        metavar="X",
        help="largest absolute difference accepted (default: 1e-4 in float32)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="RUN.npz", help="also save our arrays, as a reference for later runs"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the error behind each layer (needs matplotlib)"
    )
    parser.add_argument(
        "--random",
        nargs=2,
        type=cli.positive,
        metavar=("B", "T"),
        help="size of a run without reference (default: 2 37)",
    )
    parser.add_argument(
        "--new-tokens", type=cli.positive, default=32, metavar="N", help="greedy tokens of a run without reference"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random ids")


def run(args: argparse.Namespace) -> int:
    model_name, reference_name = args.model, args.reference
    if reference_name is None and args.save is None and str(model_name).endswith(".npz"):
        model_name, reference_name = None, model_name
    if reference_name is None and args.save is None:
        raise ValueError(
            "compare: found no reference; accepted: compare MODEL REFERENCE.npz, or compare MODEL --save RUN.npz"
        )
    if args.plot is not None and reference_name is None:
        raise ValueError("--plot draws a comparison: name a reference")
    for path, what in ((args.save, "an .npz file for our arrays"), (args.plot, "a .png file for the plot")):
        if path is not None:
            processes.from_first(functools.partial(check_writable, path, what))
    from nemotron_jax.parity import read_reference

    reference = (
        None if reference_name is None else read_reference(reference_name, args.variant)
    )  # before anything is loaded
    if reference is not None:
        ids = {name: array.tolist() for name, array in reference.arrays.items() if "ids" in name}
        processes.agree_on_content("the reference's inputs", ids)
    saved = model_name is not None and str(model_name).endswith(".npz")
    if saved and args.save is not None:
        raise ValueError(f"--save: {model_name} is a saved run already")
    found, report, devices = _load_run(model_name, args.variant) if saved else _run_model(args, model_name, reference)
    if args.save is not None and processes.first():
        from nemotron_jax.parity import save_run

        with named(args.save, "an .npz file for our arrays, on a disk that has room"):
            save_run(args.save, found, report)
    if reference is None:
        if args.json:
            cli.print_json({"saved": str(args.save), "arrays": sorted(found), "devices": devices, **report})
        else:
            print(f"saved {len(found)} arrays in {args.save}")
        return cli.DONE
    return _compare(args, found, reference, report, devices)


def _load_run(path: str, variant: str):
    from nemotron_jax.parity import read_reference

    mine = read_reference(path, variant)
    return dict(mine.arrays), dict(mine.report), []


def _run_model(args: argparse.Namespace, name: str | None, reference):
    if reference is not None and args.random:
        raise ValueError(
            "--random: found it beside a reference, accepted without one: a reference brings its own tokens"
        )
    mesh = cli.build_mesh(args)
    from nemotron_jax.parity import describe, record
    from nemotron_jax.parity.comparison import check_fit
    from nemotron_jax.weights import load

    cache = args.conversion_cache
    model = load(name, mesh=mesh, dtype=args.dtype or "float32", fusion=args.fusion, conversion_cache=cache)
    if reference is not None:
        check_fit(model, reference)
        inputs, wanted = dict(reference.arrays), set(reference.arrays)
        found = record(model, inputs, wanted)
    else:
        inputs = random_inputs(model.config.vocab_size, *(args.random or (2, 37)), seed=args.seed)
        found = record(model, inputs, new_tokens=args.new_tokens)
    report = describe(model, inputs) if "ids" in inputs else {}
    return found, report, cli.device_names(mesh)


def random_inputs(vocab_size: int, batch: int, tokens: int, seed: int) -> dict[str, np.ndarray]:
    """ids, and rows of them left-padded: by nothing, by a few, by half, by all but one token."""
    ids = np.random.default_rng(seed).integers(3 if vocab_size > 8 else 0, vocab_size, (batch, tokens), dtype=np.int32)
    lengths = [tokens, max(1, tokens - 5), max(1, tokens // 2), 1]
    pad_ids, pad_mask = np.zeros((4, tokens), np.int32), np.zeros((4, tokens), np.int32)
    for i, n in enumerate(lengths):
        pad_ids[i, tokens - n :], pad_mask[i, tokens - n :] = ids[i % batch, tokens - n :], 1
    return {"ids": ids, "pad_ids": pad_ids, "pad_mask": pad_mask}


def _compare(args: argparse.Namespace, found, reference, report: dict, devices: list[str]) -> int:
    from nemotron_jax.parity import compare_arrays
    from nemotron_jax.parity.report import plot, text

    comparison = compare_arrays(found, reference, report, tolerance=args.tolerance)
    if args.plot is not None and processes.first():
        plot(comparison, args.plot)
    if args.json:
        mesh = report.get("mesh", {})
        extra = {
            "tensor_parallel": mesh.get("tensor", 1),
            "fused_boundaries": report.get("fused_boundaries"),
            "devices": devices,
        }
        cli.print_json({**comparison.to_json(), **extra})
    else:
        print(text(comparison))
    return cli.DONE if comparison.ok else cli.FAILED
