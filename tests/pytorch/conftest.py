"""What the live comparison needs: a Python with torch and transformers, beside the one that runs the tests."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="session")
def torch_python(request: pytest.FixtureRequest) -> str:
    path = request.config.getoption("--torch-python")
    if not path:
        pytest.fail("needs --torch-python PATH, a Python with torch and transformers: run `make test-pytorch`")
    # Not resolved: the link inside an environment is what makes it that environment.
    return str(Path(path).absolute())


@pytest.fixture(scope="session")
def in_torch(torch_python):
    """Runs a command line in the torch environment and returns what it printed on stdout."""

    def run(*command: object, status: int = 0) -> str:
        done = subprocess.run([torch_python, *map(str, command)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def nemotron_jax():
    """Runs the program in this environment with --json; returns its exit status and the object that it printed."""

    def run(*command: object) -> tuple[int, dict]:
        # Free of what this test session set for itself: the program sets up its own devices.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time goes into compiling
        environment["PYTHONPATH"] = str(ROOT)
        line = [sys.executable, "-m", "nemotron_jax", *map(str, command), "--json"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 1), f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def seed() -> int:
    """New at every run, so that not the same weights are compared for ever; NEMOTRON_TEST_SEED repeats a run."""
    return int(os.environ.get("NEMOTRON_TEST_SEED") or secrets.randbits(31))
