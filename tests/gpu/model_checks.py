"""Whole models on all devices there are, fused and unfused, against stored PyTorch outputs. Started as a program.

    python tests/gpu/model_checks.py                                    # one process, all its GPUs
    python tests/gpu/model_checks.py --models all --plans none --tensor-parallel 1 --threads 6      # on one GPU
    python scripts/launch_local.py --devices 0,0 --nccl LIB -- python tests/gpu/model_checks.py --quick     # two ranks

In float32 (products at HIGHEST) every array of a reference is compared: logits, layers, states, greedy tokens.
Most of the time goes into compiling: six programs for each model and plan, and none of it is shared. --quick leaves
out what needs programs of its own but tests no other code of a plan: left-padded rows, held-out text, and the pass
over prompt and greedy tokens at once; two programs are left. These are compiled at the same time for all plans of a
model, where JAX keeps compiled programs (JAX_COMPILATION_CACHE_DIR): the run then finds them. --threads runs several
models at the same time, where there is one process.

Every program that is traced and compiled is said, with the seconds since the start: a log that ends behind
"compiled" is that of a program that hangs, one that ends behind "compiling" is slow. Prints one line per model and
plan, and the number of checks that failed; the exit status is 1 if any did.
"""

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import json
import logging
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TINY = ROOT / "tests" / "data" / "tiny"
TRAINED = {
    "tiny-nemotron-h": ROOT / "nemotron_jax" / "models" / "tiny-nemotron-h",
    "tiny-nemotron-3": ROOT / "tests" / "data" / "models" / "tiny-nemotron-3",
}
EXTRA = ("heldout", "pad_", "full_logits")  # arrays that need programs of their own
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  [{threading.current_thread().name}] {text}", flush=True)


def float32_cases() -> list[str]:
    """Names of the random checkpoints whose references are float32."""
    metas = {path.parent.name: json.loads(path.read_text()) for path in sorted(TINY.glob("*/meta.json"))}
    return [name for name, meta in metas.items() if meta["dtype"] == "float32"]


def paths(name: str) -> tuple[Path, Path]:
    """Folder of a model, and its reference."""
    if name in TRAINED:
        return TRAINED[name], ROOT / "tests" / "data" / "models" / name / "reference.npz"
    return TINY / name / "hf", TINY / name / "ref.npz"


def announce_programs() -> None:
    """Say each program of a model before and after it is compiled."""
    import jax

    logger = logging.getLogger("nemotron_jax")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        text = record.getMessage()[:150]
        say(f"compiling: {text}" if text.startswith("fusion plan") else text)

    handler.emit = emit
    logger.addHandler(handler)
    logger.propagate = False

    def compiled(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and seconds > 0.5:
            say(f"compiled in {seconds:.1f} s")

    jax.monitoring.register_event_duration_secs_listener(compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=[*TRAINED], help="trained ones, names in tests/data/tiny, or all"
    )
    parser.add_argument("--plans", nargs="+", default=["none", "all/one_shot", "all/two_shot"])
    parser.add_argument("--quick", action="store_true", help="only what needs no programs of its own")
    parser.add_argument("--no-heldout", action="store_true", help="leave out the held-out text: its messages are large")
    parser.add_argument("--tensor-parallel", type=int, help="default: all devices")
    parser.add_argument("--threads", type=int, default=1, help="models at the same time, with one process")
    parser.add_argument("--watchdog", type=float, default=240.0, help="seconds after which the program ends itself")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.watchdog, exit=True)
    from nemotron_jax import processes

    processes.join(processes.settings())
    import jax

    import nemotron_jax

    mesh = nemotron_jax.make_mesh(args.tensor_parallel or jax.device_count())
    several = jax.process_count() > 1
    say(f"{mesh.size} x {jax.devices()[0].device_kind}, {jax.process_count()} processes, jax {jax.__version__}")
    announce_programs()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    names = [*TRAINED, *float32_cases()] if args.models == ["all"] else args.models
    left_out = EXTRA if args.quick else EXTRA[:1] if args.no_heldout else ()
    absent = [name for name in names if not all(path.exists() for path in paths(name))]
    checks = [{"name": name, "ok": False, "problem": "its files are not here"} for name in absent]
    names = [name for name in names if name not in absent]
    # ranks must start their programs in the same order, so threads are for one process
    with concurrent.futures.ThreadPoolExecutor(1 if several else args.threads) as pool:
        running = [pool.submit(check, name, args.plans, mesh, left_out, several) for name in names]
        for done in running:
            checks += done.result()
            if args.out and jax.process_index() == 0:  # what is known so far, should the rest be cut off
                found = {"key": summary(checks, mesh.size), "checks": checks}
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    say(summary(checks, mesh.size))
    processes.leave()
    return int(any(not entry["ok"] for entry in checks))


