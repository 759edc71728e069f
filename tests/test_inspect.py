"""``inspect``: sizes from shapes alone, and collectives counted in programs, against what plans promise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, cli, make_mesh
from nemotron_jax.collectives import count_compiled, count_hlo, count_lowered, promised
from nemotron_jax.inspection import cache_bytes, degrees, inspect
from nemotron_jax.presets import PRESETS
from nemotron_jax.shapes import parameter_count
from nemotron_jax.step import lower_step, plan_for, step_arguments
from nemotron_jax.targets import absent
from pallas_kernels import selection
from tests.conftest import TINY

ROOT = Path(__file__).parents[1]


def tiny(name: str) -> NemotronHConfig:
    return NemotronHConfig.from_json(TINY / name / "hf")


def mixed(pattern: str) -> str:
    """Eager, psum and gather in turns, so that no two neighbours agree and every kind meets each of them."""
    return "layers:" + "".join(".pg"[i % 3] for i in range(len(pattern)))


def expected(config: NemotronHConfig, tp: int, plan: str) -> dict[str, int]:
    """Counted by hand from the plan's letters: what the issue and the documentation say, not what the code says."""
    pattern = config.hybrid_override_pattern
    letters = {"none": "." * len(pattern), "all": "p" * len(pattern), "all/gather": "g" * len(pattern)}
    text = letters.get(plan, plan.removeprefix("layers:"))
    small = pattern.count("M") if tp > config.n_groups else 0
    return {"all-reduce": text.count(".") + text.count("p") + 1 + small, "all-gather": text.count("g") + 1}


def counted(config, tp, plan, **options):
    model = NemotronH(config, mesh=make_mesh(tp), fusion=plan, **options)
    return model, count_lowered(lower_step(model, 1, 1, 64))


PLANS = ("none", "all", "all/gather", "mixed")
GRID = [(name, tp, plan) for name in PRESETS for tp in (2, 4, 8) for plan in PLANS]
# Of every preset one case: each degree and each plan comes up several times.
SOME = [(name, (2, 4, 8)[i % 3], PLANS[i % 4]) for i, name in enumerate(PRESETS)]


def check_preset(name: str, tp: int, plan: str) -> None:
    config = NemotronHConfig.from_dict(PRESETS[name].config)
    plan = mixed(config.hybrid_override_pattern) if plan == "mixed" else plan
    model, counts = counted(config, tp, plan)
    assert counts.collectives == expected(config, tp, plan)
    assert promised(model, plan_for(model, 1, 1)) == counts.collectives
    assert counts.in_loops == {}


@pytest.mark.parametrize("name, tp, plan", SOME)
def test_full_size_programs_keep_the_plans_promise(name, tp, plan, count_case):
    check_preset(name, tp, plan)
    count_case()


@pytest.mark.full
@pytest.mark.parametrize("name, tp, plan", [case for case in GRID if case not in SOME])
def test_every_full_size_program_keeps_the_plans_promise(name, tp, plan, count_case):
    check_preset(name, tp, plan)
    count_case()


@pytest.mark.parametrize(
    "name, tp, plan",
    [
        ("dense_g2_kv2", 4, "none"),
        ("dense_g8_kv4", 2, "all"),
        ("dense_g2_kv2", 2, "mixed"),
        ("moe_latent_super", 4, "all/gather"),
    ],
)
def test_compiled_programs_exchange_what_lowered_ones_do(name, tp, plan, count_case):
    config = tiny(name)
    plan = mixed(config.hybrid_override_pattern) if plan == "mixed" else plan
    model = NemotronH(config, mesh=make_mesh(tp), fusion=plan)
    lowered = lower_step(model, 1, 1, 64)
    assert (
        count_compiled(lowered.compile()).collectives
        == count_lowered(lowered).collectives
        == expected(config, tp, plan)
    )
    count_case()


def test_one_device_exchanges_nothing(count_case):
    config = tiny("dense_g2_kv2")
    for plan in ("none", "all", "all/gather"):
        model, counts = counted(config, 1, plan)
        assert counts.collectives == {} == promised(model, plan_for(model, 1, 1))
        count_case()
    assert count_compiled(lower_step(model, 1, 1, 64).compile()).collectives == {}


@pytest.mark.parametrize("tp, small", [(2, 0), (4, 3)])
def test_a_norm_group_over_several_ranks_costs_one_small_sum_per_mamba_block(tp, small):
    config = tiny("dense_g2_kv2")  # two groups, three Mamba blocks
    assert config.hybrid_override_pattern.count("M") == 3
    _, counts = counted(config, tp, "none")
    assert counts.collectives["all-reduce"] == len(config.hybrid_override_pattern) + 1 + small


def test_rules_that_cut_nothing_leave_nothing_to_sum():
    config = tiny("dense_g2_kv2")
    rules = ShardingRules.from_dict({"vocab": "none", "q_heads": "none", "kv_heads": "none"})
    model, counts = counted(config, 2, "all/gather", rules=rules)
    attention = config.hybrid_override_pattern.count("*")
    assert counts.collectives == {"all-gather": len(config.hybrid_override_pattern) - attention}
    assert promised(model, plan_for(model, 1, 1)) == counts.collectives


