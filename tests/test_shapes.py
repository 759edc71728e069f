"""Names and shapes of checkpoints: against published counts, stored files, and the shapes that are known one by one."""

import dataclasses
import json
import math
import struct
from collections import Counter
from pathlib import Path

import pytest

from nemotron_jax.config import PRESETS, NemotronHConfig
from nemotron_jax.shapes import active_parameter_count, block_shapes, checkpoint_shapes, parameter_count

HERE = Path(__file__).parent
FOLDERS = sorted((HERE / "data" / "tiny").glob("*/hf")) + sorted(HERE.parent.glob("nemotron_jax/models/*/"))

# Parameters and tensors with MTP, those of MTP; the first two as published for Nano-4B, Lightning and Super.
COUNTS = {
    "nemotron-h-4b": (4_489_223_040, 311, 0),
    "nemotron-h-8b": (8_100_852_736, 311, 0),
    "nemotron-h-47b": (46_791_554_816, 577, 0),
    "nemotron-h-56b": (56_324_350_464, 701, 0),
    "nemotron-nano-9b-v2": (8_888_227_328, 341, 0),
    "nemotron-nano-12b-v2": (12_310_001_152, 369, 0),
    "nemotron-3-nano-4b": (3_973_556_832, 263, 0),
    "nemotron-3-nano-30b-a3b": (31_577_940_288, 6243, 0),
    "nemotron-3.5-lightning-30b-a3b": (32_913_266_240, 6513, 270),
    "nemotron-3-super-120b-a12b": (123_611_033_088, 42683, 1040),
    "nemotron-3-ultra-550b-a55b": (560_524_603_904, 51023, 1040),
    "nemotron-labs-3-puzzle-75b-a9b": (78_295_670_272, 42683, 1040),
}


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that a folder's files hold, from their headers."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
        header.pop("__metadata__", None)
        assert not set(header) & set(found)
        found |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_counts_of_released_models(name):
    config = NemotronHConfig.preset(name)
    shapes = checkpoint_shapes(config)
    parameters, tensors, mtp = COUNTS[name]
    assert parameter_count(config) == parameters == PRESETS[name].parameters
    assert len(shapes) == tensors == PRESETS[name].tensors
    assert sum(key.startswith("mtp.") for key in shapes) == mtp
    without = checkpoint_shapes(config, mtp=False)
    assert without == {key: shape for key, shape in shapes.items() if not key.startswith("mtp.")}
    assert parameter_count(config, mtp=False) == sum(map(math.prod, without.values()))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("nemotron-3-nano-30b-a3b", 31.6, 3.6),
        ("nemotron-3-super-120b-a12b", 120.7, 12.8),
        ("nemotron-labs-3-puzzle-75b-a9b", 75.4, 9.3),
        ("nemotron-h-8b", 8.1, 8.1),
    ],
)
def test_published_sizes_in_billions(name, total, active):
    config = NemotronHConfig.preset(name)
    assert round(parameter_count(config, mtp=False) / 1e9, 1) == total
    assert round(active_parameter_count(config) / 1e9, 1) == active


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(HERE.parent).as_posix())
def test_stored_checkpoints_one_to_one(folder):
    assert checkpoint_shapes(NemotronHConfig.from_json(folder)) == stored(folder)


def test_there_are_stored_checkpoints_of_every_kind():
    configs = [NemotronHConfig.from_json(folder) for folder in FOLDERS]
    assert len(configs) >= 13
    assert set("".join(config.hybrid_override_pattern for config in configs)) == set("M*-E")
    for what in ("tie_word_embeddings", "use_bias", "mlp_bias", "moe_latent_size", "num_nextn_predict_layers"):
        assert any(getattr(config, what) for config in configs), what


