"""Experiments: the file, resuming, refusals, wrong results, counts, predictions, tables and plots."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, cli, timing
from nemotron_jax.experiments import predict
from nemotron_jax.experiments.execute import Executor, first_layers
from nemotron_jax.experiments.predict import H200, exchange_seconds, touched_experts, work
from nemotron_jax.experiments.report import errors, plots, table
from nemotron_jax.experiments.results import read_results, run_all
from nemotron_jax.experiments.spec import expand, read_spec
from nemotron_jax.presets import PRESETS
from nemotron_jax.shapes import active_parameter_count, parameter_count
from nemotron_jax.step import plan_for
from nemotron_jax.targets import absent, parse
from tests import damage
from tests.conftest import TINY

ROOT = Path(__file__).parents[1]
SMALL = {
    "model": str(TINY / "dense_g2_kv2" / "hf"),
    "dtype": "float32",
    "layers": 2,
    "steps": [2, 4],
    "repeats": 1,
    "tokens": 3,
}


def fresh_environment() -> dict[str, str]:
    """Of a program that sets up its own devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


# ---------------------------------------------------------------------------------------- the file
def test_every_list_is_swept_and_equal_runs_are_one():
    spec = {
        "model": "nemotron-h-8b",
        "batch": [1, 8],
        "run": [
            {
                "mesh": [{"tensor": 2}, {"data": 2, "tensor": 4}],
                "plan": ["none", "auto"],
                "rules": [{}, {"mlp": "none"}],
            },
            {"mesh": {"tensor": 2}, "plan": "none", "what": ["decode", "prefill"], "tokens": 1},
        ],
    }
    runs = expand(spec)
    assert len(runs) == 2 * 2 * 2 * 2 + 2  # the second table's decode runs are in the first one already
    assert {(r.data, r.tensor) for r in runs} == {(1, 2), (2, 4)} and {r.batch for r in runs} == {1, 8}
    assert len({r.key for r in runs}) == len(runs)
    assert [r.key for r in expand(spec)] == [r.key for r in runs]
    assert expand({"model": "x"})[0].tensor == 1


def test_decode_and_prefill_read_tokens_differently():
    decode, prefill = expand({"model": "x", "what": ["decode", "prefill"], "tokens": 100})
    assert (decode.context, decode.new_tokens) == (100, 1) and (prefill.context, prefill.new_tokens) == (0, 100)


def test_all_faults_of_a_file_are_listed_at_once(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        'dtype = "int8"\nspeed = 1\nsteps = [3, 4]\ndevices = "tpu:4"\n'
        '[[run]]\nmodel = "x"\nmesh = {tensor = 0}\nrules = {heads = "none"}\nbatch = [1, true]\n'
        '[[run]]\nwhat = "train"\n'
    )
    with pytest.raises(ValueError) as error:
        read_spec(path)
    for part in ("'int8'", "unknown key 'speed'", "[3, 4]", "tpu:4", "{'tensor': 0}", "unknown logical axes ['heads']",
                 "batch: found True", "run 2: model is missing"):  # fmt: skip
        assert part in str(error.value), part
    path.write_text("mesh = {")
    with pytest.raises(ValueError, match="no TOML"):
        read_spec(path)


def test_examples_expand():
    for name, runs in (("tiny_on_cpu.toml", 10), ("eight_h200.toml", 18)):
        assert len(read_spec(ROOT / "examples" / name)) == runs


# ---------------------------------------------------------------------------------------- results
def stub(run, **result):
    return {"status": "done", **result}


