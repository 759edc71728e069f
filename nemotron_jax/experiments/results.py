"""The results file: whole at every moment, so that an experiment that was killed goes on where it was."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemotron_jax.experiments.spec import Run
from nemotron_jax.files import named

logger = logging.getLogger("nemotron_jax")

FINAL = ("done", "refused", "wrong")  # not run again; a failed one is
RUNNING = "running"
CRASHES = 2  # a run that took the process down so often is left alone


def read_results(folder: str | Path) -> dict[str, dict[str, Any]]:
    """{key of the run: its settings and result}; empty where there is no file yet.

    Raises:
      ValueError: the file is no results file.
    """
    path = Path(folder) / "results.json"
    if not path.exists():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return {entry["key"]: entry for entry in held["runs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: found no results of an experiment ({error!r}); move it away to start anew"
        ) from error


def write_results(folder: str | Path, entries: Sequence[dict[str, Any]]) -> None:
    """Replace the file in one step."""
    path = Path(folder) / "results.json"
    partial = path.with_name(f".results.{os.getpid()}.partial")
    with named(path, "a file for the results, on a disk that has room"):
        partial.write_text(json.dumps({"runs": list(entries)}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)


def run_all(runs: Sequence[Run], folder: str | Path, execute: Callable[[Run], dict[str, Any]]) -> list[dict[str, Any]]:
    """Execute what is not done yet, writing the file before and after each run.

    Results of runs that the experiment no longer names are kept in the file, behind the others.

    Returns:
      The entries of ``runs``, in their order.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = read_results(folder)

    def save() -> None:
        wanted = {run.key for run in runs}
        rest = [entry for key, entry in known.items() if key not in wanted]
        write_results(folder, [known[run.key] for run in runs if run.key in known] + rest)

    for i, run in enumerate(runs):
        entry = known.get(run.key, {})
        if entry.get("status") in FINAL:
            continue
        crashes = entry.get("crashes", 0) + (entry.get("status") == RUNNING)
        base = {"key": run.key, **run.settings(), "crashes": crashes}
        if crashes >= CRASHES:
            known[run.key] = base | {"status": "failed", "reason": f"took the process down {crashes} times"}
            save()
            continue
        logger.info("run %d of %d: %s", i + 1, len(runs), run.title())
        known[run.key] = base | {"status": RUNNING}
        save()
        known[run.key] = base | execute(run)
        save()
    return [known[run.key] for run in runs]
