"""Which implementation serves which call: the static conditions, and the shipped measurements."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels import Unsupported, flags_state_specs, make_flags_state
from pallas_kernels.allreduce_rms_norm import IMPLEMENTATIONS, PEER_MEMORY, choose, state_bytes, supported
from pallas_kernels.allreduce_rms_norm.choose import measurements
from pallas_kernels.allreduce_rms_norm.probe import known_reachable
from tests.pallas_kernels import allreduce_cases as cases

CALL = dict(
    tokens=8,
    hidden=4096,
    dtype="bfloat16",
    residual_dtype="bfloat16",
    world=2,
    platform="gpu",
    processes_reachable=True,
)


def reason(implementation, **change):
    call = CALL | dict(mesh=cases.mesh(change.get("world", 2))) | change
    return supported(implementation, **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_supported(implementation):
    assert reason(implementation) is None
    for hidden in (128, 192, 2688, 3136, 4480, 5120, 8192):
        for dtype in ("bfloat16", "float16", "float32"):
            assert reason(implementation, hidden=hidden, dtype=dtype, tokens=0) is None
    assert reason(implementation, world=3) is None


@pytest.mark.parametrize("implementation", PEER_MEMORY)
@pytest.mark.parametrize(
    "change, part",
    [
        (dict(platform="cpu"), "runs on cpu"),
        (dict(hidden=100), "hidden is 100"),
        (dict(hidden=120), "hidden is 120"),
        (dict(dtype="float64"), "partial is float64"),
        (dict(residual_dtype="int32"), "residual is int32"),
        (dict(tokens=2**20, hidden=4096), "2**31"),
        (dict(processes_reachable=False), "read each other's memory"),
    ],
)
def test_unsupported(implementation, change, part):
    assert part in reason(implementation, **change)
    assert reason("gather", **change) is None and reason("psum", **change) is None


def test_order_of_devices():
    devices = np.array(jax.devices())
    assert "row-major" in reason("one_shot", mesh=jax.sharding.Mesh(devices[[1, 0]], ("tensor",)))
    assert "row-major" in reason("flags", mesh=jax.sharding.Mesh(devices[4:6], ("tensor",)))
    assert reason("one_shot", mesh=jax.sharding.Mesh(devices.reshape(4, 2), ("data", "tensor"))) is None
    assert "row-major" in reason("one_shot", mesh=jax.sharding.Mesh(devices.reshape(4, 2).T, ("data", "tensor")))


def test_shared_memory():
    """A float32 row of 8192 from eight devices is more than a multiprocessor holds; flags needs none."""
    wide = dict(world=8, hidden=8192, dtype="float32")
    assert "shared memory" in reason("one_shot", **wide) and "shared memory" in reason("two_shot", **wide)
    assert reason("flags", **wide) is None


def test_one_device_supports_everything():
    for implementation in IMPLEMENTATIONS:
        assert reason(implementation, world=1, platform="cpu", hidden=7) is None


def test_unknown_name():
    with pytest.raises(ValueError, match="nccl"):
        reason("nccl")


def test_flags_state_fits_or_says_why():
    state = make_flags_state(cases.mesh(2), "tensor", 300, 4096, "bfloat16")
    assert reason("flags", state=state, tokens=300) is None
    assert "holds 384 tokens" in reason("flags", state=state, tokens=385)
    assert "hidden 4096" in reason("flags", state=state, hidden=2688)
    assert "float32" in reason("flags", state=state, dtype="float32")
    assert "64 blocks" in reason("flags", state=state, tokens=300, max_blocks=64)
    assert reason("flags", state=state, tokens=192, max_blocks=64) is None
    per_device = state_bytes(world=2, max_tokens=300, hidden=4096, dtype="bfloat16")
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 2 * per_device
    assert all(
        x.sharding.spec == spec
        for x, spec in zip(*map(jax.tree.leaves, (state, flags_state_specs(state))), strict=True)
    )


def test_flags_state_arguments():
    with pytest.raises(ValueError) as caught:
        make_flags_state(cases.mesh(2), "model", 0, 100, "int8", 4096)
    for part in ("axis_name is 'model'", "max_tokens is 0", "hidden is 100", "dtype is int8", "max_blocks is 4096"):
        assert part in str(caught.value)
    assert make_flags_state(cases.mesh(1), "tensor", 8, 4096, "bfloat16") is None
    assert flags_state_specs(None) is None


def test_several_processes(monkeypatch):
    """With one process per GPU the state would be copied: refused when it is made and when it is asked for."""
    mesh = cases.mesh(2)
    monkeypatch.setattr(type(mesh), "is_multi_process", property(lambda self: True))
    with pytest.raises(Unsupported, match="one process"):
        make_flags_state(mesh, "tensor", 8, 4096, "bfloat16")
    assert "one process" in reason("flags", mesh=mesh)
    assert reason("one_shot", mesh=mesh) is None


def test_kernels_are_not_chosen_before_the_probe():
    assert not known_reachable(cases.mesh(5))


def ask(tokens, hidden=4096, world=2, kind="NVIDIA H200", **kwargs):
    return choose(tokens=tokens, hidden=hidden, dtype="bfloat16", world=world, device_kind=kind, **kwargs)


def test_measured_rows_are_complete():
    for kind in measurements().values():
        assert kind["rows"]
        for row in kind["rows"]:
            assert set(row["us"]) <= set(IMPLEMENTATIONS) and "psum" in row["us"]
            assert min(row["us"].values()) > 0
            assert set(row["us"]) <= set(kind["call_site_us"])


def test_choice():
    assert ask(1)[0] == "flags" and ask(8, 2688)[0] == "flags"  # decode
    assert ask(2048, 8192, runs_per_start=100)[0] == "one_shot"  # in a loop on the device
    assert ask(512)[0] == "psum"  # a prefill that runs once: the addresses cost more than the kernel saves
    assert ask(512, runs_per_start=1000)[0] == "one_shot"
    assert "us against" in ask(1)[1]


def test_choice_is_the_fastest_available():
    row = next(r for r in measurements()["NVIDIA H200"]["rows"] if (r["tokens"], r["hidden"]) == (1, 4096))
    without = [name for name in IMPLEMENTATIONS if name != "flags"]
    assert row["us"]["one_shot"] < row["us"]["psum"]
    assert ask(1, available=without, runs_per_start=1e6)[0] == "one_shot"
    assert ask(1, available=["psum", "reference"])[0] == "psum"
    with pytest.raises(ValueError, match="must contain 'psum'"):
        ask(1, available=["flags"])


def test_choice_where_nothing_was_measured():
    assert ask(1, kind="NVIDIA H100 80GB HBM3") == ("psum", "no measurements for device kind 'NVIDIA H100 80GB HBM3'")
    assert ask(1, world=1)[0] == "psum"
    assert ask(1, world=8)[0] == "flags"  # a few KiB: all latency
    name, why = ask(2048, world=8)
    assert name == "psum" and "measured on 2 devices only" in why


def test_states_are_frozen():
    state = make_flags_state(cases.mesh(2), "tensor", 1, 192, "bfloat16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.blocks = 3
