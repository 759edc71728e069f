#!/usr/bin/env python3
"""Run a named list of measurements and checks on a machine that is at hand for a short time, whatever goes wrong.

    python scripts/measure.py one-gpu --seconds 570 --out build/measured --pack one-gpu.tar.gz
    python scripts/measure.py --list                    the lists, their jobs and how long each should take
    python scripts/measure.py one-gpu --dry-run         every job in its smallest form on CPU devices

The lists are in measure_jobs.py, the most valuable jobs first. Each job is a command with a limit of its own. A job
that fails, or is ended at its limit with everything that it has started, does not stop the others; one that would not
be done in the time that is left is skipped, and a shorter one behind it may run. DIR gets NAME.log (all output),
NAME.json (results), machine.json, and summary.json and summary.md, which are up to date whenever the run is cut off.

The same command again goes on where the last one stopped: what has ended, well or badly, is not run again (--again
does). So a machine that takes commands of ten minutes at most is used by giving it the same command twice.

--compilation-cache DIR keeps compiled programs and autotuning results between jobs: programs that share matrix
products then also share the choice of kernels for them. Exit status 1 if any job of the list has failed so far.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.metadata
import json
import lzma
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from launch_local import nccl_fault
from measure_jobs import LISTS, ROOT, Job, Setting, key_figure

GRACE = 5.0  # seconds between asking a job to end and ending it
GONE = 30.0  # seconds after which a process that was killed is given up: a driver can hold one for ever
RESERVE = 5.0  # seconds kept for ending the last job and writing the summary
ENDED = ("ok", "failed", "limit")  # not run again; "skipped", "cut" and "running" are
VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "nvidia-nccl-cu13", "torch", "transformers", "triton")


@dataclasses.dataclass
class Entry:
    """What became of one job: status, wall-clock seconds, the figure to read first."""

    name: str
    status: str
    seconds: float = 0.0
    key: str = ""


class Campaign:
    """The jobs of one list, and what became of them so far."""

    def __init__(
        self,
        name: str,
        jobs: list[Job],
        setting: Setting,
        seconds: float,
        again: bool = False,
        archive: Path | None = None,
    ):
        self.name, self.jobs, self.setting, self.seconds, self.archive = name, jobs, setting, seconds, archive
        self.began = time.monotonic()
        self.entries: dict[str, Entry] = {}
        self.file = setting.out / "summary.json"
        try:
            stored = self._stored()
        except ValueError as error:
            raise ValueError(f"found {self.file}, no JSON ({error}), accepted what this program wrote") from None
        if not again:
            self.entries = {e["name"]: Entry(**e) for e in stored.get(name, [])}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began) - RESERVE

    def run(self) -> None:
        # what was cut off last time comes last: it may be what took the machine down
        waiting = [job for job in self.jobs if self._status(job) not in ENDED]
        waiting.sort(key=lambda job: self._status(job) in ("running", "cut"))
        for job in waiting:
            if job.seconds > self.left:
                self._note(Entry(job.name, "skipped", 0.0, f"needs {job.seconds:g} s, {max(self.left, 0):.0f} s left"))
                continue
            self._note(Entry(job.name, "running"))
            print(f"{time.monotonic() - self.began:5.0f} s  {job.name} ...", flush=True)
            self._note(self._one(job))
            entry = self.entries[job.name]
            print(f"{time.monotonic() - self.began:5.0f} s  {entry.status} {job.name}: {entry.key}", flush=True)

    def _stored(self) -> dict:
        return json.loads(self.file.read_text()) if self.file.is_file() else {}

    def _status(self, job: Job) -> str:
        return self.entries[job.name].status if job.name in self.entries else "waiting"

    def _one(self, job: Job) -> Entry:
        missing = job.missing(self.setting)
        if missing:
            return Entry(job.name, "skipped", 0.0, missing)
        log, result = self.setting.out / f"{job.name}.log", self.setting.result(job)
        result.unlink(missing_ok=True)
        limit = min(job.limit, self.left)
        begin = time.monotonic()
        status, code = execute(
            job.arguments(self.setting), job.environment(self.setting), log, result if job.stdout else None, limit
        )
        seconds = time.monotonic() - begin
        if status == "limit":
            status = "limit" if limit == job.limit else "cut"
            with log.open("a") as file:
                file.write(f"\nmeasure: ended after {seconds:.0f} s, {limit:.0f} s were allowed\n")
        key = key_figure(result, log)
        return Entry(job.name, status, round(seconds, 1), key if status == "ok" else f"status {code}; {key}")

    def _note(self, entry: Entry) -> None:
        self.entries[entry.name] = entry
        everything = self._stored()
        everything[self.name] = [dataclasses.asdict(e) for e in self.entries.values()]
        replace(self.file, json.dumps(everything, indent=1) + "\n")
        replace(self.setting.out / "summary.md", "\n\n".join(table(k, v) for k, v in everything.items()) + "\n")
        if self.archive:
            pack(self.setting.out, self.archive)

    def table(self) -> str:
        return table(self.name, [dataclasses.asdict(e) for e in self.entries.values()])


def table(name: str, entries: list[dict]) -> str:
    rows = [f"| {name} | status | seconds | key figure |", "|---|---|---|---|"]
    rows += [
        f"| {e['name']} | {e['status']} | {e['seconds']:.0f} | {e['key'].replace('|', '/')[:160]} |" for e in entries
    ]
    return "\n".join(rows)


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: the run may be cut off at any time."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


# ------------------------------------------------------------------------------------------------- processes
def execute(command: list[str], environment: dict, log: Path, stdout: Path | None, limit: float) -> tuple[str, int]:
    """Run one command; returns (ok | failed | limit, its exit status). Nothing that it started is left running."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        results = stack.enter_context(stdout.open("w")) if stdout else output
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=results, stderr=output, env=environment,
                cwd=ROOT, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        except OSError as error:
            output.write(f"measure: {error}\n")
            return "failed", 127
        status = "limit"
        try:
            if ended_within(process, limit):
                status = "failed" if process.returncode else "ok"
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                ended_within(process, GRACE)
        finally:
            end_descendants(process)
        return status, process.returncode


