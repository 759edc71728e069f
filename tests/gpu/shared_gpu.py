"""Two and four processes on one GPU, end to end, with one command on a machine that has one:

    python tests/gpu/shared_gpu.py --nccl libnccl.so.2       (--nccl only where the installed NCCL is older than 2.29)

For each number of processes: selftest passes; the shipped model, and four blocks of the 8B model's shapes with random
weights, write in float32 the tokens of one process at tensor degree 1, unfused and by every implementation that the
devices can run; and of a run one of whose processes is killed, nothing is left. Exit status 1 if anything is wrong.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "scripts" / "launch_local.py"
PLANS = ("none", "all/psum", "all/gather", "all/one_shot", "all/two_shot", "auto")
FOUR_BLOCKS = "M*-M"  # blocks 6 to 9 of the 8B model


def program(*arguments) -> list[str]:
    return [sys.executable, "-m", "nemotron_jax", *map(str, arguments)]


def launcher(ranks: int, options: list[str], *arguments) -> list[str]:
    where = ["-n", str(ranks)] if "cpu" in options else ["--devices", ",".join(["0"] * ranks)]
    where += [option for option in options if option != "cpu"]
    return [sys.executable, str(LAUNCHER), *where, "--", *program(*arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run(command: list[str], seconds: float) -> tuple[dict | None, str]:
    """The JSON object that a command prints, or None and what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"did not end within {seconds:g} s"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    last = "\n".join(done.stderr.splitlines()[-8:])
    return (found, "") if done.returncode == 0 and found else (found, f"status {done.returncode}: {last}")


def make_slice(folder: Path) -> str:
    """A checkpoint of four blocks of the 8B model, float32, with a small vocabulary. In a process of its own, on the
    CPU. Returns what went wrong, or nothing."""
    code = f"""
import dataclasses, jax
jax.config.update("jax_platforms", "cpu")
import nemotron_jax
config = nemotron_jax.NemotronHConfig.preset("nemotron-h-8b")
pattern = {FOUR_BLOCKS!r}
blocks = config.block_configs[:len(pattern)] if config.block_configs else config.block_configs
config = dataclasses.replace(
    config, hybrid_override_pattern=pattern, block_configs=blocks, vocab_size=4096, dtype="float32"
)
nemotron_jax.export(nemotron_jax.NemotronH(config, rngs=1), {str(folder)!r})
print('{{"made": true}}')
"""
    return run([sys.executable, "-c", code], 600)[1]


@dataclasses.dataclass
class Report:
    failures: int = 0
    checks: int = 0
    started: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, what: str, fault: str, detail: str = "") -> None:
        self.checks += 1
        self.failures += bool(fault)
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {'FAIL' if fault else 'ok  '} {what} {fault or detail}", flush=True)


def check_tokens(report: Report, model: list[str], name: str, prompts: Path, ranks: list[int], plans, options, seconds):
    asked = ["generate", *model, "--prompt-file", prompts, "--max-new-tokens", 24, "--ignore-eos", "--json"]
    asked += ["--dtype", "float32", "--batch-size", 2]
    alone, fault = run(program(*asked, "--fusion", "none"), seconds)
    report.say(f"{name}, one process", fault)
    if fault:
        return
    want = [o["tokens"] for o in alone["outputs"]]
    for n in ranks:
        for plan in plans:
            command = launcher(n, options, *asked, "--tensor-parallel", n, "--fusion", plan)
            found, fault = run(command, seconds)
            if found is not None and not fault:
                got = [o["tokens"] for o in found["outputs"]]
                fault = "" if got == want else f"other tokens: {got} instead of {want}"
            detail = "" if found is None else f"{found.get('fused_boundaries')} boundaries deferred"
            report.say(f"{name}, {n} processes, plan {plan}", fault, detail)


def check_selftest(report: Report, ranks: list[int], options, seconds) -> None:
    for n in ranks:
        found, fault = run(launcher(n, options, "selftest", "--json"), seconds)
        checks = [] if found is None else found.get("checks", [])
        bad = [f"{c['name']}: {c['detail']}" for c in checks if c["ok"] is False]
        ran = [c["name"] for c in checks if c["ok"]]
        fault = "; ".join(bad) or fault or ("" if ran else "no check ran")
        report.say(f"selftest, {n} processes", fault, f"passed: {', '.join(ran)}")


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdecimal() else 0
        except (OSError, ValueError):
            continue
        if parent == pid:
            found |= {int(entry.name)} | descendants(int(entry.name))
    return found


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has may wait for a parent that never asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return []


def check_killed(report: Report, ranks: list[int], options) -> None:
    for n in ranks:
        report.say(f"killed process of {n}", *killed(n, options))


def killed(n: int, options) -> tuple[str, str]:
    """Kill process 1 of a run; returns what went wrong, and how it went."""
    asked = ["generate", "--prompt", "In the beginning", "--ignore-eos", "--max-new-tokens", 4000, "--stream"]
    command = launcher(n, options, *asked, "--tensor-parallel", n, "--fusion", "auto")
    with tempfile.TemporaryFile("w+", errors="replace") as errors:  # nobody reads a pipe while this waits for stdout
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        process.stdout.read(80)
        family = descendants(process.pid)
        ours = [pid for pid in family if b"NEMOTRON_JAX_PROCESS_ID=1" in environment_of(pid)]
        begun = time.monotonic()
        if ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(min(ours), signal.SIGKILL)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "the others did not end within 60 s", ""
        seconds = time.monotonic() - begun
        errors.seek(0)
        err = errors.read().strip()
    if not ours:
        return f"no process 1 to kill, the run ended with status {process.returncode}: {err[-300:]}", ""
    time.sleep(1)
    left = [pid for pid in family if runs(pid)]
    fault = f"left processes {left}" if left else "" if seconds < 30 else f"took {seconds:.0f} s"
    fault = fault or ("" if "process 1" in err else f"not named: {err[-300:]}")
    return fault, f"all ended within {seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: 2,4)")
    parser.add_argument("--plans", nargs="+", default=PLANS, help=f"default: {' '.join(PLANS)}")
    parser.add_argument("--nccl", help="libnccl.so.2 to preload")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one run (default: 150)")
    parser.add_argument(
        "--only", choices=("selftest", "tiny", "8b", "killed"), action="append", help="a part (may repeat)"
    )
    parser.add_argument("--cpu", action="store_true", help="without a GPU: to try out this script")
    args = parser.parse_args()
    try:
        ranks = [int(n) for n in args.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks: found {args.ranks!r}, accepted numbers with commas between")
    options = ["--limit", str(args.limit)] + (["--nccl", args.nccl] if args.nccl else [])
    options += ["cpu"] if args.cpu else []
    parts = args.only or ("selftest", "tiny", "8b", "killed")
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text('{"tokens": [1, 41, 280]}\n{"tokens": [5, 7, 9, 11, 13]}\n')
        if "selftest" in parts:
            check_selftest(report, ranks, options, args.limit + 30)
        if "tiny" in parts:
            check_tokens(report, [], "shipped model", prompts, ranks, args.plans, options, args.limit + 30)
        if "8b" in parts:
            part, name = Path(folder) / "slice", f"8B blocks {FOUR_BLOCKS}"
            if fault := make_slice(part):
                report.say(name, fault)
            else:
                check_tokens(report, [str(part)], name, prompts, ranks, args.plans, options, args.limit + 30)
        if "killed" in parts:
            check_killed(report, ranks, options)
    print(f"{report.checks - report.failures} of {report.checks} passed, {time.monotonic() - report.started:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
