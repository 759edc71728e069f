#!/usr/bin/env python3
"""How many pieces the host launches for one step of the decoding loop: one command buffer is best, and says so.

    python scripts/graph_segments.py nemotron-h-8b --kernels none auto
    python scripts/graph_segments.py nemotron-h-8b --device h200       without a GPU, with jax's CUDA plugin installed

XLA records what it can of a loop's body as command buffers (CUDA graphs), which start with one launch; whatever it
cannot record stands between them and is launched by the host in every step. The decoding program of the generator is
compiled, not run; XLA's dump of its thunks is read. Prints for each setting the pieces of the loop's body in order.
Collectives are never recorded: over several devices those of the embedding and of the arg-max stand beside the buffers.
Exit status 1 if a step with kernels is cut into more command buffers than one without.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DUMP = "thunk_sequence_after_thunk_passes.txt"
LINE = re.compile(r"^(\s*)\d+: k(\w+)\s+\[[^]]*\]\s*(\S*)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One entry of the loop's body: its kind, its name, and how many thunks are inside it."""

    kind: str
    name: str
    inside: int = 0


def loop_body(dump: str) -> list[Piece]:
    """The entries of the body of the longest loop in XLA's list of thunks.

    Raises:
      ValueError: there is no loop in it.
    """
    lines = dump.splitlines()
    bodies = []
    for number, line in enumerate(lines):
        if line.strip() != "body:":
            continue
        depth = len(line) - len(line.lstrip())
        pieces: list[list] = []
        level = None
        for inner in lines[number + 1 :]:
            match = LINE.match(inner)
            if inner.strip() and len(inner) - len(inner.lstrip()) <= depth:
                break
            if match is None:
                continue
            level = len(match[1]) if level is None else level
            if len(match[1]) == level:
                pieces.append([match[2], match[3], 0])
            elif pieces:
                pieces[-1][2] += 1
        bodies.append([Piece(*piece) for piece in pieces])
    if not bodies:
        raise ValueError("found no loop in the list of thunks")
    return max(bodies, key=lambda body: sum(1 + piece.inside for piece in body))


def segments(body: list[Piece]) -> int:
    """Launches by the host in one iteration: each command buffer, and each thunk outside of them."""
    return len(body)


def summary(body: list[Piece]) -> str:
    """In words: runs of equal kinds together."""
    parts = []
    for kind, group in itertools.groupby(body, lambda piece: piece.kind):
        pieces = list(group)
        inside = sum(piece.inside for piece in pieces)
        names = collections.Counter(piece.name for piece in pieces if piece.name != f"k{kind}")
        detail = f" of {inside} thunks" if kind == "CommandBuffer" else ""
        named = f" ({', '.join(names)})"[:80] if names and kind != "CommandBuffer" else ""
        parts.append(f"{len(pieces)} {kind}{detail}{named}")
    return ", ".join(parts)


def compile_step(model, batch: int, context: int, steps: int) -> None:
    """Compile the generator's greedy decoding program from shapes alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from nemotron_jax.generation.programs import vocab_columns, write_program
    from nemotron_jax.generation.sampling import Sampling, controls

    capacity, columns = context + steps, vocab_columns(model)
    shapes = model.cache_shapes(batch, capacity)

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(model.mesh, spec))

    cache = jax.tree.map(placed, shapes.tree, shapes.specs)
    logits = placed(jax.ShapeDtypeStruct((batch, columns), jnp.float32), P(model.rows_spec, model.vocab_spec))
    left = np.full(batch, steps, np.int32)
    arguments = controls(Sampling(), np.zeros(batch, np.int64), (), columns)
    write_program(model, batch, capacity, steps).lower(cache, logits, None, left, arguments).compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="preset or folder; no weights are read")
    parser.add_argument("--kernels", nargs="+", default=["none", "auto"], metavar="KERNELS")
    parser.add_argument("--plans", nargs="+", default=["none"], metavar="PLAN")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--layers", type=int, help="only the first N blocks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("h200",), help="compile for it without having it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_entry"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program that is kept is not compiled, so not dumped
        return report(args, Path(folder))


def report(args: argparse.Namespace, folder: Path) -> int:
    from nemotron_jax import NemotronH, make_mesh, targets
    from nemotron_jax.experiments.execute import first_layers
    from nemotron_jax.inspection import read_config
    from pallas_kernels import selection

    if args.device:
        targets.without_gpus()
        mesh = targets.absent(args.device, args.tensor_parallel).mesh(args.tensor_parallel)
    else:
        mesh = make_mesh(args.tensor_parallel)
    config = first_layers(read_config(args.model)[1], args.layers or 0)
    rows = []
    for plan, kernels in itertools.product(args.plans, args.kernels):
        for old in folder.rglob("*"):  # newer versions of XLA make a folder for each program
            if old.is_file():
                old.unlink()
        begin = time.perf_counter()
        model = NemotronH(config, mesh=mesh, dtype=args.dtype, fusion=plan)
        with selection.use(kernels):
            compile_step(model, args.batch, args.context, 32)
        row = {"plan": plan, "kernels": kernels, "compile_seconds": round(time.perf_counter() - begin, 1)}
        dumps = [body for path in folder.rglob(f"*{DUMP}") if (body := _body(path))]
        if dumps:
            body = max(dumps, key=lambda body: sum(1 + piece.inside for piece in body))
            row |= {"segments": segments(body), "thunks": sum(piece.inside or 1 for piece in body)}
            row["buffers"] = sum(piece.kind == "CommandBuffer" for piece in body)
            row["body"] = summary(body)
        rows.append(row)
        print(
            f"plan {plan}, kernels {kernels}: {row.get('segments', 'no')} pieces, {row.get('buffers', 'no')} command "
            f"buffers: {row.get('body', '')}",
            flush=True,
        )
    counted = [row for row in rows if "segments" in row]
    key = ", ".join(
        f"{r['plan']} {r['kernels']}: {r['segments']} pieces, {r['buffers']} buffers, {r['thunks']} thunks"
        for r in counted
    )
    if not counted:
        key = "XLA has no list of thunks for this device: nothing to count"
        print(key)
    if args.out:
        args.out.write_text(json.dumps({"key": key, "model": args.model, "rows": rows}, indent=1) + "\n")
    plain = {row["plan"]: row["buffers"] for row in counted if row["kernels"] == "none"}
    return int(any(row["buffers"] > plain.get(row["plan"], row["buffers"]) for row in counted))


def _body(path: Path) -> list[Piece]:
    try:
        return loop_body(path.read_text())
    except ValueError:
        return []


if __name__ == "__main__":
    sys.exit(main())
