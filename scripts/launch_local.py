#!/usr/bin/env python3
"""Run one command as several processes on this machine, and end all of them when one ends badly.

    python scripts/launch_local.py -n 2 -- nemotron-jax generate --prompt "In the beginning" --tensor-parallel 4

starts two processes that find each other (through NEMOTRON_JAX_COORDINATOR and so on, at a port that is free). Without
GPUs each has its share of the virtual CPU devices that the command asks for. With GPUs say which ones:

    python scripts/launch_local.py --devices 0,1,2,3 -- nemotron-jax ...     # a GPU for each of four processes
    python scripts/launch_local.py --devices 0+1,2+3 -- nemotron-jax ...     # two GPUs for each of two processes
    python scripts/launch_local.py --devices 0,0 -- nemotron-jax ...         # two processes share GPU 0

Sharing a GPU needs NCCL 2.29 or newer (--nccl names its library where the installed one is older) and CUDA MPS, which
is started here for the time of the run. launch_ranks.py does the same for programs that know nothing of processes.

Process 0 keeps this terminal's input and outputs; lines of the others appear on stderr behind their number. The exit
status is that of the first process that ended badly, 124 after --limit, 130 after Ctrl-C.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

from launch_ranks import free_port, start_mps, stop_mps

GRACE = 10.0  # seconds in which the others may say themselves why they end, after one has ended badly


def environment(index: int, count: int, port: int, devices: list[str] | None, nccl: str | None, mps: str | None):
    env = dict(os.environ)
    env |= {
        "NEMOTRON_JAX_COORDINATOR": f"127.0.0.1:{port}",
        "NEMOTRON_JAX_NUM_PROCESSES": str(count),
        "NEMOTRON_JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }
    if devices is None:
        env["JAX_PLATFORMS"] = "cpu"
        return env
    env["NEMOTRON_JAX_LOCAL_DEVICES"] = devices[index].replace("+", ",")
    # NVLink multicast stays off, as in launch_ranks.py.
    env |= {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    sharing = devices.count(devices[index])
    if sharing > 1:
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        env.setdefault("PALLAS_KERNELS_MAX_BLOCKS", str(132 // sharing))  # blocks that wait for each other must all run
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / sharing:.3f}")
        if sharing > 2:
            env.setdefault("NCCL_MAX_NCHANNELS", "2")  # with four ranks on a GPU, larger messages have hung otherwise
    if nccl:
        env["LD_PRELOAD"] = os.path.abspath(nccl)
    if mps:
        env["CUDA_MPS_PIPE_DIRECTORY"] = env["CUDA_MPS_LOG_DIRECTORY"] = mps
    return env


def prepare() -> None:
    """In the child: it ends when this launcher does, however that ends; Ctrl-C works though a shell may ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def relay(index: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def end(processes: list[subprocess.Popen], number: int) -> None:
    """Send a signal to each process that runs, with whatever it has started."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def wait(processes: list[subprocess.Popen], seconds: float) -> bool:
    """Whether all ended in that time."""
    limit = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        time.sleep(0.05)
    return all(process.poll() is not None for process in processes)


def described(process: subprocess.Popen) -> str:
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def supervise(processes: list[subprocess.Popen], limit: float | None) -> int:
    """Wait until all have ended well, or one badly; returns the exit status. Some may still run."""
    started = time.monotonic()
    while True:
        bad = next(((i, p) for i, p in enumerate(processes) if p.poll()), None)
        if bad is not None:
            index, process = bad
            code = process.returncode
            told = code > 0 and wait(processes, GRACE) and all(p.returncode == code for p in processes)
            if not told:  # where all ended alike, process 0 has said why
                print(f"launch_local: process {index} (pid {process.pid}) {described(process)}", file=sys.stderr)
            return code if code > 0 else 128 - code
        if all(p.returncode == 0 for p in processes):
            return 0
        if limit is not None and time.monotonic() - started > limit:
            running = [i for i, p in enumerate(processes) if p.returncode is None]
            print(f"launch_local: {limit:g} s are over, processes {running} still run; ending all", file=sys.stderr)
            return 124
        time.sleep(0.05)


def run(command: list[str], count: int, devices: list[str] | None, limit: float | None, nccl: str | None, mps: bool):
    shared = devices is not None and len(set(devices)) < len(devices)
    folder = start_mps() if shared and mps else None
    port = free_port()
    processes: list[subprocess.Popen] = []
    threads = []
    try:
        for index in range(count):
            own = {} if index == 0 else {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment(index, count, port, devices, nccl, folder),
                    stderr=None if index == 0 else subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                    preexec_fn=prepare,
                    **own,
                )
            )
        for index, process in enumerate(processes[1:], 1):
            threads.append(threading.Thread(target=relay, args=(index, process), daemon=True))
            threads[-1].start()
        return supervise(processes, limit)
    except KeyboardInterrupt:
        end(processes, signal.SIGINT)
        wait(processes, GRACE)
        return 130
    finally:
        end(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        for thread in threads:
            thread.join(5)
        if folder:
            stop_mps(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-n", "--processes", type=int, metavar="N", help="how many (default: one for each of --devices)"
    )
    parser.add_argument("--devices", metavar="I,...", help="GPUs of each process; without it they run on the CPU")
    parser.add_argument("--limit", type=float, metavar="S", help="end all after so many seconds")
    parser.add_argument("--nccl", metavar="FILE", help="libnccl.so.2 to preload in every process")
    parser.add_argument("--no-mps", action="store_true", help="do not start CUDA MPS where processes share a GPU")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    devices = args.devices.split(",") if args.devices else None
    count = args.processes or len(devices or ())
    faults = []
    if not command:
        faults.append("found no command behind --")
    if count < 1 or (devices is not None and count != len(devices)):
        faults.append(f"-n {args.processes} with --devices {args.devices}: accepted one of them, or as many as devices")
    if devices and (bad := [d for d in devices if not all(part.isdecimal() for part in d.split("+"))]):
        faults.append(f"--devices: found {bad}, accepted numbers of GPUs, joined by + where a process has several")
    if faults:
        print("launch_local: " + "; ".join(faults), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(command, count, devices, args.limit, args.nccl, not args.no_mps)
    except FileNotFoundError as error:
        print(f"launch_local: {shlex.join(command)}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