def end_with_parent() -> None:
    """In the child: it does not outlive this program, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def descendants(parents: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(parents)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found |= set(new)
        waiting += new
    return found


def end_descendants(process: subprocess.Popen) -> None:
    """End whatever the job has left: this process is made the parent of orphans, so all of it is below us."""
    limit = time.monotonic() + GRACE
    while (found := descendants({os.getpid()})) and time.monotonic() < limit:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap(process)
        time.sleep(0.05)
    ended_within(process, GONE)


def ended_within(process: subprocess.Popen, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < limit:
        reap(process)
        time.sleep(0.05)
    return process.poll() is not None


def reap(process: subprocess.Popen) -> None:
    """Let go of the orphans that have ended: who looks for them must not find them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == process.pid:
                process.poll()
            else:
                os.waitpid(ended.si_pid, 0)


def adopt_orphans() -> None:
    """Processes whose parent ends become ours, and not those of the machine's first process (Linux)."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


# ------------------------------------------------------------------------------------------------- machine
def machine(command: str) -> dict:
    def shell(*arguments):
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
            return done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}"

    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    query = "index,name,driver_version,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "commit": shell("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "python": sys.version.split()[0],
        "versions": {package: version(package) for package in VERSIONS},
        "cpus": os.cpu_count(),
        "gpus": shell("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "links": shell("nvidia-smi", "topo", "-m"),
    }


def unpacked(nccl: Path | None, out: Path) -> Path | None:
    """The library itself, where it was given compressed with xz."""
    if nccl is None or nccl.suffix != ".xz":
        return nccl
    library = out / "libnccl.so.2"
    if not library.is_file():
        partial = out / f".{library.name}.partial"
        try:
            with lzma.open(nccl) as source:
                partial.write_bytes(source.read())
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"--nccl: found {nccl}, broken ({error}), accepted libnccl.so.2 packed with xz") from None
        partial.replace(library)
    return library


def pack(out: Path, archive: Path) -> None:
    """One file with all results, after each job: what a machine gives back may be few files, and it may end early."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as tar:
        for path in sorted(out.iterdir()):
            if path.suffix in (".json", ".log", ".md") and path.stat().st_size < 8 << 20:
                tar.add(path, arcname=f"{out.name}/{path.name}")
    partial.replace(archive)


def describe() -> str:
    lines = []
    for name, jobs in LISTS.items():
        lines.append(f"{name}: {len(jobs)} jobs, about {sum(job.seconds for job in jobs) / 60:.0f} minutes")
        lines += [f"  {job.name:22} {job.seconds:4.0f} s, ended at {job.limit:4.0f} s  {job.about}" for job in jobs]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", nargs="?", choices=list(LISTS), metavar="LIST", help=" | ".join(LISTS))
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: build/measured/LIST)")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="for all of it (default: 600)")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="these jobs, in this order")
    parser.add_argument("--again", action="store_true", help="run also what has ended in an earlier run into DIR")
    parser.add_argument("--compilation-cache", type=Path, metavar="DIR", help="keep compiled programs there")
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="libnccl.so.2 (or .xz) for one process per rank")
    parser.add_argument("--mamba-ssm", type=Path, metavar="DIR", help="unpacked source of mamba_ssm, for the peers")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="keep all results in this .tar.gz too")
    parser.add_argument("--dry-run", action="store_true", help="each job in its smallest form, on CPU devices")
    parser.add_argument("--list", dest="show", action="store_true", help="print the lists and stop")
    args = parser.parse_args()
    if args.show or args.list is None:
        print(describe())
        return 0 if args.show else 2
    jobs = {job.name: job for job in LISTS[args.list]}
    unknown = [name for name in args.only or () if name not in jobs]
    given = {"--nccl": args.nccl, "--mamba-ssm": args.mamba_ssm}
    faults = [f"{option}: found no {path}" for option, path in given.items() if path and not path.exists()]
    if unknown:
        faults.append(f"--only: found {', '.join(unknown)}, accepted {', '.join(jobs)}")
    if faults:
        print("measure: " + "; ".join(faults), file=sys.stderr)
        return 2
    chosen = [jobs[name] for name in args.only] if args.only else list(jobs.values())
    out = (args.out or ROOT / "build" / "measured" / args.list).resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    try:
        out.mkdir(parents=True, exist_ok=True)
        nccl = unpacked(args.nccl and args.nccl.resolve(), out)
        if nccl and (fault := nccl_fault(str(nccl))):
            raise ValueError(f"--nccl: {fault}")
        setting = Setting(
            out,
            dry=args.dry_run,
            cache=args.compilation_cache and args.compilation_cache.resolve(),
            nccl=nccl,
            mamba_ssm=args.mamba_ssm and args.mamba_ssm.resolve(),
        )
        campaign = Campaign(args.list, chosen, setting, args.seconds, args.again, args.pack)
        replace(out / "machine.json", json.dumps(machine(shlex.join(sys.argv)), indent=1) + "\n")
        if args.pack:
            pack(out, args.pack)  # now, since a file that cannot be written would end the run after its first job
    except (OSError, ValueError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    try:
        campaign.run()
    except KeyboardInterrupt:
        print("measure: interrupted", file=sys.stderr)
    finally:
        print(campaign.table(), flush=True)
    bad = [e.name for e in campaign.entries.values() if e.status in ("failed", "limit")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
