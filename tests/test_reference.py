"""Every dense float32 reference of PyTorch, at every degree and plan: logits, layers, states, greedy tokens,
left-padded rows."""

import itertools

import pytest

import nemotron_jax
from nemotron_jax import make_mesh
from tests.conftest import TINY

HEADS_FOR_EIGHT = ("dense_g8_kv4", "mamba_only")  # the others have four query heads
CASES = {
    "dense_g2_kv2": "M-M*-M-",
    "dense_g1_kv1_nobias": "M-M*-M-",
    "dense_g8_kv4": "M-MM-*-M*-",
    "dense_bias": "M-M*-M-",
    "dense_tied": "M-*M-",
    "mamba_only": "MM-M-",
    "dt_limit_finite": "M-M*-M-",
}
PLANS = ("none", "all/gather", "mixed", "all/psum")
MESHES = ((1, 1), (2, 1), (4, 1), (2, 2), (8, 1), (4, 2))  # tensor, data

# In the default run each case meets some degrees and plans, and every pair of a mesh and a plan is met by some case.
PAIRS = [
    ("dense_g2_kv2", (1, 1), "none"),
    ("dense_g2_kv2", (4, 1), "mixed"),
    ("dense_g1_kv1_nobias", (2, 1), "all/psum"),
    ("dense_g1_kv1_nobias", (4, 1), "all/gather"),
    ("dense_g8_kv4", (8, 1), "all/gather"),
    ("dense_g8_kv4", (4, 2), "mixed"),
    ("dense_bias", (2, 1), "mixed"),
    ("dense_bias", (4, 1), "none"),
    ("dense_tied", (2, 2), "all/gather"),
    ("dense_tied", (1, 1), "all/gather"),
    ("mamba_only", (8, 1), "none"),
    ("mamba_only", (2, 1), "all/gather"),
    ("dt_limit_finite", (4, 1), "all/psum"),
    ("dt_limit_finite", (2, 1), "none"),
]
REST = [
    case
    for case in itertools.product(CASES, MESHES, PLANS)
    if case not in PAIRS and (case[1][0] < 8 or case[0] in HEADS_FOR_EIGHT)
]


@pytest.mark.parametrize(
    ("case", "mesh", "plan"), [*PAIRS, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_dense_float32(case, mesh, plan, count_case):
    tensor, data = mesh
    spec = "layers:" + "".join(".gp"[i % 3] for i in range(len(CASES[case]))) if plan == "mixed" else plan
    model = nemotron_jax.load(TINY / case / "hf", mesh=make_mesh(tensor, data), fusion=spec, dtype="float32")
    found = nemotron_jax.compare(model, TINY / case / "ref.npz")
    assert found.ok and found.within_tolerance, found.problems
    assert found.first_layer_beyond_tolerance is None
    assert found.max_abs_logit_error <= 1e-4
    assert found.greedy.matches == found.greedy.total > 0
    deferred = {"none": 0, "mixed": sum(c != "." for c in spec.removeprefix("layers:"))}.get(plan, len(CASES[case]))
    assert found.run["fused_boundaries"] == (deferred if tensor > 1 else 0)
    missing = {"logits", "layer", "embed", "final", "ssm", "conv", "pad_logits", "greedy_logits"} - set(found.arrays)
    assert not missing, missing
    count_case()