def summary(checks: list[dict], devices: int) -> str:
    failed = [entry for entry in checks if not entry["ok"]]
    text = f"{len(checks) - len(failed)} of {len(checks)} models and plans equal their references on {devices} devices"
    return text + "".join(f"; FAILED {entry['name']}: {entry['problem'][:150]}" for entry in failed)


def compile_ahead(model, plans: list[str], arrays) -> None:
    """Compile what --quick runs for every plan at once, so that the runs find it among the programs that JAX keeps."""
    import numpy as np

    batch, tokens = arrays["ids"].shape
    cache = model.new_cache(batch, tokens + arrays["greedy"].shape[1])
    state = dataclasses.replace(cache, longest=None)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = []
        for plan in plans:
            model.fusion = plan
            for length, capture in ((tokens, True), (1, False)):
                program = model.forward_program(
                    batch, length, masked=False, capacity=cache.capacity or 0, capture=capture
                )
                ids, _ = model.check_ids(np.zeros((batch, length), np.int32))
                running.append(pool.submit(program.lower(ids, None, state).compile))
        for done in running:
            done.result()
    say(f"compiled {len(running)} programs ahead")


def check(name: str, plans: list[str], mesh, left_out: tuple[str, ...], several: bool) -> list[dict]:
    """Every plan of one model; what was found, by plan."""
    import jax
    import numpy as np

    import nemotron_jax
    from nemotron_jax.parity.reference import read_reference

    threading.current_thread().name = name  # for `say`
    folder, file = paths(name)
    with np.load(file) as stored:
        kept = {k: stored[k] for k in stored.files if not k.split("/")[-1].startswith(left_out)}
    reference = read_reference(kept, "fixed")
    model, found = None, []
    for plan in plans:
        begin = time.monotonic()
        label = f"{name} tp {mesh.size} {plan}"
        say(f"begins {label}")
        entry = {"name": label, "ok": False, "problem": ""}
        try:
            if model is None:
                model = nemotron_jax.load(folder, mesh=mesh, fusion=plan, dtype="float32")
                if left_out == EXTRA and jax.config.jax_compilation_cache_dir:
                    compile_ahead(model, plans, reference.arrays)
            model.fusion = plan
            result = nemotron_jax.compare(model, reference)
            entry |= {"ok": result.ok and bool(result.within_tolerance), "problem": "; ".join(result.problems)}
            entry |= {"ran": result.run["plan"], "max_abs_logit_error": result.max_abs_logit_error}
            entry |= {"greedy": [result.greedy.matches, result.greedy.total], "arrays": sorted(result.arrays)}
        except Exception as error:
            entry["problem"] = f"{type(error).__name__}: {error}"
            if several:  # the others wait in a sum that this rank does not come to
                raise
        entry["seconds"] = round(time.monotonic() - begin, 1)
        found.append(entry)
        shown = {k: v for k, v in entry.items() if k not in ("name", "ok", "arrays")}
        say(f"{'ok  ' if entry['ok'] else 'FAIL'} {label}: {shown}")
    return found


if __name__ == "__main__":
    sys.exit(main())
