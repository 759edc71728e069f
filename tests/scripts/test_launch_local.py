"""The launcher: processes find each other, one that ends badly ends all and is named, and none is left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.scripts.elf import shared_library
from tests.signals import sigint
from tests.test_processes import ENDLESS, LAUNCHER, WITHIN, environment, program

SUM = """
import sys, jax, numpy as np
from jax.sharding import PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
x = jax.make_array_from_callback((2,), jax.NamedSharding(mesh, P("tensor")), lambda i: np.array([3.0, 4.0])[i])
psum = lambda x: jax.lax.psum(x.sum(), "tensor")
total = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=P("tensor"), out_specs=P()))(x)
print("sum", float(total), "of", jax.process_count(), sys.argv[1:])
"""
FAIL = "import jax, sys, time\nif jax.process_index() == 1: sys.exit(7)\ntime.sleep(600)\n"
VARIABLES = "import os, json; print(json.dumps(dict(os.environ)))"
# A process with a child, which Ctrl-C does not reach; it says when both are there.
FAMILY = ["sh", "-c", "sleep 600 & echo started; wait"]
DIES = ["sh", "-c", "sleep 600 & echo started; sleep 1; [ $NEMOTRON_JAX_PROCESS_ID = 0 ] || kill -KILL $$; wait"]
ALONE = ["sh", "-c", "echo started; exec sleep 600"]


def launcher(*arguments) -> list[str]:
    return [sys.executable, str(LAUNCHER), *map(str, arguments)]


def finished(*arguments, **env) -> tuple[subprocess.CompletedProcess, float]:
    began = time.monotonic()
    done = subprocess.run(launcher(*arguments), capture_output=True, text=True, timeout=120, env=environment(**env))
    return done, time.monotonic() - began


def alive(pid: str) -> bool:
    """Not for one that has ended and only waits for its status to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def children(pid: int | str) -> list[str]:
    return [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


@contextlib.contextmanager
def started(*arguments) -> Generator[tuple[subprocess.Popen, list[str]]]:
    """A launcher, and the two processes once both have started; at the end nothing may be left of them."""
    with sigint():
        done = subprocess.Popen(
            launcher(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
    try:
        assert done.stdout.read(8)
        wait_until(lambda: len(children(done.pid)) == 2)
        processes = children(done.pid)
        family = processes + [c for p in processes for c in children(p)]
        yield done, processes
        wait_until(lambda: not any(map(alive, family)), seconds=2)
    finally:
        done.kill()
        done.communicate()


# ------------------------------------------------------------------------------------------------- what it sets up
def test_processes_join_before_a_plain_program_starts(tmp_path, count_case):
    path = tmp_path / "program.py"
    path.write_text(SUM)
    done, _ = finished("-n", 2, "--limit", 90, "--join", "--", path, "--depth", "3")
    assert done.returncode == 0, done.stderr
    assert "sum 7.0 of 2 ['--depth', '3']" in done.stdout.splitlines()
    assert "[1] sum 7.0 of 2 ['--depth', '3']" in done.stderr.splitlines()
    count_case(2)


def test_variables_of_processes_that_share_gpus(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(shared_library("ncclGetVersion"))
    nccl = os.path.relpath(library)
    done, _ = finished("--devices", "3,3,0+1", "--no-mps", "--nccl", nccl, "--", sys.executable, "-c", VARIABLES)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    others = [line for line in done.stderr.splitlines() if line[1:5] in ("1] {", "2] {")]
    of = {0: first} | {int(line[1]): json.loads(line[4:]) for line in others}
    assert [of[i]["NEMOTRON_JAX_PROCESS_ID"] for i in range(3)] == ["0", "1", "2"]
    assert [of[i]["NEMOTRON_JAX_LOCAL_DEVICES"] for i in range(3)] == ["3", "3", "0,1"]
    assert len({of[i]["NEMOTRON_JAX_COORDINATOR"] for i in range(3)}) == 1
    assert [of[i].get("NCCL_MULTI_RANK_GPU_ENABLE") for i in range(3)] == ["1", "1", None]
    assert [of[i].get("PALLAS_KERNELS_MAX_BLOCKS") for i in range(3)] == ["66", "66", None]
    assert first["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.450" and first["LD_PRELOAD"] == str(library)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "2"], "found no command"),
        (["-n", "0", "--", "true"], "-n 0"),
        (["-n", "3", "--devices", "0,1", "--", "true"], "-n 3 with --devices 0,1"),
        (["--devices", "0,x", "--", "true"], "found ['x']"),
        (["-n", "2", "--devices", "", "--", "true"], "--devices: found ['']"),
        (["-n", "2", "--limit", "0", "--", "true"], "--limit: found 0.0, accepted seconds above 0"),
        (["-n", "2", "--limit", "nan", "--", "true"], "--limit: found nan"),
        (
            ["-n", "2", "--", "no/such/program"],
            "found 'no/such/program' behind --, no such program, accepted a program",
        ),
        (["-n", "2", "--", "no-such-program"], "found 'no-such-program' behind --, no such program"),
        (["-n", "2", "--", "README.md"], "found 'README.md' behind --, not executable"),
        (
            ["-n", "2", "--", __file__],
            "not executable, accepted a program and its arguments (a Python file needs `python`",
        ),
        (["-n", "2", "--join", "--", "no/such/file.py"], "--join: found 'no/such/file.py'"),
    ],
)
def test_bad_arguments(arguments, said):
    done, _ = finished(*arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_program_that_the_kernel_refuses(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("print(1)\n")  # no line that says by what it is run
    path.chmod(0o755)
    done, _ = finished("-n", 2, "--", path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "Exec format error" in done.stderr and "needs `python` in front" in done.stderr


WHOLE = shared_library("ncclGetVersion")
UNLISTED = WHOLE[:40] + bytes(8) + WHOLE[48:60] + bytes(2) + WHOLE[62:]  # without a table of sections


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("lib.so", None, "(No such file or directory)"),
        ("lib.so", b"", "of 0 bytes"),
        ("lib.so", b"text " * 100, "of 500 bytes"),
        ("lib.so", WHOLE[:-1], f"cut off at {len(WHOLE) - 1} of {len(WHOLE)} bytes"),
        ("lib.so", UNLISTED[:250], "of 250 bytes"),
        ("lib.so", shared_library("otherLibrary"), "(no ncclGetVersion)"),
        ("my lib.so", WHOLE, "in a path without spaces and colons"),
    ],
)
def test_a_library_that_cannot_be_preloaded(tmp_path, name, content, said):
    library, started = tmp_path / name, tmp_path / "started"
    if content is not None:
        library.write_bytes(content)
    done, _ = finished("--devices", "0,0", "--no-mps", "--nccl", library, "--", "touch", started)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("launch_local: --nccl: found ") and str(library) in line
    assert said in line and "accepted a whole libnccl.so.2" in line
    assert not started.exists()


def test_mps_that_does_not_start(tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexit 3\n")
    control.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done, _ = finished("--devices", "0,0", "--", "sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY", PATH=path)
    assert done.returncode == 0 and done.stdout == "\n"
    assert "launch_local: MPS does not start (status 3)" in done.stderr


# ------------------------------------------------------------------------------------------------- how it ends
def test_the_first_to_die_ends_all_and_is_named():
    with started("-n", 2, "--", *DIES) as (done, processes):
        _, err = done.communicate(timeout=WITHIN)
    assert done.returncode == 128 + signal.SIGKILL
    assert f"launch_local: process 1 (pid {processes[1]}) was ended by SIGKILL" in err


def test_limit():
    with started("-n", 2, "--limit", 1, "--", *FAMILY) as (done, _):
        _, err = done.communicate(timeout=WITHIN)
    assert done.returncode == 124 and "1 s are over, processes [0, 1] still run; ending all" in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_launcher_ends_all(how):
    killed = how == signal.SIGKILL  # then it cannot reach what they have started themselves
    with started("-n", 2, "--", *(ALONE if killed else FAMILY)) as (done, _):
        done.send_signal(how)
        _, err = done.communicate(timeout=WITHIN)
    assert done.returncode == (-how if killed else 130)
    assert err in ("", "[1] started\n")


def test_what_cannot_be_killed_is_given_up():
    """As where a driver holds a process: killing it is left out here."""
    code = f"import sys; sys.path.insert(0, {str(LAUNCHER.parent)!r}); import launch_local; launch_local.GONE = 0.5\n"
    code += "launch_local.end = lambda *_: None; sys.argv = ['x', '-n', '1', '--limit', '0.5', '--', 'sleep', '600']\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(launch_local.main())"], capture_output=True, timeout=60
    )
    assert done.returncode == 124 and b"killed, but still there: [" in done.stderr


@pytest.mark.full
def test_one_failure_of_a_plain_program_ends_all(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(FAIL)
    done, seconds = finished("-n", 2, "--limit", 90, "--join", "--", path)
    assert done.returncode == 7 and "process 1 (pid" in done.stderr and "ended with status 7" in done.stderr
    assert seconds < WITHIN


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_program_is_stopped(how, count_case):
    with started("-n", 2, "--", *program(*ENDLESS, "--tensor-parallel", 2)) as (done, _):
        done.send_signal(how)
        _, err = done.communicate(timeout=WITHIN)
    assert done.returncode == 130 and "Traceback" not in err
    count_case()


@pytest.mark.full
def test_a_killed_process_of_the_program_is_named(count_case):
    with started("-n", 2, "--", *program(*ENDLESS, "--tensor-parallel", 2)) as (done, processes):
        os.kill(int(processes[1]), signal.SIGKILL)
        begun = time.monotonic()
        _, err = done.communicate(timeout=WITHIN)
    assert done.returncode == 128 + signal.SIGKILL and time.monotonic() - begun < 15
    assert f"process 1 (pid {processes[1]}) was ended by SIGKILL" in err
    count_case()
