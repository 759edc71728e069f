"""Reading, refusing and writing configurations. Every spelling that a released file or a program has used is here."""

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_jax.config import PRESETS, ConfigError, FrozenMapping, NemotronHConfig

TINY = sorted((Path(__file__).parent / "data" / "tiny").glob("*/"))
NEW_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_NAMES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def dense(**changes):
    """A dense model's file. A change to `...` removes the key."""
    d = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*-",
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
    }
    return {key: value for key, value in (d | changes).items() if value is not ...}


def moe(**changes):
    d = dense(
        hybrid_override_pattern="MEM*E",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=2.5,
    )
    return {key: value for key, value in (d | changes).items() if value is not ...}


def read(d):
    return NemotronHConfig.from_dict(d)


def faults(d):
    with pytest.raises(ConfigError) as caught:
        read(d)
    assert isinstance(caught.value, ValueError)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


def through_json(config):
    return read(json.loads(json.dumps(config.to_dict(), allow_nan=False)))


# ------------------------------------------------------------------------------------------------ spellings


@pytest.mark.parametrize(
    "spelling",
    [
        {"hybrid_override_pattern": "M-M*-"},
        {"hybrid_override_pattern": "M-M|*-|"},
        {"hybrid_layer_pattern": "M-|M*-"},
        {"hybrid_override_pattern": list("M-M*-")},
        {"layers_block_type": [OLD_NAMES[ch] for ch in "M-M*-"]},
        {"layers_block_type": [NEW_NAMES[ch] for ch in "M-M*-"]},
        {"layer_types": [NEW_NAMES[ch] for ch in "M-M*-"]},
        {"layers_block_type": [OLD_NAMES[ch] for ch in "M-M*-"], "hybrid_override_pattern": None},
        {"layers_block_type": [], "hybrid_override_pattern": "M-M*-"},
        {"layers_block_type": [NEW_NAMES[ch] for ch in "M-M*-"], "hybrid_override_pattern": "M-M*-"},
        {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
        {"layers_block_type": [OLD_NAMES[ch] for ch in "M-M*-"], "num_hidden_layers": None},
        {"block_configs": [{"block_type": OLD_NAMES[ch]} for ch in "M-M*-"]},
    ],
    ids=str,
)
def test_every_spelling_of_the_layer_list_is_the_same_model(spelling):
    config = read(dense(hybrid_override_pattern=...) | spelling)
    assert config.hybrid_override_pattern == "M-M*-"
    assert config.num_hidden_layers == 5
    assert config.layers_block_type == ("mamba", "mlp", "mamba", "attention", "mlp")
    assert dataclasses.replace(config, block_configs=()) == read(dense())


@pytest.mark.parametrize(
    ("key", "alias", "value", "default"),
    [
        ("layer_norm_epsilon", "norm_eps", 3e-6, 1e-5),
        ("layer_norm_epsilon", "rms_norm_eps", 3e-6, 1e-5),
        ("head_dim", "attention_head_dim", 20, None),
        ("n_groups", "mamba_n_groups", 4, 8),
        ("conv_kernel", "mamba_d_conv", 3, 4),
        ("chunk_size", "mamba_chunk_size", 64, 128),
        ("use_conv_bias", "mamba_conv_bias", False, True),
        ("time_step_limit", "mamba_dt_limit", (0.25, 2.0), (0.0, math.inf)),
        ("dtype", "torch_dtype", "float16", "bfloat16"),
        ("n_routed_experts", "num_local_experts", 16, None),
    ],
)
def test_aliases(key, alias, value, default):
    plain = moe(**{key: ...})
    assert getattr(read(plain | {key: value}), key) == value
    assert getattr(read(plain | {alias: value}), key) == value
    assert getattr(read(plain | {key: None, alias: value}), key) == value
    assert getattr(read(plain | {key: value, alias: value}), key) == value
    if default is not None:
        assert getattr(read(plain), key) == default
        assert getattr(read(plain | {key: None}), key) == default
    (fault,) = faults(plain | {key: value, alias: {"n_groups": 1, "dtype": "float32"}.get(key, 4)})
    assert key in fault and alias in fault and "accepted" in fault


@pytest.mark.parametrize(
    "limit",
    [
        None,
        [0.0, math.inf],
        [0, "Infinity"],
        ["0.0", "inf"],
        [0.0, {"__float__": "Infinity"}],
        [0.0, 1e308],
        [0.0, 3.4028234663852886e38],
        [0, 10**60],
    ],
    ids=str,
)
def test_unlimited_dt_in_every_spelling(limit):
    assert read(dense(time_step_limit=limit)).time_step_limit == (0.0, math.inf)
    assert "time_step_limit" not in read(dense(time_step_limit=limit)).to_dict()


def test_limits_of_dt_that_limit_are_kept_and_writable():
    assert read(dense(time_step_limit=[0.01, 0.5])).to_dict()["time_step_limit"] == [0.01, 0.5]
    half = read(dense(time_step_limit=[0.01, {"__float__": "Infinity"}]))
    assert half.time_step_limit == (0.01, math.inf)
    written = half.to_dict()["time_step_limit"]
    assert written[0] == 0.01 and math.isfinite(written[1]) and written[1] <= 3.3895313892515355e38
    assert through_json(half) == half


@pytest.mark.parametrize(
    "bad",
    [[1, 0.5], [-1, 2], [0, 0], [0.0], [0, 1, 2], "x", [None, 1], [0, math.nan], [math.inf, math.inf], [True, 2], 5],
)
def test_impossible_limits_of_dt(bad):
    (fault,) = faults(dense(time_step_limit=bad))
    assert fault.startswith("time_step_limit: found") and "accepted: two numbers" in fault


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "float16", "float32"])
def test_dtype(key, value):
    assert read(dense(**{key: value})).dtype == value
    assert read(dense(**{key: "torch." + value})).dtype == value
    assert read(dense(dtype=value, torch_dtype="torch." + value)).dtype == value


