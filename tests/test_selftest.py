"""selftest: what it checks, that each check can fail, and what it prints."""

import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import cli, device_checks, make_mesh
from pallas_kernels.allreduce_rms_norm import IMPLEMENTATIONS, PEER_MEMORY, reference
from tests.test_processes import environment, launch, program

RUN_HERE = [name for name in IMPLEMENTATIONS if name not in PEER_MEMORY]


@pytest.fixture
def selftest(monkeypatch, capsys):
    """The command in this process, on the devices that are there."""
    monkeypatch.setattr(cli, "setup_devices", lambda count: None)

    def run(*arguments):
        status = cli.main(["selftest", "--repeats", "3", "--copy-bytes", "4096", *arguments])
        return status, capsys.readouterr().out

    return run


def failed(out: str) -> list[str]:
    return [check["name"] for check in json.loads(out)["checks"] if check["ok"] is False]


@pytest.mark.parametrize(
    ("tensor", "data"),
    [(2, 2), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(4, 1, marks=pytest.mark.full)],
)
def test_everything_that_can_run_here_passes(selftest, tensor, data, count_case):
    status, out = selftest("--json", "--tensor-parallel", str(tensor), "--data-parallel", str(data))
    found = json.loads(out)
    assert status == 0 and found["ok"]
    checks = {check["name"]: check for check in found["checks"]}
    ran = {name for name, check in checks.items() if check["ok"]}
    expected = {"matmul", "copy all pairs", "copy inside a process"}
    expected |= {f"{what} {name}" for what in ("all-reduce", "repeat") for name in RUN_HERE}
    assert ran == expected
    assert {name for name, c in checks.items() if c["ok"] is None} == {
        f"{what} {name}" for what in ("all-reduce", "repeat") for name in PEER_MEMORY
    }
    assert all("needs GPUs" in found["unavailable"][name] for name in PEER_MEMORY)
    n = tensor * data
    assert f"{n * (n - 1)} pairs" in checks["copy all pairs"]["detail"] and len(found["devices"]) == n
    assert found["versions"]["jax"] == jax.__version__ and len(found["topology"]["devices"]) == n
    assert {c["implementation"] for c in found["implementations"]} == {"psum"}
    assert all(c["reason"] for c in found["implementations"])
    count_case(len(ran))


def test_one_device(selftest):
    status, out = selftest("--json", "--tensor-parallel", "1")
    found = {check["name"]: check["ok"] for check in json.loads(out)["checks"]}
    assert status == 0 and found["matmul"] and found["all-reduce reference"] and found["copy all pairs"] is None


def test_text(selftest):
    status, out = selftest("--tensor-parallel", "2")
    assert status == 0 and "9 checks passed" in out and "not run  all-reduce flags: needs GPUs" in out


# ------------------------------------------------------------------------------------------- each check can fail
def test_a_wrong_product(selftest, monkeypatch):
    right = jnp.matmul
    monkeypatch.setattr(jnp, "matmul", lambda a, b, **how: right(a, b, **how) * (1 + 1e-4))
    status, out = selftest("--json", "--tensor-parallel", "2")
    assert status == 1 and failed(out) == ["matmul"]


@pytest.mark.parametrize(("function", "names"), [("exact", ("reference", "gather")), ("psum", ("psum",))])
def test_a_wrong_sum(selftest, monkeypatch, function, names):
    """One value of one expression is off by a little more than its rounding; "gather" runs the reference's."""
    right = getattr(reference, function)

    def wrong(partial, residual, weight, **how):
        normed, new_residual = right(partial, residual, weight, **how)
        return normed, new_residual.at[0, 7].multiply(1.08)

    monkeypatch.setattr(reference, function, wrong)
    jax.clear_caches()
    status, out = selftest("--json", "--tensor-parallel", "2")
    jax.clear_caches()
    assert status == 1 and set(failed(out)) == {f"all-reduce {name}" for name in names}


def test_a_sum_that_changes(monkeypatch):
    """Calls of one program that differ are counted."""
    calls = []

    def shaky(partial, residual, weight, **how):
        calls.append(1)
        scale = 1.0 if len(calls) == 1 else 1.01
        return (partial * jnp.asarray(scale, partial.dtype)), residual

    monkeypatch.setattr(device_checks, "allreduce_rms_norm", shaky)
    with pytest.raises(AssertionError, match=r"cpu:?\d.*values changed|values changed"):
        device_checks.repeated(make_mesh(2), "gather", 3)


def test_a_damaged_copy(monkeypatch):
    right = jax.lax.ppermute

    def flips(x, axis, pairs):
        out = right(x, axis, pairs)
        return out.at[0, 5].set(jnp.where(jax.lax.axis_index(axis) == 2, out[0, 5] ^ jnp.uint32(1), out[0, 5]))

    monkeypatch.setattr(jax.lax, "ppermute", flips)
    with pytest.raises(AssertionError, match="1 of 64 words are wrong") as error:
        device_checks.copies(make_mesh(4), 256)
    named = str(error.value)
    devices = make_mesh(4).devices.flat
    for i in (0, 1, 3):
        assert f"{devices[2]} <- {devices[i]}" in named
    assert named.count("words are wrong") == 3


def test_a_damaged_local_copy(monkeypatch):
    right = jax.device_put

    def flips(x, device=None, **how):
        damaged = isinstance(x, jax.Array) and device == jax.devices()[1]
        return right(np.asarray(x) ^ np.uint32(4) if damaged else x, device, **how)

    monkeypatch.setattr(jax, "device_put", flips)
    with pytest.raises(AssertionError, match="64 of 64 words are wrong"):
        device_checks.local_copies(make_mesh(2), 256)


def test_an_error_is_a_failed_check(monkeypatch):
    def broken():
        raise RuntimeError("no memory")

    check = device_checks.run("x", broken)
    assert check.ok is False and check.detail == "RuntimeError: no memory"


# ------------------------------------------------------------------------------------------- as a program
@pytest.mark.full
def test_in_two_processes(count_case):
    done = launch(2, "selftest", "--json", "--repeats", 3, "--tensor-parallel", 2, "--data-parallel", 2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["topology"]["processes"] == 2 and sum(c["ok"] is True for c in found["checks"]) == 9
    assert {d["process"] for d in found["topology"]["devices"]} == {0, 1}
    count_case(9)


def test_as_a_program(count_case):
    """Without a GPU it makes two virtual devices."""
    done = subprocess.run(
        program("selftest", "--json", "--repeats", 3), capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["devices"]) == 2 and "2 virtual CPU devices" in done.stderr
    count_case()
