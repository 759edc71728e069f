#!/usr/bin/env python3
"""Run one command as several processes on this machine, and end all of them when one ends badly.

    python scripts/launch_local.py -n 2 -- nemotron-jax generate --prompt "In the beginning" --tensor-parallel 4

starts two processes that find each other (through NEMOTRON_JAX_COORDINATOR and so on, at a port that is free). Without
GPUs each has its share of the virtual CPU devices that the command asks for. With GPUs say which ones:

    python scripts/launch_local.py --devices 0,1,2,3 -- nemotron-jax ...     # a GPU for each of four processes
    python scripts/launch_local.py --devices 0+1,2+3 -- nemotron-jax ...     # two GPUs for each of two processes
    python scripts/launch_local.py --devices 0,0 -- nemotron-jax ...         # two processes share GPU 0

A Python file that knows nothing of processes needs no change: with --join each process joins the others
(jax.distributed) before the file starts, and `jax.devices()` lists the devices of all:

    python scripts/launch_local.py --devices 0,0 --join -- my_program.py --its --arguments

Sharing a GPU needs
* NCCL 2.29 or newer (older ones refuse with "Duplicate GPU detected"); pass its library with --nccl where the installed
  one is older. Peer pointers, which the kernels that read each other's memory need, are there in 2.32.3, not in 2.28.9.
* CUDA MPS, started here for the time of the run (--no-mps leaves it out): without it every hand-over between processes
  waits for a time slice of some 2 ms.
* kernels that wait for their peers to leave room for them: 132 // processes blocks on an H100 or H200.
* with four processes, messages of at most 64 KiB for NCCL's own all-reduce: larger ones have hung.

Process 0 keeps this terminal's input and outputs; lines of the others appear on stderr behind their number. The exit
status is that of the first process that ended badly, 124 after --limit, 130 after Ctrl-C.
"""

import argparse
import contextlib
import ctypes
import os
import runpy
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

GRACE = 10.0  # seconds in which the others may say themselves why they end, after one has ended badly
GONE = 60.0  # seconds after which a process that was killed is given up: a driver can hold one for ever
COORDINATOR, COUNT, INDEX = "NEMOTRON_JAX_COORDINATOR", "NEMOTRON_JAX_NUM_PROCESSES", "NEMOTRON_JAX_PROCESS_ID"
DEVICES = "NEMOTRON_JAX_LOCAL_DEVICES"
CHILD = "--joined"  # first argument of this script in a process of --join
ASKS_TO_END = {signal.SIGINT, signal.SIGTERM}


def environment(index: int, count: int, port: int, devices: list[str] | None, nccl: str | None, mps: str | None):
    env = dict(os.environ)
    env |= {COORDINATOR: f"127.0.0.1:{port}", COUNT: str(count), INDEX: str(index), "PYTHONUNBUFFERED": "1"}
    if devices is None:
        env["JAX_PLATFORMS"] = "cpu"
        return env
    env[DEVICES] = devices[index].replace("+", ",")
    env |= {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}  # NVLink multicast stays off
    sharing = devices.count(devices[index])
    if sharing > 1:
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        env.setdefault("PALLAS_KERNELS_MAX_BLOCKS", str(132 // sharing))  # blocks that wait for each other must all run
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / sharing:.3f}")
        if sharing > 2:
            env.setdefault("NCCL_MAX_NCHANNELS", "2")  # with four on a GPU, larger messages have hung otherwise
    if nccl:
        env["LD_PRELOAD"] = os.path.abspath(nccl)
    if mps:
        env["CUDA_MPS_PIPE_DIRECTORY"] = env["CUDA_MPS_LOG_DIRECTORY"] = mps
    return env


# ------------------------------------------------------------------------------------------------- in a process
def prepare() -> None:
    """In the child: it ends when this launcher does, however that ends; Ctrl-C works though a shell may ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_joined(limit: float, program: list[str]) -> None:
    """Join the other processes, then run a Python file as if it had been started alone."""
    import faulthandler

    if limit:
        faulthandler.dump_traceback_later(max(1.0, limit - 5.0))  # says where a stuck process was
    import jax

    devices = os.environ.get(DEVICES)
    if devices is None:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    local = None if devices is None else [int(d) for d in devices.split(",")]
    count, index = int(os.environ[COUNT]), int(os.environ[INDEX])
    jax.distributed.initialize(os.environ[COORDINATOR], count, index, local_device_ids=local)
    sys.argv = program
    sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
    try:
        runpy.run_path(program[0], run_name="__main__")
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exc()
        elif isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if code not in (None, 0):  # at once: an orderly exit would wait for the other processes, and they for this one
            os._exit(code if isinstance(code, int) else 1)
    jax.distributed.shutdown()


# ------------------------------------------------------------------------------------------------- around them
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_mps() -> str | None:
    """Start the MPS daemon in a folder of its own; returns the folder, or None where there is no MPS."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        say("no nvidia-cuda-mps-control here; processes on one GPU will take turns slowly")
        return None
    folder = tempfile.mkdtemp(prefix="mps-")
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    status = subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env).returncode
    if status:
        say(f"MPS does not start (status {status}); processes on one GPU will take turns slowly")
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def nccl_fault(file: str) -> str:
    """Why a file cannot be preloaded as NCCL, in a line; empty where it can.

    What ld.so cannot preload it passes over with a line on stderr, in every process and in every tool that one starts:
    XLA then finds no version in what ptxas says.
    """
    accepted = "accepted a whole libnccl.so.2, in a path without spaces and colons"
    try:
        with open(file, "rb") as opened:
            head, size = opened.read(64), opened.seek(0, os.SEEK_END)
    except OSError as error:
        return f"found no {file} that can be read ({error.strerror}), {accepted}"
    if len(head) == 64 and head.startswith(b"\x7fELF"):
        (table,), (entry, count) = struct.unpack_from("Q", head, 40), struct.unpack_from("HH", head, 58)
        if size < table + entry * count:  # the table of sections comes last
            return f"found {file} cut off at {size} of {table + entry * count} bytes, {accepted}"
    has_it = "import ctypes, sys; sys.exit(not hasattr(ctypes.CDLL(None), 'ncclGetVersion'))"
    env = os.environ | {"LD_PRELOAD": os.path.abspath(file)}
    done = subprocess.run([sys.executable, "-ISc", has_it], env=env, capture_output=True, text=True)
    said = done.stderr.splitlines() or ["a process with it was killed" if done.returncode < 0 else "no ncclGetVersion"]
    return f"found {file} of {size} bytes ({said[0]}), {accepted}" if done.returncode else ""