def test_null_sizes_follow_from_others():
    config = read(dense(num_key_value_heads=None, head_dim=None))
    assert (config.num_key_value_heads, config.head_dim) == (4, 12)
    assert read(dense(num_key_value_heads=...)).num_key_value_heads == 4


def test_a_missing_head_dim_is_refused_where_programs_disagree_about_it():
    (fault,) = faults(dense(head_dim=...))
    assert "head_dim: found nothing" in fault and "12" in fault and "128" in fault
    assert read(dense(head_dim=..., hidden_size=512)).head_dim == 128
    assert read(dense(head_dim=..., hybrid_override_pattern="M-")).head_dim == 12  # no attention: nothing to get wrong


@pytest.mark.parametrize("value", [None, 0, ...])
def test_dense_models_may_have_null_or_zero_expert_keys(value):
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
            "moe_latent_size", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")  # fmt: skip
    config = read(dense(**dict.fromkeys(keys, value)))
    assert config.n_routed_experts == 0 and config.moe_latent_size is None
    assert through_json(config) == config


def test_expert_models_need_no_dense_width_and_attention_free_ones_no_heads():
    assert read(moe(intermediate_size=None)).intermediate_size == 0
    config = read(dense(hybrid_override_pattern="M-", num_attention_heads=None, num_key_value_heads=..., head_dim=...))
    assert config.num_attention_heads == config.num_key_value_heads == config.head_dim == 0
    assert through_json(config) == config
    config = read(dense(hybrid_override_pattern="*-", mamba_num_heads=0, ssm_state_size=None, n_groups=0))
    assert config.inner_size == 0


def test_latent_size_zero_is_none():
    assert read(moe(moe_latent_size=0)).moe_latent_size is None
    assert read(moe(moe_latent_size=16)).moe_latent_size == 16


@pytest.mark.parametrize(
    ("eos", "ids"),
    [(2, (2,)), ([2, 11], (2, 11)), (None, ()), ([], ()), ([7], (7,))],
    ids=["one", "two", "null", "empty", "list"],
)
def test_end_tokens(eos, ids):
    config = read(dense(eos_token_id=eos))
    assert config.eos_token_ids == ids
    assert through_json(config) == config


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "expand", "mamba_proj_bias", "time_step_min",
                                 "hidden_dropout", "use_mamba_kernels"])  # fmt: skip
def test_keys_without_effect_are_kept_and_change_no_field(key):
    config = read(dense(**{key: 3}))
    assert config.extra[key] == 3
    assert dataclasses.replace(config, extra=FrozenMapping()) == read(dense())
    assert config.inner_size == 96 and config.conv_dim == 160  # whatever `expand` says


# ------------------------------------------------------------------------------------------------ MTP


@pytest.mark.parametrize(
    "spelling",
    [
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]},
        {"num_nextn_predict_layers": 1, "mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe"}]},
        {"num_nextn_predict_layers": 1},
        {"hybrid_override_pattern": "MEM*E/*E"},
        {"hybrid_override_pattern": "MEM*E/*|E/", "num_nextn_predict_layers": 1, "num_hidden_layers": 5},
    ],
    ids=str,
)
def test_every_spelling_of_the_mtp_layers(spelling):
    config = read(moe() | spelling)
    assert config.hybrid_override_pattern == "MEM*E"
    assert (config.num_nextn_predict_layers, config.mtp_hybrid_override_pattern, config.num_mtp_layers) == (1, "*E", 2)
    assert through_json(config) == config


