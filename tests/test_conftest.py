"""The test set-up itself: cases are counted over all workers, and a run that compared nothing fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_counted(i, count_case):
    count_case(10)

@pytest.mark.parametrize("i", range({loops}))
def test_forgets(i, count_case):
    pass

@pytest.mark.full
def test_rest(count_case):
    count_case(1000)

@pytest.mark.gpu
def test_gpu():
    raise AssertionError("this is no GPU run")

def test_devices():
    import jax
    assert len(jax.devices("cpu")) == 8
"""

SETTINGS = "[pytest]\naddopts = --strict-markers\nmarkers =\n    gpu: g\n    slow: s\n    full: f\n"


@pytest.fixture
def run(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_it.py").write_text(TESTS.format(loops=2))

    def run(*arguments: str) -> tuple[int, str]:
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["-n", "2"], 0, "40 cases ran"),
        pytest.param(["--full"], 0, "1040 cases ran", marks=pytest.mark.full),
        pytest.param(["--thin", "3"], 0, "30 cases ran", marks=pytest.mark.full),
        (["--min-cases", "41"], 1, "only 40 comparison cases ran, at least 41"),
        (["-n", "2", "-k", "forgets"], 1, "only 0 comparison cases ran, at least 1"),
        pytest.param(["-k", "forgets"], 1, "only 0 comparison cases ran, at least 1", marks=pytest.mark.full),
        pytest.param(["-k", "devices"], 0, "0 cases ran", marks=pytest.mark.full),
        pytest.param(["-k", "no_such_test"], 5, "0 cases ran", marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_count(run, arguments, status, said):
    code, output = run(*arguments)
    assert (code, said in output) == (status, True), output
