"""What `bench` promises beside its times: wrong results get none, a failure leaves the others, equal plans are one."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, cli, kernel_timing, make_mesh, timing
from nemotron_jax.layers.router import route
from tests import tiny
from tests.conftest import TINY

FOLDER = str(TINY / "dense_tied" / "hf")


def bench(monkeypatch, tmp_path, *arguments, tensor=2):
    monkeypatch.setattr("nemotron_jax.commands.bench.build_mesh", lambda args: make_mesh(tensor))
    out = tmp_path / "result.json"
    kernels = [] if "kernels" in arguments else ["--kernels", "none"]
    status = cli.main(["bench", *arguments, *kernels, "--out", str(out)])
    return status, json.loads(out.read_text())


def test_plans_that_come_to_the_same_are_timed_once(monkeypatch, tmp_path, count_case):
    ran = []

    def decode(model, batch, context, steps, repeats):
        ran.append(model.fusion)
        off = 9.0 if model.fusion == "all/psum" else 0.0
        return timing.Timing(2e-3, 1e-3, 3e-3), np.arange(8.0) + off

    monkeypatch.setattr(timing, "decode", decode)
    plans = ["none", "all/gather", "layers:ggggg", "all/psum"]
    status, result = bench(monkeypatch, tmp_path, "decode", FOLDER, "--plans", *plans, "--dtype", "float32")
    assert ran == ["none", "all/gather", "all/psum"]
    assert [row["ms"] for row in result["rows"]] == [2.0, 2.0, 2.0, None], "a wrong result has no time"
    assert status == cli.FAILED and result["setup_seconds"] >= 0
    count_case()


def test_without_plain_the_first_row_is_the_reference(monkeypatch, tmp_path):
    def decode(model, batch, context, steps, repeats):
        return timing.Timing(2e-3, 1e-3, 3e-3), np.arange(8.0) + (9.0 if model.fusion == "all/psum" else 5.0)

    monkeypatch.setattr(timing, "decode", decode)
    status, result = bench(
        monkeypatch,
        tmp_path,
        "decode",
        FOLDER,
        "--plans",
        "all/gather",
        "all/psum",
        "--skip-plain",
        "--dtype",
        "float32",
    )
    rows = result["rows"]
    assert [(row["plan"], row["ms"]) for row in rows] == [("none", 2.0), ("all/gather", 2.0), ("all/psum", None)]
    assert {row["reference"] for row in rows} == {"plan none, kernels none"}
    assert status == cli.FAILED


def test_one_plan_that_fails_leaves_the_others(monkeypatch, tmp_path):
    def decode(model, batch, context, steps, repeats):
        if model.fusion != "none":
            raise RuntimeError("out of memory")
        return timing.Timing(2e-3, 1e-3, 3e-3), np.arange(8.0)

    monkeypatch.setattr(timing, "decode", decode)
    status, result = bench(monkeypatch, tmp_path, "decode", FOLDER, "--plans", "all/gather", "--batch", "1", "2")
    assert status == cli.FAILED
    assert [(row["batch"], row["ms"]) for row in result["rows"]] == [(1, 2.0), (1, None), (2, 2.0), (2, None)]
    assert "out of memory" in result["rows"][1]["problem"]
    monkeypatch.setattr(timing, "decode", lambda *a: 1 / 0)  # nothing to compare with: no rows at all
    with pytest.raises(ZeroDivisionError):
        bench(monkeypatch, tmp_path, "decode", FOLDER)


def test_kernels_runs_every_operation_of_the_pattern(monkeypatch, tmp_path, count_case):
    arguments = ["kernels", str(TINY / "moe_nano" / "hf"), "--steps", "8", "16", "--repeats", "1", "--dtype", "float32"]
    arguments += ["--tokens", "70"]
    monkeypatch.setattr(kernel_timing, "_time", lambda *a: timing.Timing(1e-6, 1e-6, 1e-6))
    status, result = bench(monkeypatch, tmp_path, *arguments, tensor=1)
    assert status == cli.DONE
    found = {(row["operation"], row["implementation"]): row for row in result["rows"]}
    timed = {key for key, row in found.items() if row["ms"] is not None}
    assert {
        ("rms_norm", "reference"),
        ("mamba_step", "reference"),
        ("experts", "gather"),
        ("experts", "blocks"),
    } <= timed
    assert {("in_proj", "xla"), ("out_proj", "xla"), ("qkv", "xla"), ("o", "xla"), ("head", "xla")} <= timed
    assert {("causal_conv", "reference"), ("gated_norm", "reference"), ("prefill_attention", "xla")} <= timed
    assert ("chunk_scan", "reference") in timed and ("chunk_scan", "xla") not in timed  # which is for bfloat16
    kernels = {operation for operation, implementation in found if implementation == "mosaic_gpu"}
    assert kernels >= {"mamba_step", "chunk_scan", "causal_conv", "gated_norm", "prefill_attention", "head", "o"}
    for operation in kernels:  # here they are refused or not there, and nothing else takes their place
        assert found[operation, "mosaic_gpu"]["problem"].startswith(("Unsupported", "NotImplementedError"))
    assert "Unsupported" in found["experts", "gather, matvec"]["problem"]
    assert found["experts", "blocks"]["relative_rms"] < 1e-5
    count_case(len(timed))


@pytest.mark.parametrize("copies", [1, 3, 8])
def test_a_time_is_that_of_one_call(monkeypatch, copies):
    """A program's time is divided by the calls in it: counted by what each call adds to its operand."""
    counted = []

    def slope(program, steps, repeats):
        holder = [cell.cell_contents for cell in program.__closure__ if isinstance(cell.cell_contents, list)][0]
        program(1)()
        before = float(holder[0][0])
        program(1)()
        counted.append(float(holder[0][0]) - before)
        return timing.Timing(1.0, 1.0, 1.0)

    monkeypatch.setattr(kernel_timing, "slope", slope)
    parts = [jnp.zeros(2) for _ in range(copies)]
    operation = kernel_timing.Operation(
        "x", "", ("add",), lambda name, x, part: (x + 1, part), jnp.float32(0), parts, 1
    )
    (row,) = kernel_timing.measure(operation, "float32", (48, 96), 1)
    assert row["ms"] == pytest.approx(1e3 / counted[0]) and counted[0] >= 24


