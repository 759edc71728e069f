"""Whole models on all devices there are, fused and unfused, against stored PyTorch outputs. Started as a program.

    python tests/gpu/model_checks.py                                                       # one process, all its GPUs
    python scripts/launch_ranks.py --devices 0,0 --nccl LIB -- tests/gpu/model_checks.py   # two ranks on one GPU

In float32 (products at HIGHEST) every array of a reference is compared: logits, layers, states, greedy tokens. Prints
one line per model and plan, and the number of checks that failed; the exit status is 1 if any did.
"""

import argparse
import faulthandler
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODELS = {
    "tiny-nemotron-h": (
        ROOT / "nemotron_jax/models/tiny-nemotron-h",
        ROOT / "tests/data/models/tiny-nemotron-h/reference.npz",
    ),
    "tiny-nemotron-3": (
        ROOT / "tests/data/models/tiny-nemotron-3",
        ROOT / "tests/data/models/tiny-nemotron-3/reference.npz",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=[*MODELS], help="of the trained ones, or names in tests/data/tiny"
    )
    parser.add_argument("--plans", nargs="+", default=["none", "all/one_shot", "all/two_shot"])
    parser.add_argument("--no-heldout", action="store_true", help="leave out the held-out text: its messages are large")
    parser.add_argument("--tensor-parallel", type=int, help="default: all devices")
    parser.add_argument("--watchdog", type=float, default=240.0, help="seconds after which the program ends itself")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.watchdog, exit=True)
    import jax
    import numpy as np

    import nemotron_jax

    mesh = nemotron_jax.make_mesh(args.tensor_parallel or jax.device_count())
    first, failed = jax.process_index() == 0, 0
    if first:
        print(f"{mesh.size} x {jax.devices()[0].device_kind}, {jax.process_count()} processes, jax {jax.__version__}")
    for name in args.models:
        folder, reference = MODELS.get(name) or (
            ROOT / f"tests/data/tiny/{name}/hf",
            ROOT / f"tests/data/tiny/{name}/ref.npz",
        )
        with np.load(reference) as stored:
            arrays = {k: stored[k] for k in stored.files if not (args.no_heldout and k.startswith("heldout"))}
        for plan in args.plans:
            begin = time.perf_counter()
            model = nemotron_jax.load(folder, mesh=mesh, fusion=plan, dtype="float32")
            found = nemotron_jax.compare(model, arrays)
            failed += not found.ok
            if first:
                greedy = f"{found.greedy.matches}/{found.greedy.total}"
                seconds = time.perf_counter() - begin
                print(
                    f"{'ok  ' if found.ok else 'FAIL'} {name} tp {mesh.size} {plan}: ran {found.run['plan']}, "
                    f"logits off by {found.max_abs_logit_error:.1e}, greedy {greedy}, {seconds:.0f} s",
                    *found.problems,
                    flush=True,
                )
    if first:
        print(f"{failed} failed", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