def test_an_experiment_that_was_killed_goes_on_where_it_was(tmp_path):
    runs = expand({"model": "x", "batch": [1, 2, 3, 4]})
    seen = []

    def until_the_third(run):
        seen.append(run.batch)
        if run.batch == 3:
            raise KeyboardInterrupt
        return stub(run, value=run.batch)

    with pytest.raises(KeyboardInterrupt):
        run_all(runs, tmp_path, until_the_third)
    held = read_results(tmp_path)
    assert [held[r.key]["status"] for r in runs[:3]] == ["done", "done", "running"] and runs[3].key not in held
    seen.clear()
    entries = run_all(runs, tmp_path, lambda run: (seen.append(run.batch), stub(run))[1])
    assert seen == [3, 4] and [e["batch"] for e in entries] == [1, 2, 3, 4] and entries[0]["value"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    seen.clear()
    run_all(runs[:2], tmp_path, lambda run: seen.append(run.batch))  # done, and the others are not lost
    assert seen == [] and len(read_results(tmp_path)) == 4


def test_a_killed_process_leaves_a_whole_file(tmp_path):
    """For real: the process is ended inside the second run; the next one does the rest."""
    code = (
        "import os, sys\n"
        "from nemotron_jax.experiments.spec import expand\n"
        "from nemotron_jax.experiments.results import run_all\n"
        "def execute(run):\n"
        "    if run.batch == 2 and sys.argv[2] == 'die': os._exit(9)\n"
        "    return {'status': 'done'}\n"
        "print(len(run_all(expand({'model': 'x', 'batch': [1, 2, 3]}), sys.argv[1], execute)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run([*line, "die"], env=environment).returncode == 9
    assert sorted(e["status"] for e in read_results(tmp_path).values()) == ["done", "running"]
    done = subprocess.run([*line, "live"], env=environment, capture_output=True, text=True)
    assert done.stdout == "3\n" and {e["status"] for e in read_results(tmp_path).values()} == {"done"}


def test_a_run_that_takes_the_process_down_is_left_alone_after_two_times(tmp_path):
    runs = expand({"model": "x"})

    def die(run):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_all(runs, tmp_path, die)
    (entry,) = run_all(runs, tmp_path, die)
    assert entry["status"] == "failed" and "took the process down 2 times" in entry["reason"]


def test_failed_runs_are_tried_again_and_other_files_are_refused(tmp_path):
    runs = expand({"model": "x"})
    run_all(runs, tmp_path, lambda run: {"status": "failed", "reason": "once"})
    assert run_all(runs, tmp_path, stub)[0]["status"] == "done"
    (tmp_path / "results.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="no results of an experiment"):
        read_results(tmp_path)


# ---------------------------------------------------------------------------------------- execution
@pytest.fixture(scope="module")
def small_results():
    """A real experiment on virtual devices."""
    spec = SMALL | {"run": [{"mesh": [{"tensor": 1}, {"tensor": 2}], "plan": ["none", "all/gather"]},
                            {"mesh": {"tensor": 3}}, {"mesh": {"data": 2}, "what": "prefill", "batch": 2},
                            {"mesh": {"data": 2}, "batch": 1}, {"model": "no-such-model"}]}  # fmt: skip
    execute = Executor()
    runs = expand(spec)
    return runs, [{"key": run.key, **run.settings(), **execute(run)} for run in runs]


def test_runs_are_checked_counted_and_timed(small_results, count_case):
    _, entries = small_results
    one, one_all, two, two_all, three, prefill, odd, unknown = entries
    for e in (one, one_all, two, two_all, prefill):
        assert e["status"] == "done" and e["keeps_promise"] is True, e
        assert e["relative_rms_to_none"] < 1e-5 and e["times_mean_something"] is False
        assert e["counted_in"] == "compiled" and e["memory"]["argument"] > e["weight_bytes"] / 2
        count_case()
    assert one["collectives"] == {} and two["collectives"] == {"all-reduce": 3, "all-gather": 1}
    assert two_all["collectives"] == {"all-reduce": 1, "all-gather": 3} and two_all["letters"] == "gg"
    assert two["weight_bytes"] < one["weight_bytes"]
    assert three["status"] == "refused" and "not a multiple of 3" in three["reason"]
    assert odd["status"] == "refused" and "batch = 1" in odd["reason"]
    assert unknown["status"] == "refused" and "accepted: nemotron-" in unknown["reason"]


def test_a_wrong_plan_gets_no_time(monkeypatch, count_case):
    """A sum taken twice in one plan alone: the run is recorded as wrong, with the error and without a time."""
    (run,) = expand(SMALL | {"mesh": {"tensor": 2}, "plan": "all/gather"})
    execute = Executor()
    measure = timing.decode

    def broken(model, *arguments):
        if model.fusion == "none":
            return measure(model, *arguments)
        model._programs.clear()
        with damage.reduced_twice(0):
            return measure(model, *arguments)

    monkeypatch.setattr(timing, "decode", broken)
    result = execute(run)
    assert result["status"] == "wrong" and "differ from the unfused plan" in result["reason"] and "ms" not in result
    count_case()


def test_a_failure_is_recorded_and_the_next_run_is_not_touched(monkeypatch):
    (run,) = expand(SMALL)
    execute = Executor()
    with monkeypatch.context() as patch:
        patch.setattr(timing, "decode", lambda *a: 1 / 0)
        result = execute(run)
        assert result["status"] == "failed" and result["reason"] == "ZeroDivisionError: division by zero"
    assert execute(run)["status"] == "done"


def test_absent_gpus_are_compiled_or_lowered_for(count_case):
    """Full-size shapes, cut to their first blocks, for 4 H200."""
    spec = {"model": "nemotron-h-8b", "layers": 8, "devices": "h200:4", "mesh": [{"tensor": n} for n in (2, 4, 8)],
            "plan": ["none", "all/flags"], "tokens": 128}  # fmt: skip
    entries = [Executor()(run) for run in expand(spec)]
    assert [e["status"] for e in entries] == ["done"] * 4 + ["refused"] * 2 and "found 4" in entries[4]["reason"]
    for e in entries[:4]:
        assert (
            e["keeps_promise"]
            and e["ran_on"]["device_kind"] == "NVIDIA H200"
            and e["ran_on"]["how"] in ("compile", "lower")
        )
        assert "ms" not in e and e["predicted"]["ms"] > 0
        count_case()
    assert entries[0]["collectives"] == {"all-reduce": 9, "all-gather": 1}
    mamba = NemotronHConfig.preset("nemotron-h-8b").hybrid_override_pattern[:8].count("M")
    # one per boundary, two products of one row in each block and the head, and one more in each Mamba block
    assert entries[1]["kernels"] == {"mosaic_gpu_v2": 8 + 2 * 8 + 1 + mamba} and entries[1]["collectives"] == {
        "all-reduce": 1,
        "all-gather": 1,
    }


def test_targets():
    assert parse("h200") == ("h200", 8) and parse("h200:2") == ("h200", 2)
    for bad in ("h100:2", "h200:0", "h200:two", ""):
        with pytest.raises(ValueError, match="accepted NAME"):
            parse(bad)
    with pytest.raises(ValueError, match="needs 16 devices, found 8"):
        absent("h200", 8, compile=False).mesh(16)


def test_a_model_is_cut_after_its_first_blocks():
    config = NemotronHConfig.preset("nemotron-3-nano-30b-a3b")
    cut = first_layers(config, 5)
    assert cut.num_hidden_layers == 5 and config.hybrid_override_pattern.startswith(cut.hybrid_override_pattern)
    assert first_layers(config, 0) is config


def test_profiles_name_the_layers(tmp_path, count_case):
    (run,) = expand(SMALL)
    result = Executor(tmp_path)(run)
    assert result["status"] == "done"
    traces = list((tmp_path / run.key).rglob("*.xplane.pb"))
    assert traces, "no trace was written"
    text = b"".join(t.read_bytes() for t in traces)
    assert b"layer_0_mamba" in text and b"layer_1_mlp" in text
    count_case()


# ---------------------------------------------------------------------------------------- predictions
def described(name: str, tp: int = 1, fusion: str = "none", **options):
    return NemotronH(
        NemotronHConfig.preset(name), mesh=absent("h200", 8, compile=False).mesh(tp), fusion=fusion, **options
    )


def states(config: NemotronHConfig) -> int:
    """Operations on the states, one token at 2048: 4 per head channel and slot, 6 per entry of the SSM state."""
    attention = 4 * 2049 * config.num_attention_heads * config.head_dim
    mamba = 6 * config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size
    pattern = config.hybrid_override_pattern
    return pattern.count("*") * attention + pattern.count("M") * mamba


@pytest.mark.parametrize(
    "name, gigabytes", [("nemotron-h-8b", 15.37), ("nemotron-nano-9b-v2", 16.92), ("nemotron-h-47b", 93.0)]
)
def test_bytes_of_a_step_are_those_of_the_weights_and_states(name, gigabytes):
    """Against sums made by hand from the shapes: weights without the embedding, SSM state twice, KV at 2048 tokens."""
    bytes_, flops = work(described(name), 1, 1, 2048)
    assert bytes_ / 1e9 == pytest.approx(gigabytes, rel=0.005)
    config = NemotronHConfig.preset(name)
    numbers = parameter_count(config, mtp=False) - config.vocab_size * config.hidden_size
    assert flops == pytest.approx(2 * numbers + states(config), rel=0.002)


def test_experts_that_are_not_chosen_are_not_read():
    model = described("nemotron-3-nano-30b-a3b")
    bytes_, flops = work(model, 1, 1, 2048)
    active = active_parameter_count(model.config) - model.config.vocab_size * model.config.hidden_size
    assert bytes_ / 1e9 == pytest.approx(6.57, rel=0.01) and flops == pytest.approx(
        2 * active + states(model.config), rel=0.002
    )
    assert touched_experts(128, 6, 1) == pytest.approx(6) and touched_experts(128, 6, 10_000) == pytest.approx(128)
    assert work(model, 64, 1, 2048)[0] > 5 * bytes_


def test_degrees_divide_the_work():
    for what in ((1, 1, 2048), (1, 8192, 0)):
        one, eight = (work(described("nemotron-h-8b", tp), *what) for tp in (1, 8))
        assert eight[0] == pytest.approx(one[0] / 8, rel=0.03) and eight[1] == pytest.approx(one[1] / 8, rel=0.03)


def predicted(name, tp, plan, batch=1, tokens=1, context=2048):
    model = described(name, tp, plan)
    return predict(model, plan_for(model, batch, tokens, absent("h200", 8, compile=False)), batch, tokens, context)


def test_predictions_are_near_what_was_measured():
    """8B shapes on H200: 4.24 ms a token on one, 3.5-3.6 (psum), 2.97-2.99 (flags) on two: within a tenth."""
    assert predicted("nemotron-h-8b", 1, "none").seconds * 1e3 == pytest.approx(4.24, rel=0.1)
    assert predicted("nemotron-h-8b", 2, "none").seconds * 1e3 == pytest.approx(3.56, rel=0.1)
    assert predicted("nemotron-h-8b", 2, "all/flags").seconds * 1e3 == pytest.approx(2.98, rel=0.1)


def test_predictions_know_what_is_summed():
    none, fused = predicted("nemotron-h-8b", 4, "none"), predicted("nemotron-h-8b", 4, "all/flags")
    assert none.read == fused.read and none.exchange > fused.exchange > 0
    assert predicted("nemotron-h-8b", 1, "all/flags").exchange == 0
    assert (
        predicted("nemotron-h-8b", 8, "none", tokens=8192, context=0).compute
        > predicted("nemotron-h-8b", 8, "none").compute
    )
    assert exchange_seconds(H200, "gather", 4, 1e6) - exchange_seconds(H200, "gather", 4, 0) == pytest.approx(
        3e6 / H200.link
    )
    assert exchange_seconds(H200, "psum", 1, 1e6) == 0
    assert exchange_seconds(H200, "psum", 16, 0) == 2 * exchange_seconds(H200, "psum", 8, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_prediction(name):
    for tp in (1, 8):
        p = predicted(name, tp, "all/one_shot")
        assert 1e-4 < p.seconds < 1 and p.bytes > 0 and p.flops > 0


# ---------------------------------------------------------------------------------------- report
def measured_entry(**changes):
    base = {"model": "m", "dtype": "bfloat16", "data": 1, "tensor": 2, "plan": "none", "rules": {}, "what": "decode",
            "batch": 1, "tokens": 8, "status": "done", "ms": 2.0, "times_mean_something": True,
            "predicted": {"ms": 2.5}, "share_of_floor": 0.5,
            "collectives": {"all-reduce": 3}, "collective_bytes": {"all-reduce": 4000}, "kernels": {},
            "weight_bytes": 2e9, "cache_bytes": {"kv": 1e9}, "memory": {"temp": 5e6},
            "compile_seconds": 1.0}  # fmt: skip
    return base | changes


def test_the_table_shows_measurements_beside_predictions():
    entries = [
        measured_entry(),
        measured_entry(plan="all", ms=1.0),
        measured_entry(tensor=4, times_mean_something=False),
    ]
    text = table(entries)
    lines = text.splitlines()
    assert "| 2.000 | 2.500 | +25% | 50% | 3 |" in lines[2] and "| (2.000) | 2.500 |  |" in lines[4]
    assert "median +88%, from +25% to +150%" in text and errors(entries) == [0.25, 1.5]
    assert "mean nothing" in text


def test_results_become_a_table_and_plots(small_results, tmp_path, count_case):
    _, entries = small_results
    text = table(entries)
    assert text.count("\n| ") == len(entries) and "refused: tensor parallel degree 3" in text
    names = {path.name for path in plots(entries, tmp_path)}
    assert names == {"time.png", "fused.png", "memory.png"}  # no share of a floor on CPU devices
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)
    assert "roofline.png" in {path.name for path in plots([measured_entry()], tmp_path)}
    json.dumps(entries, allow_nan=False)
    count_case()


# ---------------------------------------------------------------------------------------- program and walk-through
def test_the_program_lists_and_runs(tmp_path, capsys, count_case):
    spec = tmp_path / "spec.toml"
    mesh = "[{tensor = 2}, {tensor = 3}]"
    spec.write_text(
        f'model = "{SMALL["model"]}"\ndtype = "float32"\nlayers = 2\nsteps = [1, 2]\nrepeats = 1\nmesh = {mesh}\n'
    )
    assert cli.main(["experiment", str(spec), "--out", str(tmp_path), "--list"]) == cli.DONE
    assert capsys.readouterr().out.count("\n") == 2
    assert cli.main(["experiment", str(tmp_path / "none.toml"), "--out", str(tmp_path)]) == cli.BAD_INPUT
    environment = fresh_environment()
    line = [sys.executable, "-m", "nemotron_jax", "experiment", str(spec), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [r["status"] for r in result["runs"]] == ["done", "refused"] and len(result["devices"]) == 3
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"results.json", "results.md", "memory.png"}
    count_case()


def test_the_walk_through_runs(count_case):
    environment = fresh_environment()
    code = (
        "import sys, json, numpy as np; sys.path.insert(0, 'examples'); import flip_one_layer as f\n"
        "r = f.main(); counts = [r[k]['collectives'] for k in ('before', 'after')]\n"
        "print('RESULT', json.dumps([r['comparison'].ok, *counts, r['apart']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ok, before, after, apart = json.loads(done.stdout.split("RESULT ")[1])
    assert ok and before == {"all-reduce": 12, "all-gather": 1} and after == {"all-reduce": 11, "all-gather": 2}
    assert apart[:5] == [0.0] * 5 and 0 <= max(apart) < 1e-4  # the sum of block 5 is the first that could differ
    assert np.isfinite(apart).all()
    count_case()


def test_every_kept_result_can_be_set_beside_a_prediction():
    """Of all files under benchmarks, decode and prefill of whole models, and nothing else."""
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("prediction_error", root / "scripts" / "prediction_error.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = {path.name: script.rows(path) for path in root.glob("benchmarks/*/*.json")}
    assert [r["kernels"] for r in found["h200_8b_b1.json"]] == ["none", "auto", "auto,matvec"]
    assert [r["size"] for r in found["h200_8b.json"]] == [8192, 8192, 32768, 32768]
    assert not found["h200_8b_kernels.json"] and not found["h200_x2_loop8_4096.json"]
    assert sum(map(len, found.values())) >= 15