def test_merged_collectives_count_as_operands_and_loops_are_named():
    text = """HloModule m
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = bf16[2,8]{1,0} all-gather(%x), channel_id=3, dimensions={0}
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %r = (f32[4]{0}, f32[2,3]{1,0}) all-reduce(%a, %b), channel_id=1, to_apply=%add
  %s = (f32[8]{0}, f32[8]{0}) all-reduce-start(%c), channel_id=2, to_apply=%add
  %d = f32[8]{0} all-reduce-done(%s)
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body
  ROOT %k = f32[4]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2"
}
"""
    counts = count_hlo(text)
    assert counts.collectives == {"all-gather": 1, "all-reduce": 3}
    assert counts.bytes == {"all-gather": 32, "all-reduce": 16 + 24 + 32}
    assert counts.in_loops == {"all-gather": 1}
    assert counts.kernels == {"mosaic_gpu_v2": 1}


def test_functions_that_are_called_twice_count_twice():
    mesh = make_mesh(2)
    inner = jax.jit(lambda x: jax.lax.psum(x, "tensor"))

    def twice(x):
        return inner(x) + inner(x + 1)

    def looped(x):
        return jax.lax.scan(lambda c, _: (jax.lax.pcast(inner(c), "tensor", to="varying"), None), x, None, length=3)[0]

    x = jnp.ones((2, 4))
    for f, out, operands, loops in ((twice, P(), 2, {}), (looped, P("tensor"), 1, {"all-reduce": 1})):
        program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tensor"), out_specs=out))
        counts = count_lowered(program.lower(x))
        assert counts.collectives == {"all-reduce": operands} and counts.in_loops == loops


def test_kernels_are_counted_for_gpus_that_are_not_here(count_case):
    """The real kernels in a full-size program, lowered for 8 H200 on whatever machine this is."""
    config = NemotronHConfig.from_dict(PRESETS["nemotron-h-4b"].config)
    target = absent("h200", 8, compile=False)
    plan = "kinds:M/flags"
    with selection.use("none"):
        report = inspect(NemotronH(config, mesh=target.mesh(4), fusion=plan), target=target)
    mamba = config.hybrid_override_pattern.count("M")
    others = len(config.hybrid_override_pattern) - mamba
    assert report["kernels"] == {"mosaic_gpu_v2": mamba}
    assert report["collectives"] == {"all-reduce": others + 1, "all-gather": 1} == report["promised"]
    assert report["target"]["device_kind"] == "NVIDIA H200" and report["counted_in"] == "lowered"
    count_case()


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_the_published_ones(name):
    config = NemotronHConfig.from_dict(PRESETS[name].config)
    model = NemotronH(config, mesh=make_mesh(1), fusion="none")
    held = sum(math.prod(p.layout.local_shape) for p in model.parameters)
    assert parameter_count(config) == PRESETS[name].parameters
    assert held == parameter_count(config, mtp=False)  # what runs is what the checkpoint holds


def test_bytes_are_those_of_the_arrays():
    """The reported sizes equal what a device holds once the model is filled."""
    config = tiny("dense_g2_kv2")
    model = NemotronH(config, mesh=make_mesh(4), rngs=0, fusion="none")
    device = model.mesh.devices.flat[1]
    held = sum(s.data.nbytes for w in model.weights for s in w.addressable_shards if s.device == device)
    assert model.bytes_per_device() == held
    cache = model.new_cache(2, 40)
    held = sum(
        s.data.nbytes for leaf in jax.tree.leaves(cache.layers) for s in leaf.addressable_shards if s.device == device
    )
    assert sum(cache_bytes(model, 2, 40).values()) == held
    rows = degrees(config, capacity=40, batch=2)
    assert [row["tensor_parallel"] for row in rows] == list(range(1, 9))
    assert rows[3]["weight_bytes"] == model.bytes_per_device() and rows[3]["cache_bytes"] == held
    assert "mamba_num_heads = 8 is not a multiple of 3" in rows[2]["refused"]


def test_the_47b_needs_no_two_h200_and_the_550b_does_not_fit_eight():
    def room(name):
        return {
            row["tensor_parallel"]: row.get("fits") for row in degrees(NemotronHConfig.from_dict(PRESETS[name].config))
        }

    assert room("nemotron-h-47b")[1] is True
    assert room("nemotron-3-super-120b-a12b") == {
        1: False,
        2: True,
        3: None,
        4: True,
        5: None,
        6: None,
        7: None,
        8: True,
    }
    assert room("nemotron-3-ultra-550b-a55b")[8] is False


def test_arguments_are_shapes_alone():
    config = NemotronHConfig.from_dict(PRESETS["nemotron-3-ultra-550b-a55b"].config)
    model = NemotronH(config, mesh=make_mesh(8), fusion="none")
    assert model.weights is None
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(step_arguments(model, 1, 1, 1 << 20)))


def program(*arguments, status=0):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    line = [sys.executable, "-m", "nemotron_jax", "inspect", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    return done


def test_the_program(count_case):
    result = json.loads(program("--tensor-parallel", 2, "--fusion", "kinds:M/gather", "--json").stdout)
    letters = "".join("g" if kind == "M" else "." for kind in result["pattern"])
    assert result["parameters"] == 3_012_080 and result["plan"] == letters
    assert result["fused_boundaries"] == 5 == sum(b["defers"] for b in result["boundaries"])
    assert {*result["boundaries"][0]} == {"layer", "kind", "defers", "implementation", "reason"}
    assert result["counted_in"] == "compiled"  # small enough to be compiled unasked
    assert result["collectives"] == {"all-reduce": 7, "all-gather": 6} == result["promised"]
    assert len(result["devices"]) == 2
    count_case()


@pytest.mark.parametrize(
    "arguments, says", [(["nemotron-h-9b"], "accepted: nemotron-"), (["--device", "b300"], "h200")]
)
def test_the_program_says_what_it_does_not_know(arguments, says, capsys):
    assert cli.main(["inspect", *arguments]) == cli.BAD_INPUT
    assert says in capsys.readouterr().err
