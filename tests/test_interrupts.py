"""Ctrl-C at any moment ends the program soon, with status 130 and one line."""

import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.signals import sigint
from tests.test_processes import ENDLESS, ROOT, environment

LINE = "nemotron-jax: interrupted\n"
START = """
import gc, hashlib, os, signal, sys, time
from nemotron_jax import interrupts
interrupts.GRACE = 0.3
interrupts.install()
def press():
    os.kill(os.getpid(), signal.SIGINT)
"""
LOST = """
def collected(phase, info):
    gc.callbacks.remove(collected)
    press()
    sum(range(100))
def command():
    gc.callbacks.append(collected)
    gc.collect()
    time.sleep(30)
"""
SWALLOWED = """
def command():
    while True:
        try:
            press()
            time.sleep(30)
        except BaseException:
            time.sleep(30)
"""
BUSY = """
import threading
def command():
    threading.Timer(0.2, press).start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1_000_000_000)
"""
PUT_AWAY = """
interrupts.GRACE = 30
def command():
    try:
        press()
        time.sleep(30)
    finally:
        time.sleep(0.1)
        print("put away")
"""
TWICE = """
interrupts.GRACE = 30
def command():
    try:
        press()
        time.sleep(30)
    finally:
        press()
        time.sleep(30)
        print("not reached")
"""
LATE = """
def command():
    def press_when_all_is_done():
        press()
        time.sleep(30)
    import atexit
    atexit.register(press_when_all_is_done)
    return 0
"""
TRANSLATED = """
def command():
    try:
        press()
        time.sleep(30)
    except KeyboardInterrupt as error:
        raise ValueError("something else") from error
"""
EARLY = """
press()
time.sleep(30)
def command():
    print("not reached")
"""


def run(code: str) -> subprocess.CompletedProcess:
    code = START + code + "sys.exit(interrupts.run(command))"
    with sigint():
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=20
        )


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(LOST, "", id="lost in a callback of the garbage collector"),
        pytest.param(SWALLOWED, "", id="swallowed by an except clause"),
        pytest.param(TRANSLATED, "", id="turned into another exception"),
        pytest.param(BUSY, "", id="while the main thread is inside a library"),
        pytest.param(PUT_AWAY, "put away\n", id="what is open is put away"),
        pytest.param(TWICE, "", id="a second one does not wait"),
        pytest.param(EARLY, "", id="before a command has started"),
        pytest.param(LATE, "", id="after a command has ended"),
    ],
)
def test_every_way_ends_alike(code, printed):
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, LINE)


def test_other_ends_are_left_alone():
    assert run("def command(): return 3\n").returncode == 3
    failed = run("def command(): raise ValueError('mine')\n")
    assert failed.returncode == 1 and "ValueError: mine" in failed.stderr
    code = START + "def command(): press(); return 4\n" + "sys.exit(interrupts.run(command))"
    with sigint(signal.SIG_IGN):
        ignored = subprocess.run([sys.executable, "-c", code], env=environment())
    assert ignored.returncode == 4


# ------------------------------------------------------------------------------------------------- the program
def test_it_listens_before_anything_heavy_is_imported():
    code = "import nemotron_jax.__main__, sys; print(sorted({'jax', 'numpy'} & {*sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert found.stdout == "[]\n", found.stderr


def entry(how: str) -> list[str]:
    """The program as ``python -m``, or as the script that an installation makes."""
    if how == "module":
        return [sys.executable, "-m", "nemotron_jax"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["nemotron-jax"].split(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def interrupted(how: str, arguments: tuple, seconds: float) -> tuple[int, str, str]:
    """(status, stdout, stderr) after Ctrl-C so many seconds after the program, not Python, has started."""
    with sigint():
        process = subprocess.Popen(
            [*entry(how), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    try:
        limit = time.monotonic() + 30
        while len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 2:  # the thread that listens is the first
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < 8, "it took too long"
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.parametrize(("how", "seconds"), [("script", 0.0), ("module", 0.3), ("module", 4.0)])
def test_at_a_moment(how, seconds, count_case):
    status, _, err = interrupted(how, ENDLESS, seconds)
    assert (status, err) == (130, LINE)
    count_case()


@pytest.mark.full
def test_at_random_moments(tmp_path, count_case):
    moment = random.Random(5)
    for i in range(20):
        how = ("module", "script")[i % 2]
        status, _, err = interrupted(how, ENDLESS, moment.uniform(0, 8))
        assert (status, err) == (130, LINE), i
    model, done = ROOT / "nemotron_jax/models/tiny-nemotron-h", 0
    for i in range(20):
        target = tmp_path / str(i)
        status, _, err = interrupted("module", ("convert", model, target), moment.uniform(0, 3))
        done += status == 0
        assert status == 0 or (status, err) == (130, LINE), i
        assert target.exists() or status == 130
    assert done < 20
    count_case(40)