def test_super_tensor_by_tensor():
    shapes = checkpoint_shapes(NemotronHConfig.preset("nemotron-3-super-120b-a12b"))

    def under(prefix):
        return {name.removeprefix(prefix): shape for name, shape in shapes.items()
                if name.startswith(prefix) and "experts." not in name.removeprefix(prefix)}  # fmt: skip

    assert under("backbone.layers.0.") == {
        "norm.weight": (4096,),
        "mixer.in_proj.weight": (18560, 4096),
        "mixer.conv1d.weight": (10240, 1, 4),
        "mixer.conv1d.bias": (10240,),
        "mixer.A_log": (128,),
        "mixer.D": (128,),
        "mixer.dt_bias": (128,),
        "mixer.norm.weight": (8192,),
        "mixer.out_proj.weight": (4096, 8192),
    }
    attention = {
        "norm.weight": (4096,),
        "mixer.q_proj.weight": (4096, 4096),
        "mixer.k_proj.weight": (256, 4096),
        "mixer.v_proj.weight": (256, 4096),
        "mixer.o_proj.weight": (4096, 4096),
    }
    experts = {
        "norm.weight": (4096,),
        "mixer.gate.weight": (512, 4096),
        "mixer.gate.e_score_correction_bias": (512,),
        "mixer.fc1_latent_proj.weight": (1024, 4096),
        "mixer.fc2_latent_proj.weight": (4096, 1024),
    }
    assert under("backbone.layers.7.") == attention
    assert under("backbone.layers.1.") == experts
    assert under("mtp.layers.0.") == attention | {
        "enorm.weight": (4096,), "hnorm.weight": (4096,), "eh_proj.weight": (4096, 8192)}  # fmt: skip
    assert under("mtp.layers.1.") == experts | {"final_layernorm.weight": (4096,)}
    for prefix in ("backbone.layers.1.mixer.", "mtp.layers.1.mixer."):
        assert shapes[prefix + "experts.511.up_proj.weight"] == (2688, 1024)
        assert shapes[prefix + "experts.0.down_proj.weight"] == (1024, 2688)
        assert shapes[prefix + "shared_experts.up_proj.weight"] == (5376, 4096)
        assert shapes[prefix + "shared_experts.down_proj.weight"] == (4096, 5376)
        assert prefix + "experts.512.up_proj.weight" not in shapes
    assert shapes["backbone.embeddings.weight"] == shapes["lm_head.weight"] == (131072, 4096)
    assert shapes["backbone.norm_f.weight"] == (4096,)


def test_experts_without_a_latent_see_the_full_width():
    shapes = checkpoint_shapes(NemotronHConfig.preset("nemotron-3-nano-30b-a3b"))
    assert shapes["backbone.layers.1.mixer.experts.127.up_proj.weight"] == (1856, 2688)
    assert not any("latent" in name for name in shapes)


def test_layers_of_puzzle_have_their_own_widths():
    shapes = checkpoint_shapes(NemotronHConfig.preset("nemotron-labs-3-puzzle-75b-a9b"))
    widths = Counter(shape[0] for name, shape in shapes.items()
                     if name.startswith("backbone.") and name.endswith("experts.0.up_proj.weight")
                     and "shared" not in name)  # fmt: skip
    assert widths == {1280: 25, 2688: 7, 1536: 4, 1792: 3, 2048: 1}
    assert shapes["mtp.layers.1.mixer.experts.0.up_proj.weight"] == (2688, 1024)
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (2 * 8192 + 2 * 8 * 96 + 128, 4096)


def test_biases_ties_and_several_mtp_steps():
    config = NemotronHConfig.from_json(HERE / "data" / "tiny" / "dense_bias" / "hf")
    plain = dataclasses.replace(config, use_bias=False, mlp_bias=False, use_conv_bias=False)
    more = {name.split("mixer.")[1] for name in set(checkpoint_shapes(config)) - set(checkpoint_shapes(plain))}
    assert more == {"in_proj.bias", "out_proj.bias", "conv1d.bias", "up_proj.bias", "down_proj.bias"}
    assert block_shapes(config, "M")["mixer.in_proj.bias"] == block_shapes(config, "M")["mixer.in_proj.weight"][:1]
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert set(checkpoint_shapes(config)) - set(checkpoint_shapes(tied)) == {"lm_head.weight"}
    two = dataclasses.replace(config, num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*-*")
    mtp = [name for name in checkpoint_shapes(two) if name.startswith("mtp.")]
    assert [name for name in mtp if name.endswith("enorm.weight")] == [f"mtp.layers.{i}.enorm.weight" for i in (0, 3)]
    last = [name for name in mtp if "final_layernorm" in name]
    assert last == [f"mtp.layers.{i}.final_layernorm.weight" for i in (2, 5)]


def test_prefixes():
    config = NemotronHConfig.from_json(HERE / "data" / "tiny" / "moe_latent_mtp" / "hf")
    usual, puzzle = checkpoint_shapes(config), checkpoint_shapes(config, prefix="model.")
    wrapped = checkpoint_shapes(config, prefix="language_model.backbone.")
    assert list(puzzle) == [name.replace("backbone.", "model.", 1) for name in usual]
    assert list(wrapped) == [name if name.startswith("mtp.") else "language_model." + name for name in usual]