def test_two_mtp_steps():
    config = read(moe(hybrid_override_pattern="MEM*E/*E/*E"))
    assert (config.num_nextn_predict_layers, config.mtp_hybrid_override_pattern, config.num_mtp_layers) == (2, "*E", 4)
    assert read(moe(num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E/*E")).num_mtp_layers == 4


@pytest.mark.parametrize("stated", [0, None, ...])
def test_without_steps_there_is_no_mtp_whatever_list_is_written(stated):
    config = read(dense(num_nextn_predict_layers=stated, mtp_layers_block_type=["full_attention", "moe"]))
    assert (config.num_nextn_predict_layers, config.mtp_hybrid_override_pattern) == (0, "")
    assert through_json(config).extra["mtp_layers_block_type"] == ("full_attention", "moe")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "MEM*E/*E/ME"}, ["'*E'", "'ME'", "mtp_hybrid_override_pattern"]),
        ({"hybrid_override_pattern": "MEM*E/*E", "num_nextn_predict_layers": 2}, ["found 2", "1 steps after '/'"]),
        ({"hybrid_override_pattern": "MEM*E/*E", "num_nextn_predict_layers": 0}, ["found 0", "1 steps after '/'"]),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*Q"}, ["'Q' at position 1"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "-1", "0 or more"]),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["moe"]},
         ["'*E'", "'E'", "mtp_layers_block_type"]),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E/*E"}, ["found 1", "2 steps"]),
        ({"num_nextn_predict_layers": 1, "mtp_block_configs": [{"block_type": "attention"}]}, ["mtp_block_configs"]),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_mtp(changes, words):
    changes = dict(changes)
    if "mtp_block_configs" in changes:
        changes["mtp_hybrid_override_pattern"] = "*E"
    text = "\n".join(faults(moe(**changes)))
    assert all(word in text for word in words), text


def test_the_sizes_of_mtp_layers_are_checked_too():
    text = "\n".join(faults(dense(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")))
    assert "n_routed_experts: found 0 or nothing" in text


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("M-X*", "'X' at position 2"),
        ("M-|xM", "'x' at position 3"),
        ("XM Y", "'X' at position 0, ' ' at position 2, 'Y' at position 3"),
        (["mamba", "convolution"], "'convolution' at position 1"),
        (["mamba", None], "None at position 1"),
        (7, "found 7"),
        ("", "found nothing"),
        ("|", "found ''"),
        (None, "found nothing"),
    ],
)
def test_unknown_letters_are_named_with_their_position(pattern, said):
    (fault,) = [fault for fault in faults(dense(hybrid_override_pattern=pattern)) if "pattern" in fault]
    assert said in fault and "accepted" in fault


@pytest.mark.parametrize("make", [dense, moe])
def test_all_faults_at_once(make):
    found = faults(
        make(
            hybrid_override_pattern="M-*E",
            num_hidden_layers=7,
            vocab_size=0,
            hidden_size=None,
            layer_norm_epsilon=-1,
            dtype="int8",
            mamba_num_heads=7,
            num_key_value_heads=3,
            intermediate_size=None,
            num_experts_per_tok=99,
            n_routed_experts=8,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            use_bias="no",
            sliding_window=5,
            eos_token_id=[1, -3],
        )
    )
    named = [fault.split(":")[0] for fault in found]
    assert sorted(named) == sorted([
        "num_hidden_layers", "vocab_size", "hidden_size", "layer_norm_epsilon", "dtype", "n_groups",
        "num_key_value_heads", "intermediate_size", "num_experts_per_tok", "use_bias", "sliding_window", "eos_token_id",
    ])  # fmt: skip
    assert all("found" in fault and "accepted" in fault for fault in found)


@pytest.mark.parametrize(
    ("make", "key", "value", "accepted"),
    [
        (dense, "hybrid_override_pattern", "M-M*-", None),  # the control: nothing wrong
        (dense, "num_hidden_layers", 4, "equal"),
        (dense, "num_hidden_layers", "5", "positive integer"),
        (dense, "layers_block_type", ["mamba"], "the same layers from each"),
        (dense, "model_type", "llama", "'nemotron_h'"),
        (dense, "vocab_size", True, "a positive integer"),
        (dense, "vocab_size", 128.0, "a positive integer"),
        (dense, "vocab_size", 2**31, "a positive integer"),
        (dense, "hidden_size", "48", "a positive integer"),
        (dense, "hidden_size", [48], "a positive integer"),
        (dense, "layer_norm_epsilon", 0, "a positive number"),
        (dense, "layer_norm_epsilon", math.nan, "a positive number"),
        (dense, "tie_word_embeddings", 1, "true or false"),
        (dense, "residual_in_fp32", "true", "true or false"),
        (dense, "dtype", "float8_e4m3fn", "'bfloat16' or 'float16' or 'float32'"),
        (dense, "mamba_ssm_cache_dtype", "int8", "'bfloat16' or 'float16' or 'float32'"),
        (dense, "max_position_embeddings", -1, "a positive integer"),
        (dense, "pad_token_id", -1, "a token id from 0 to 127, or null"),
        (dense, "bos_token_id", 128, "a token id from 0 to 127, or null"),
        (dense, "eos_token_id", [2, 500], "a token id from 0 to 127, a list of them, or null"),
        (dense, "eos_token_id", True, "a token id"),
        (dense, "quantization_config", "fp8", "a mapping or null"),
        (dense, "mamba_num_heads", 0, "a positive integer"),
        (dense, "mamba_head_dim", -12, "a positive integer"),
        (dense, "ssm_state_size", ..., "a positive integer"),
        (dense, "n_groups", 3, "a divisor of mamba_num_heads 8"),
        (dense, "n_groups", 0, "a positive integer"),
        (dense, "conv_kernel", 0, "a positive integer"),
        (dense, "chunk_size", -1, "a positive integer"),
        (dense, "mamba_hidden_act", "gelu", "'silu' or 'swish'"),
        (dense, "num_attention_heads", ..., "a positive integer"),
        (dense, "num_key_value_heads", 3, "a divisor of num_attention_heads 4"),
        (dense, "num_key_value_heads", 0, "a positive integer"),
        (dense, "head_dim", 0, "a positive integer"),
        (dense, "attention_bias", True, "false"),
        (dense, "sliding_window", 4096, "null"),
        (dense, "intermediate_size", 0, "a positive integer"),
        (dense, "intermediate_size", [80, 80, 90], "one per '-' layer (2)"),
        (dense, "intermediate_size", [], "one per '-' layer (2)"),
        (dense, "mlp_hidden_act", "silu", "'relu2'"),
        (dense, "n_routed_experts", "many", "an integer, 0 or more"),  # even where there are no experts
        (dense, "moe_intermediate_size", [1, 2], "an integer, 0 or more"),
        (dense, "block_configs", {"0": {}}, "a list with one mapping per layer"),
        (dense, "block_configs", [{}], "one for each of 5 layers"),
        (dense, "position_embedding_type", "rope", "'none'"),
        (dense, "use_rope", True, "False"),
        (dense, "rope_scaling", {"type": "yarn", "factor": 4}, "null or rope_type 'default'"),
        (dense, "qk_layernorm", True, "False"),
        (dense, "final_logit_softcapping", 30.0, "nothing or 0"),
        (moe, "n_routed_experts", 0, "a positive integer"),
        (moe, "num_experts_per_tok", 9, "at most n_routed_experts 8"),
        (moe, "num_experts_per_tok", None, "a positive integer"),
        (moe, "moe_intermediate_size", ..., "a positive integer"),
        (moe, "moe_shared_expert_intermediate_size", 0, "a positive integer"),
        (moe, "moe_latent_size", -4, "a positive integer"),
        (moe, "n_shared_experts", 2, "1"),
        (moe, "n_shared_experts", 0, "1"),
        (moe, "mlp_bias", True, "false where there are experts"),
        (moe, "mlp_hidden_act", "gelu", "'relu2'"),
        (moe, "routed_scaling_factor", math.inf, "a positive number"),
        (moe, "routed_scaling_factor", 10**400, "a positive number"),
        (moe, "n_group", 3, "a divisor of n_routed_experts 8"),
        (moe, "n_group", 8, "two experts or more"),
        (moe, "topk_group", 2, "at most n_group 1"),
        (moe, "norm_topk_prob", None, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_impossible_value_is_one_fault(make, key, value, accepted):
    d = make(**{key: value})
    if accepted is None:
        read(d)
        return
    (fault,) = faults(d)
    assert fault.startswith((f"{key}:", "hybrid_override_pattern: found" if key == "layers_block_type" else f"{key}:"))
    assert accepted in fault.split("accepted", 1)[1]


def test_groups_of_experts():
    assert read(moe(n_group=4, topk_group=2)).n_group == 4
    (fault,) = faults(moe(n_group=4, topk_group=1))  # 3 experts a token, 2 in the one group that is kept
    assert "num_experts_per_tok: found 3" in fault and "at most 2" in fault


def test_only_kinds_in_the_pattern_count():
    for key, value in (("attention_bias", True), ("sliding_window", 9), ("head_dim", 0), ("num_key_value_heads", 3)):
        read(dense(hybrid_override_pattern="M-", **{key: value}))
    read(dense(hybrid_override_pattern="M*", mlp_hidden_act="gelu", intermediate_size=0))
    read(dense(mlp_bias=True, use_bias=True))
    read(dense(position_embedding_type="none", rope_scaling=None, rope_parameters={"rope_type": "default"}))
    read(dense(rope_scaling={"rope_theta": 10000.0}))


def test_a_constructor_checks_as_well():
    with pytest.raises(ConfigError, match="intermediate_size: found 0 or nothing; accepted: a positive integer"):
        NemotronHConfig(hybrid_override_pattern="-", vocab_size=8, hidden_size=8)
    with pytest.raises(ConfigError, match="'Z' at position 1"):
        dataclasses.replace(read(dense()), hybrid_override_pattern="MZ")
    with pytest.raises(ConfigError, match=r"block_configs\[1\].block_type: found 'mamba'; accepted: a name of mlp"):
        dataclasses.replace(read(dense()), block_configs=({}, {"block_type": "mamba"}, {}, {}, {}))
    with pytest.raises(ConfigError, match="nothing when num_nextn_predict_layers is 0"):
        dataclasses.replace(read(moe()), mtp_hybrid_override_pattern="*E")


def test_what_is_not_a_file_of_json(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        NemotronHConfig.from_json(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=f"{file}.*\n.*is not JSON"):
        NemotronHConfig.from_json(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="found list; accepted: a mapping"):
        NemotronHConfig.from_json(file)
    file.write_text(json.dumps(dense())[:-1] + ', "hidden_size": 64}')
    with pytest.raises(ConfigError, match="hidden_size: found twice, as 48 and 64"):
        NemotronHConfig.from_json(file)
    file.write_text(json.dumps(dense(vocab_size=0)))
    with pytest.raises(ConfigError, match=f"in {file}"):
        NemotronHConfig.from_json(file)


# ------------------------------------------------------------------------------------------------ layers that differ


def puzzle():
    return moe(
        model_type="nemotron_h_puzzle",
        hybrid_override_pattern=...,
        n_routed_experts=...,
        moe_intermediate_size=...,
        num_hidden_layers=None,
        moe_latent_size=32,
        num_nextn_predict_layers=1,
        block_configs=[
            {"block_type": "mamba", "ssm_state_size": 8},
            {"block_type": "moe", "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 1},
            {"block_type": "attention", "sliding_window": None},
            {"block_type": "moe", "n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 3},
            {"block_type": "mamba"},
        ],
        mtp_block_configs=[
            {"block_type": "attention"},
            {"block_type": "moe", "n_routed_experts": 4, "moe_intermediate_size": 40, "moe_latent_size": 12},
        ],
    )


def test_block_configs_are_seen_by_their_layer_only():
    config = read(puzzle())
    assert config.hybrid_override_pattern == "ME*EM" and config.mtp_hybrid_override_pattern == "*E"
    assert [config.layer(i).moe_intermediate_size for i in (1, 3)] == [16, 24]
    assert [config.layer(i).num_experts_per_tok for i in (1, 3)] == [1, 3]
    assert config.layer(0).ssm_state_size == 8 and config.layer(0).conv_dim == 96 + 2 * 2 * 8
    assert config.layer(4) is config and config.layer(2) is config
    same = dataclasses.replace(config, block_configs=({}, *config.block_configs[1:4], {"ssm_state_size": 16}))
    assert same.layer(4) is same  # what is set is what the model has anyway
    assert config.layer(1) is config.layer(1)
    assert config.layer(1).hybrid_override_pattern == config.hybrid_override_pattern
    assert config.mtp_layer(0) is config
    assert (config.mtp_layer(1).moe_intermediate_size, config.mtp_layer(1).moe_latent_size) == (40, 12)
    assert config.mtp_layer(1).num_experts_per_tok == 3
    assert through_json(config) == config
    for index in (-1, 5):
        with pytest.raises(IndexError, match="layers 0 to 4"):
            config.layer(index)
    with pytest.raises(IndexError, match="2 of them"):
        config.mtp_layer(2)


def test_a_plain_model_has_one_configuration_for_all_layers():
    config = read(moe(num_nextn_predict_layers=1))
    assert all(config.layer(i) is config for i in range(5)) and config.mtp_layer(1) is config


@pytest.mark.parametrize(
    ("layer", "entry", "said"),
    [
        (0, {"block_type": "moe"}, "the same layers from each"),
        (1, {"block_type": "moe", "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 5},
         "num_experts_per_tok: found 5 (layer 1, block_configs); accepted: at most n_routed_experts 4"),
        (1, {"block_type": "moe", "moe_intermediate_size": 16},
         "n_routed_experts: found 0 or nothing (layer 1, block_configs)"),
        (1, {"block_type": "moe", "n_routed_experts": 4},
         "moe_intermediate_size: found 0 or nothing (layer 1, block_configs)"),
        (2, {"block_type": "attention", "sliding_window": 128}, "block_configs[2].sliding_window: found 128"),
        (2, {"block_type": "attention", "hidden_size": 8}, "block_configs[2].hidden_size: found 8"),
        (4, {"block_type": "mamba", "moe_intermediate_size": 8}, "block_configs[4].moe_intermediate_size: found 8"),
    ],
)  # fmt: skip
def test_impossible_block_configs(layer, entry, said):
    d = puzzle() | {"hybrid_override_pattern": "ME*EM"}
    d["block_configs"][layer] = entry
    assert said in "\n".join(faults(d))


def test_one_width_per_dense_mlp():
    config = read(dense(intermediate_size=[80, 96]))
    assert [config.layer(i).intermediate_size for i in (1, 4)] == [80, 96]
    assert config.layer(0).intermediate_size == 80
    assert through_json(config) == config
    assert read(dense(intermediate_size=[64])) == read(dense(intermediate_size=64))


# ------------------------------------------------------------------------------------------------ wrappers


@pytest.mark.parametrize("key", ["llm_config", "text_config"])
def test_the_language_model_inside_a_wrapper(key):
    outer = {"model_type": "NemotronH_Nano_VL_V2", "architectures": ["NemotronH_Nano_VL_V2"], "torch_dtype": "float16",
             "vision_config": {"depth": 3, "scale": math.inf}, "eos_token_id": [2, 5],
             "quantization_config": {"quant_algo": "FP8"}}  # fmt: skip
    config = read(outer | {key: dense()})
    plain = read(dense(eos_token_id=[2, 5], torch_dtype="float16", quantization_config={"quant_algo": "FP8"}))
    assert dataclasses.replace(config, wrapper=None) == plain
    assert config.wrapper["key"] == key and config.wrapper["outer"]["vision_config"]["depth"] == 3
    assert through_json(config) == config
    written = config.to_dict()
    assert written["hybrid_override_pattern"] == "M-M*-" and key not in written  # a plain file, for a plain checkpoint
    inner = read(outer | {key: dense(dtype="float32", eos_token_id=7)})
    assert inner.dtype == "float32" and inner.eos_token_id == 7  # what the language model says itself counts


def test_two_language_models_are_refused():
    assert "found 2 language models" in "\n".join(faults({"llm_config": dense(), "text_config": dense()}))


def test_faults_of_a_wrapped_model_are_found():
    assert faults({"llm_config": dense(vocab_size=-1)}) == ("vocab_size: found -1; accepted: a positive integer",)


# ------------------------------------------------------------------------------------------------ writing


def test_unknown_keys_survive():
    odd = {"a": [1, {"b": None, "c": [math.inf, -math.inf, math.nan]}], "time_step_max": 0.1, "auto_map": {"x": "y"},
           "architectures": ["NemotronHForCausalLM"], "transformers_version": "4.53.2", "names": []}  # fmt: skip
    config = read(dense(**odd))
    assert set(odd) - {"architectures"} == set(config.extra)
    again = through_json(config)
    assert again == config and hash(again) == hash(config)
    written = config.to_dict()
    assert written["auto_map"] == {"x": "y"} and written["transformers_version"] == "4.53.2"
    assert written["architectures"] == ["NemotronHForCausalLM"]
    assert read(dense(architectures=["Mine"])).to_dict()["architectures"] == ["Mine"]
    tags = [{"__float__": text} for text in ("Infinity", "-Infinity", "NaN")]
    assert written["a"] == [1, {"b": None, "c": tags}]


def test_what_is_written_suits_old_and_new_readers():
    d = read(moe(num_nextn_predict_layers=1, dtype="float16", norm_eps=1e-6)).to_dict()
    assert d["hybrid_override_pattern"] == "MEM*E" and d["num_hidden_layers"] == 5
    assert not {"layers_block_type", "layer_types", "mtp_layers_block_type"} & set(d)  # their names changed over time
    assert d["mtp_hybrid_override_pattern"] == "*E"
    assert d["layer_norm_epsilon"] == d["norm_eps"] == d["rms_norm_eps"] == 1e-6
    assert d["head_dim"] == d["attention_head_dim"] == 16
    assert d["torch_dtype"] == "float16"
    assert d["model_type"] == "nemotron_h" and d["architectures"] == ["NemotronHForCausalLM"]
    assert all(value is not None or key in ("pad_token_id", "bos_token_id", "eos_token_id", "moe_latent_size")
               for key, value in d.items())  # fmt: skip


def test_a_changed_configuration_is_written_as_changed():
    config = read(dense(norm_eps=1e-5, attention_head_dim=16, num_hidden_layers=5, torch_dtype="bfloat16"))
    changed = dataclasses.replace(
        config, layer_norm_epsilon=1e-3, head_dim=8, dtype="float32", hybrid_override_pattern="M-"
    )
    assert through_json(changed) == changed


def test_writing_to_a_file_or_a_folder(tmp_path):
    config = read(dense(time_step_limit=[0.5, math.inf], eos_token_id=[1, 2]))
    config.to_json(tmp_path)
    config.to_json(tmp_path / "other.json")
    assert NemotronHConfig.from_json(tmp_path) == NemotronHConfig.from_json(tmp_path / "other.json") == config
    assert "Infinity" not in (tmp_path / "config.json").read_text()


scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=10
)
keys = sorted(set(moe()) | {field.name for field in dataclasses.fields(NemotronHConfig)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pattern=st.text("M*-E", min_size=1, max_size=12),
    steps=st.integers(0, 2),
    mtp=st.text("*E-M", min_size=1, max_size=3),
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 4),
    kv=st.sampled_from([1, 2, 4, None]),
    limit=st.none() | st.tuples(st.floats(0, 10), st.floats(10, 20) | st.just(math.inf) | st.just(1e308)),
    latent=st.sampled_from([None, 0, 8]),
    flags=st.tuples(*[st.booleans()] * 4),
    eos=st.none() | st.integers(0, 127) | st.lists(st.integers(0, 127), max_size=3),
    top_k=st.integers(1, 8),
    unknown=st.dictionaries(st.text("xyz_", min_size=2, max_size=6), json_values, max_size=3),
)
def test_any_possible_configuration_survives_writing_and_reading(
    pattern, steps, mtp, groups, per_group, kv, limit, latent, flags, eos, top_k, unknown
):
    d = moe(
        hybrid_override_pattern=pattern,
        num_nextn_predict_layers=steps,
        mtp_hybrid_override_pattern=mtp,
        n_groups=groups,
        mamba_num_heads=groups * per_group,
        num_key_value_heads=kv,
        time_step_limit=limit,
        moe_latent_size=latent,
        use_conv_bias=flags[0],
        use_bias=flags[1],
        tie_word_embeddings=flags[2],
        residual_in_fp32=flags[3],
        eos_token_id=eos,
        num_experts_per_tok=top_k,
        **unknown,
    )
    config = read(d)
    again = through_json(config)
    assert again == config and hash(again) == hash(config)
    for field in dataclasses.fields(config):
        assert type(getattr(again, field.name)) is type(getattr(config, field.name)), field.name
    assert set(unknown) <= set(again.extra)
    assert again.to_dict() == config.to_dict()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(key=st.sampled_from(keys), value=json_values)
def test_any_value_is_read_or_refused_in_words(key, value):
    try:
        config = read(moe(**{key: value}))
    except ConfigError as error:
        assert error.faults
    else:
        assert through_json(config) == config


# ------------------------------------------------------------------------------------------------ values


def test_equal_hashable_immutable_copyable():
    first, second = read(moe(a={"b": [1]})), read(moe(a={"b": [1]}))
    assert first == second and hash(first) == hash(second) and len({first, second}) == 1
    assert first != read(moe(a={"b": [2]})) and first != read(moe(vocab_size=129)) and first != "config"
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
    assert hash(pickle.loads(pickle.dumps(first))) == hash(first)
    # Another process hashes strings otherwise: a hash that was kept must not travel.
    assert set(vars(pickle.loads(pickle.dumps(first)))) == {field.name for field in dataclasses.fields(first)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.vocab_size = 3
    with pytest.raises(TypeError):
        first.extra["a"] = 3


def test_reading_leaves_the_given_mapping_alone():
    d = puzzle()
    before = copy.deepcopy(d)
    read(d)
    assert d == before


def test_jax_is_not_imported(tmp_path):
    # The package's own __init__ offers the model and so imports jax; these modules must not be what does it.
    code = f"""
import sys, types
package = sys.modules["nemotron_jax"] = types.ModuleType("nemotron_jax")
package.__path__ = [{str(Path(__file__).parent.parent / "nemotron_jax")!r}]
import nemotron_jax.config, nemotron_jax.shapes
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# ------------------------------------------------------------------------------------------------ released and stored


@pytest.mark.parametrize("folder", TINY, ids=lambda folder: folder.name)
def test_the_hub_s_spelling_and_what_transformers_saves_are_the_same_model(folder):
    hub = NemotronHConfig.from_json(folder / "config_hub.json")
    saved = NemotronHConfig.from_json(folder / "hf")
    for field in dataclasses.fields(NemotronHConfig):
        if field.name != "extra":
            assert getattr(hub, field.name) == getattr(saved, field.name), field.name
    assert through_json(hub) == hub and through_json(saved) == saved


def test_there_are_stored_files_to_read():
    assert len(TINY) == 12


LAYERS = {
    "nemotron-h-4b": (52, 3072, 7168, 4),
    "nemotron-h-8b": (52, 4096, 8192, 4),
    "nemotron-h-47b": (98, 8192, 16384, 5),
    "nemotron-h-56b": (118, 8192, 16384, 10),
    "nemotron-nano-9b-v2": (56, 4480, 10240, 4),
    "nemotron-nano-12b-v2": (62, 5120, 10240, 6),
    "nemotron-3-nano-4b": (42, 3136, 7680, 4),
    "nemotron-3-nano-30b-a3b": (52, 2688, 4096, 6),
    "nemotron-3.5-lightning-30b-a3b": (52, 2688, 4096, 6),
    "nemotron-3-super-120b-a12b": (88, 4096, 8192, 8),
    "nemotron-3-ultra-550b-a55b": (108, 8192, 16384, 12),
    "nemotron-labs-3-puzzle-75b-a9b": (88, 4096, 8192, 8),
}


def test_every_released_model_has_a_preset():
    assert set(PRESETS) == set(LAYERS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config, preset = NemotronHConfig.preset(name), PRESETS[name]
    pattern = config.hybrid_override_pattern
    assert (len(pattern), config.hidden_size, config.inner_size, pattern.count("*")) == LAYERS[name]
    assert (config.vocab_size, config.head_dim, config.n_groups, config.dtype) == (131072, 128, 8, "bfloat16")
    assert config.time_step_limit == (0.0, math.inf) and config.layer_norm_epsilon == 1e-5
    assert not (config.tie_word_embeddings or config.use_bias or config.mlp_bias or config.residual_in_fp32)
    mtp = name in ("nemotron-3.5-lightning-30b-a3b", "nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b",
                   "nemotron-labs-3-puzzle-75b-a9b")  # fmt: skip
    assert (config.num_nextn_predict_layers, config.mtp_hybrid_override_pattern) == ((1, "*E") if mtp else (0, ""))
    assert preset.name == name and preset.source and all(hub_id.startswith("nvidia/") for hub_id in preset.hub_ids)
    assert through_json(config) == config
    assert all(NemotronHConfig.preset(hub_id.upper()) == config for hub_id in preset.hub_ids)


def test_what_presets_know_and_what_is_put_together():
    assert {name for name, preset in PRESETS.items() if preset.read} == {
        "nemotron-h-56b", "nemotron-3-nano-30b-a3b", "nemotron-3.5-lightning-30b-a3b", "nemotron-3-super-120b-a12b",
        "nemotron-3-ultra-550b-a55b",
    }  # fmt: skip


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="found 'nemotron-4'; accepted: .*nemotron-h-8b"):
        NemotronHConfig.preset("nemotron-4")


def test_layers_of_puzzle_differ():
    config = NemotronHConfig.preset("nemotron-labs-3-puzzle-75b-a9b")
    experts = [i for i, kind in enumerate(config.hybrid_override_pattern) if kind == "E"]
    assert len(experts) == 40
    assert {config.layer(i).moe_intermediate_size for i in experts} == {1280, 1536, 1792, 2048, 2688}
    assert {config.layer(i).num_experts_per_tok for i in experts} == {4, 8, 10, 12, 14, 16, 18}
    assert config.layer(87).moe_intermediate_size == 2048 and config.layer(1).num_experts_per_tok == 4
    assert config.mtp_layer(1).num_experts_per_tok == 22 and config.mtp_layer(1).moe_intermediate_size == 2688