def test_bytes_of_a_norm():
    operation = kernel_timing.norm(NemotronHConfig.preset("nemotron-h-8b"), 2, jnp.float32)
    assert operation.bytes == 4 * 2 * 4096 * 4 and operation.shape == "2 x 4096"


def test_a_wrong_implementation_has_no_time(count_case):
    def call(implementation, chained, copy):
        return chained * {"right": 1.0, "off": 1.01, "nan": jnp.nan}[implementation], copy

    x = jnp.ones((2, 8))
    operation = kernel_timing.Operation("x", "", ("right", "off", "nan"), call, x, [x], 1)
    rows = list(kernel_timing.measure(operation, "float32", (2, 4), 1))
    assert [row["ms"] is None for row in rows] == [False, True, True]
    assert rows[1]["problem"] == "differs from right" == rows[2]["problem"]
    count_case(2)


def test_kernels_are_of_one_device(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("nemotron_jax.commands.bench.build_mesh", lambda args: make_mesh(2))
    assert cli.main(["bench", "kernels", FOLDER]) == cli.BAD_INPUT
    assert "found a mesh of 2 devices, accepted one" in capsys.readouterr().err


def test_projections_are_those_of_the_pattern():
    config = tiny.config(hybrid_override_pattern="M-")
    found = {operation.name: operation.shape for operation in kernel_timing.projections(config, 3, jnp.float32)}
    assert set(found) == {"head", "in_proj", "out_proj", "up", "down"}
    inner, groups = 16 * 6, 8 * 10
    assert found["in_proj"] == f"3 x 40 by {2 * inner + 2 * groups + 16}"


@pytest.mark.parametrize("groups, kept", [(1, 1), (8, 4)])
def test_settled_routes_do_not_depend_on_rounding(groups, kept, count_case):
    """What a timing is checked by goes by routes that no rounding moves; afterwards the model is as before."""
    sizes = dict(n_routed_experts=32, num_experts_per_tok=4, n_group=groups, topk_group=kept)
    sizes |= dict(moe_intermediate_size=8, moe_shared_expert_intermediate_size=8)
    model = NemotronH(tiny.config(hybrid_override_pattern="EE", **sizes), mesh=make_mesh(2), rngs=0)
    paths = [p.path for p in model.parameters if p.path[-1] == "bias" and "router" in p.path]
    before = [np.asarray(model.parameter(*path)) for path in paths]
    rng = np.random.default_rng(0)
    chosen: set[tuple] = set()
    with timing.settled_routes(model):
        for path in paths:
            bias = model.parameter(*path)
            scores = rng.normal(size=(64, bias.size), scale=8.0).astype(np.float32)
            groups = dict(groups=sizes["n_group"], kept_groups=sizes["topk_group"])
            picked = np.sort(np.asarray(route(jnp.asarray(scores), bias, k=4, **groups)[0]), -1)
            assert (picked == picked[0]).all()
            chosen.add(tuple(picked[0]))
            count_case()
    assert len(chosen) > 1, "the same experts in every block"
    assert all((np.asarray(model.parameter(*path)) == old).all() for path, old in zip(paths, before, strict=True))
