"""Checkpoints written on the spot with fresh random weights: PyTorch and this package compute the same."""

import json

import numpy as np
import pytest

from tests.pytorch.conftest import SCRIPTS

NAMES = ("dense_g8_plain", "dense_bias_tied", "mamba_heavy_conv3", "moe_latent")


@pytest.fixture(scope="module")
def checkpoints(in_torch, seed, tmp_path_factory):
    """name -> (checkpoint folder, reference file, report)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    in_torch(SCRIPTS / "make_tiny_checkpoints.py", "--out", folder, "--seed", seed)
    # One process for all, so that transformers is imported and probed once.
    options = ["--random", "2", "37", "--seed", str(seed), "--oracle", "--threads", "2", "--json"]
    lines = [[str(folder / name), str(folder / f"{name}.npz"), *options] for name in NAMES]
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from dump_pytorch_reference import main
sys.exit(max(main(line) for line in {lines!r}))
"""
    reports = in_torch("-c", program).splitlines()
    found = {}
    for name, report in zip(NAMES, reports, strict=True):
        found[name] = folder / name, folder / f"{name}.npz", json.loads(report)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_sound(checkpoints, name):
    """The repaired PyTorch model agrees with the float64 oracle, so it is fit to judge others."""
    _, reference, report = checkpoints[name]
    assert report["problems"] == []
    assert report["weights"]["differing"] == [] and report["weights"]["equal"] > 0
    assert report["error_against_float64"]["fixed"]["max"] < 1e-4
    assert report["consistency"]["fixed"]["decode_against_full"] < 1e-4
    with np.load(reference) as arrays:
        assert json.loads(str(arrays["report"]))["sha256"] == report["sha256"]


@pytest.mark.parametrize(
    "name, tensor_parallel, fusion",
    [(name, 1, "none") for name in NAMES] + [(name, 2, "all/gather") for name in NAMES],
)
def test_equals_pytorch(checkpoints, nemotron_jax, count_case, seed, name, tensor_parallel, fusion):
    checkpoint, reference, _ = checkpoints[name]
    status, result = nemotron_jax(
        "compare", checkpoint, reference, "--tensor-parallel", tensor_parallel, "--fusion", fusion)  # fmt: skip
    assert result["within_tolerance"] is True and status == 0, f"seed {seed}: {result}"
    assert result["max_abs_logit_error"] <= 1e-4
    assert result["first_layer_beyond_tolerance"] is None
    # 2 prompts and 4 left-padded rows, of 32 tokens each
    assert result["greedy_matches"] == result["greedy_total"] == 6 * 32, f"seed {seed}: {result}"
    count_case()


def test_wrong_weights_are_noticed(checkpoints, nemotron_jax, count_case):
    """A comparison that cannot fail proves nothing: other weights of the same shapes must not pass."""
    _, reference, _ = checkpoints["dense_g8_plain"]
    checkpoint = checkpoints["dense_g8_plain"][0]
    from safetensors.numpy import load_file, save_file

    damaged = checkpoint.with_name("damaged")
    damaged.mkdir()
    (damaged / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["backbone.layers.2.mixer.D"] = tensors["backbone.layers.2.mixer.D"] + np.float32(0.05)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    status, result = nemotron_jax("compare", damaged, reference)
    assert status == 1 and result["within_tolerance"] is False
    assert result["first_layer_beyond_tolerance"] == 2
    count_case()
