#!/usr/bin/env python3
"""Run a JAX program as several processes, one per rank: on one GPU, on several, or both.

    python scripts/launch_ranks.py --devices 0,0 --nccl libnccl.so.2 -- my_program.py --its --arguments

starts two ranks that share GPU 0; `--devices 0,1` gives each rank a GPU of its own, `--devices 0,0,1,1` two ranks each.
The program needs no change: every process joins the others before the program starts, and `jax.devices()` lists all
ranks. With `--devices cpu,cpu` the same works without a GPU.

Sharing a GPU needs
* NCCL 2.29 or newer (older ones refuse with "Duplicate GPU detected"); pass its library with --nccl where the installed
  one is older. Peer pointers, which the kernels that read each other's memory need, are there in 2.32.3, not in 2.28.9.
* CUDA MPS, started here for the time of the run (--no-mps to leave it out): without it every hand-over between ranks
  waits for a time slice of some 2 ms.
* kernels that wait for their peers to leave room for them: 132 // ranks blocks on an H100 or H200.
* with four ranks, messages of at most 64 KiB for NCCL's own all-reduce: larger ones have hung.

A rank that dies would leave the others waiting for ever, so the first to fail ends all of them; so does --limit. Output
lines carry the rank's number. The exit status is that of the first rank that failed, 124 after the time limit.
"""

import argparse
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

VARIABLES = "LAUNCH_RANKS_COORDINATOR", "LAUNCH_RANKS_COUNT", "LAUNCH_RANKS_RANK", "LAUNCH_RANKS_DEVICE"


def child(program: list[str]) -> None:
    """Join the other ranks, then run the program as if it had been started alone."""
    import faulthandler

    limit = float(os.environ["LAUNCH_RANKS_LIMIT"])
    faulthandler.dump_traceback_later(max(1.0, limit - 5.0), exit=True)  # says where a stuck rank was
    import jax

    coordinator, count, rank, device = (os.environ[name] for name in VARIABLES)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, int(count), int(rank), local_device_ids=None if device == "cpu" else [int(device)]
    )
    sys.argv = program
    sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
    try:
        runpy.run_path(program[0], run_name="__main__")
    except BaseException as error:
        # Leave at once: an orderly exit would wait for the other ranks, and they for this one.
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(code, str) or not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if code not in (None, 0):
            os._exit(code if isinstance(code, int) else 1)
    jax.distributed.shutdown()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(devices: list[str], rank: int, port: int, limit: float, nccl: str | None, mps: str | None) -> dict:
    env = dict(os.environ)
    env.update(
        dict(zip(VARIABLES, (f"127.0.0.1:{port}", str(len(devices)), str(rank), devices[rank]), strict=True)),
        LAUNCH_RANKS_LIMIT=str(limit),
        PYTHONUNBUFFERED="1",
        NCCL_NVLS_ENABLE="0",
        NVSHMEM_DISABLE_NVLS="1",
    )
    sharing = devices.count(devices[rank])
    if sharing > 1 and devices[rank] != "cpu":
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        env.setdefault("PALLAS_KERNELS_MAX_BLOCKS", str(132 // sharing))  # blocks that wait for each other must all run
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / sharing:.3f}")
    if nccl:
        env["LD_PRELOAD"] = os.path.abspath(nccl)
    if mps:
        env["CUDA_MPS_PIPE_DIRECTORY"] = env["CUDA_MPS_LOG_DIRECTORY"] = mps
    return env


def start_mps() -> str | None:
    """Start the MPS daemon in a folder of its own; returns the folder, or None where there is no MPS."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("launch_ranks: no nvidia-cuda-mps-control here; ranks on one GPU will take turns slowly", file=sys.stderr)
        return None
    folder = tempfile.mkdtemp(prefix="mps-")
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    return folder


def stop_mps(folder: str) -> None:
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    try:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, timeout=20)
    except subprocess.TimeoutExpired:
        print("launch_ranks: MPS did not stop within 20 s", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)


def relay(rank: int, process: subprocess.Popen, quiet: bool) -> None:
    for line in process.stdout:
        if not (quiet and rank):
            print(f"[{rank}] {line}", end="", flush=True)


def stop_all(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            # The session of the rank: what it has started goes with it.
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def run(devices: list[str], program: list[str], limit: float, nccl: str | None, use_mps: bool, quiet: bool) -> int:
    shared_gpu = any(devices.count(d) > 1 for d in devices if d != "cpu")
    mps = start_mps() if shared_gpu and use_mps else None
    port, started = free_port(), time.monotonic()
    processes: list[subprocess.Popen] = []
    threads: list[threading.Thread] = []
    try:
        for rank in range(len(devices)):
            process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--child", *program],
                env=environment(devices, rank, port, limit, nccl, mps),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            processes.append(process)
            threads.append(threading.Thread(target=relay, args=(rank, process, quiet), daemon=True))
            threads[-1].start()
        while True:
            codes = [process.poll() for process in processes]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                print(f"launch_ranks: rank {failed[0][0]} ended with {failed[0][1]}; ending all", file=sys.stderr)
                return failed[0][1] if failed[0][1] > 0 else 128 - failed[0][1]
            if all(code == 0 for code in codes):
                return 0
            if time.monotonic() - started > limit:
                running = [rank for rank, code in enumerate(codes) if code is None]
                print(f"launch_ranks: {limit:g} s are over, ranks {running} still run; ending all", file=sys.stderr)
                return 124
            time.sleep(0.1)
    finally:
        stop_all(processes)
        for thread in threads:
            thread.join(5)
        if mps:
            stop_mps(mps)


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "--child":
        child(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", required=True, help="one entry per rank: the number of its GPU, or cpu")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which everything is ended")
    parser.add_argument("--nccl", help="libnccl.so.2 to preload in every rank")
    parser.add_argument("--no-mps", action="store_true", help="do not start CUDA MPS")
    parser.add_argument("--quiet", action="store_true", help="show only rank 0")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="a Python file, arguments")
    args = parser.parse_args()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    devices = args.devices.split(",")
    bad = [d for d in devices if d != "cpu" and not d.isdecimal()]
    if bad or not program or not os.path.isfile(program[0]):
        what = f"--devices has {bad}; accepted: numbers or cpu" if bad else "a Python file to run is missing after --"
        print(f"launch_ranks: {what}", file=sys.stderr)
        return 2
    return run(devices, program, args.limit, args.nccl, not args.no_mps, args.quiet)


if __name__ == "__main__":
    sys.exit(main())