def stop_mps(folder: str) -> None:
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    try:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, timeout=20)
    except subprocess.TimeoutExpired:
        say("MPS did not stop within 20 s")
    shutil.rmtree(folder, ignore_errors=True)


def say(what: str) -> None:
    print(f"launch_local: {what}", file=sys.stderr, flush=True)


def relay(index: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def end(processes: list[subprocess.Popen], number: int) -> None:
    """Send a signal to each process and to whatever it has started, which may outlive it."""
    for process in processes:
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
                say(f"process {index} (pid {process.pid}) {described(process)}")
            return code if code > 0 else 128 - code
        if all(p.returncode == 0 for p in processes):
            return 0
        if limit is not None and time.monotonic() - started > limit:
            running = [i for i, p in enumerate(processes) if p.returncode is None]
            say(f"{limit:g} s are over, processes {running} still run; ending all")
            return 124
        time.sleep(0.05)


def run(command: list[str], count: int, devices: list[str] | None, limit: float | None, nccl: str | None, mps: bool):
    shared = devices is not None and len(set(devices)) < len(devices)
    folder = start_mps() if shared and mps else None
    port = free_port()
    processes: list[subprocess.Popen] = []
    threads = []
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)  # until each process that was started is known here
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)
        return supervise(processes, limit)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one does not wait
            end(processes, signal.SIGINT)
            wait(processes, GRACE)
        return 130
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)  # what is left takes a moment, and must be done
        end(processes, signal.SIGKILL)
        if not wait(processes, GONE):
            say(f"killed, but still there: {[process.pid for process in processes if process.returncode is None]}")
        for thread in threads:
            thread.join(5)
        if folder:
            stop_mps(folder)


def what_is_accepted(command: list[str]) -> str:
    """What is accepted behind --, where this was not."""
    hint = " (a Python file needs `python` in front)" if command[0].endswith(".py") else ""
    return f", accepted a program and its arguments{hint}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-n", "--processes", type=int, metavar="N", help="how many (default: one for each of --devices)"
    )
    parser.add_argument("--devices", metavar="I,...", help="GPUs of each process; without it they run on the CPU")
    parser.add_argument("--limit", type=float, metavar="S", help="end all after so many seconds")
    parser.add_argument(
        "--join", action="store_true", help="the command is a Python file; join the processes before it starts"
    )
    parser.add_argument("--nccl", metavar="FILE", help="libnccl.so.2 to preload in every process")
    parser.add_argument("--no-mps", action="store_true", help="do not start CUDA MPS where processes share a GPU")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    devices = None if args.devices is None else args.devices.split(",")
    count = args.processes or len(devices or ())
    faults = []
    if not command:
        faults.append("found no command behind --")
    elif args.join and not os.path.isfile(command[0]):
        faults.append(f"--join: found {command[0]!r} behind --, accepted a Python file")
    elif not args.join and shutil.which(command[0]) is None:
        what = "not executable" if os.path.isfile(command[0]) else "no such program"
        faults.append(f"found {command[0]!r} behind --, {what}{what_is_accepted(command)}")
    if count < 1 or (devices is not None and count != len(devices)):
        faults.append(f"-n {args.processes} with --devices {args.devices}: accepted one of them, or as many as devices")
    if devices and (bad := [d for d in devices if not all(part.isdecimal() for part in d.split("+"))]):
        faults.append(f"--devices: found {bad}, accepted numbers of GPUs, joined by + where a process has several")
    if args.limit is not None and not 0 < args.limit < float("inf"):
        faults.append(f"--limit: found {args.limit}, accepted seconds above 0")
    if args.nccl is not None and (fault := nccl_fault(args.nccl)):
        faults.append(f"--nccl: {fault}")
    if faults:
        say("; ".join(faults))
        return 2
    if args.join:
        command = [sys.executable, os.path.abspath(__file__), CHILD, str(args.limit or 0), *command]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(command, count, devices, args.limit, args.nccl, not args.no_mps)
    except OSError as error:
        say(f"{shlex.join(command)}: {error}{what_is_accepted(command)}")
        return 2


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        sys.exit(run_joined(float(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
