"""The checks of processes that share a GPU, tried out on the CPU: whatever goes wrong is a line, and the rest runs."""

import subprocess
import sys

import pytest

from tests.gpu import shared_gpu

CPU = ["cpu", "--limit", "150"]
REFUSED = [*CPU, "--nccl", "/nowhere/libnccl.so.2"]  # the launcher does not start anything


def test_a_run_that_ends_before_a_process_is_killed(capsys):
    report = shared_gpu.Report()
    shared_gpu.check_killed(report, [2, 4], REFUSED)
    first, second = capsys.readouterr().out.splitlines()
    assert (report.checks, report.failures) == (2, 2)
    assert "FAIL killed process of 2 no process 1 to kill, the run ended with status 2: launch_local: --nccl" in first
    assert "FAIL killed process of 4 " in second


def test_much_on_stderr_before_the_first_word(monkeypatch):
    """As warnings of a GPU's libraries: more than a pipe holds."""
    noisy = [sys.executable, "-c", "import sys; sys.stderr.write('x' * 200_000); print('text')"]
    monkeypatch.setattr(shared_gpu, "launcher", lambda *_: noisy)
    fault, _ = shared_gpu.killed(2, CPU)
    assert fault.startswith("no process 1 to kill, the run ended with status 0: xxx") and len(fault) < 400


def test_selftest_without_checks(monkeypatch, capsys):
    monkeypatch.setattr(shared_gpu, "launcher", lambda *_: ["echo", '{"devices": 1}'])
    report = shared_gpu.Report()
    shared_gpu.check_selftest(report, [2], CPU, 60)
    assert report.failures == 1 and "FAIL selftest, 2 processes no check ran" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_gpu, "FOUR_BLOCKS", "M*X")
    assert shared_gpu.make_slice(tmp_path / "slice").startswith("status 1: ")


def test_bad_ranks():
    done = subprocess.run([sys.executable, shared_gpu.__file__, "--ranks", "2,x"], capture_output=True, text=True)
    assert done.returncode == 2 and "--ranks: found '2,x', accepted numbers" in done.stderr


@pytest.mark.full
def test_a_process_is_killed(count_case):
    fault, detail = shared_gpu.killed(2, CPU)
    assert not fault and detail.startswith("all ended within")
    count_case()
