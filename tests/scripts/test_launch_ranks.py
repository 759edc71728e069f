"""The launcher, with CPU ranks: they find each other, one failure ends all, a hang ends at the limit."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_ranks.py"
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
HANG = "import time\ntime.sleep(600)\n"


def launch(tmp_path, program, *options, arguments=()):
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, str(LAUNCHER), "--devices", "cpu,cpu", *options, "--", str(path), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done, time.monotonic() - began


def test_ranks_find_each_other(tmp_path):
    done, _ = launch(tmp_path, SUM, "--limit", "90", arguments=("--depth", "3"))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"[{rank}] sum 7.0 of 2 ['--depth', '3']" in done.stdout


def test_one_failure_ends_all(tmp_path):
    done, seconds = launch(tmp_path, FAIL, "--limit", "90")
    assert done.returncode == 7 and "rank 1 ended with 7" in done.stderr and seconds < 60


def test_limit(tmp_path):
    done, seconds = launch(tmp_path, HANG, "--limit", "9")
    assert done.returncode in (1, 124) and seconds < 60
    assert "ending all" in done.stderr


@pytest.mark.parametrize(
    "devices, program, part", [("gpu0", "x.py", "--devices has"), ("0,1", "missing.py", "is missing")]
)
def test_bad_input(tmp_path, devices, program, part):
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), "--devices", devices, "--", str(tmp_path / program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and part in done.stderr
