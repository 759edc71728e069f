"""FP8 and NVFP4 checkpoints: an encoder of its own, exact values at every cut, refusals by name."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import make_mesh
from nemotron_jax.weights import convert
from nemotron_jax.weights.held import Held
from nemotron_jax.weights.source import canonical_name
from tests.weights_cases import Raw, bfloat16, edit_json, folder_of, read_raw, write_folder

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e4m3(code: int) -> float:
    """The value of a float8_e4m3fn code, from its bits: sign, four of exponent (bias 7), three of fraction."""
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * ((8 + fraction) / 8 * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6)


FLOAT8 = np.array([e4m3(code) for code in range(256)], np.float32)
FLOAT4 = np.array([*E2M1, *(-float(x) for x in E2M1)], np.float32)  # -0 is -0


def fp8(shape, rng) -> tuple[Raw, bytes]:
    """Tensors of a weight by their suffix, and the bytes of the bfloat16 weight that they mean."""
    codes = rng.permutation(np.arange(np.prod(shape)) % 254).reshape(shape)  # every code but the NaNs
    codes = np.where(codes >= 127, codes + 1, codes).astype(np.uint8)
    scale = np.float32(rng.uniform(1e-3, 1e-2))
    tensors = {
        "weight": ("F8_E4M3", shape, codes.tobytes()),
        "weight_scale": ("F32", (), scale.tobytes()),
        "input_scale": ("F32", (), np.float32(0.1).tobytes()),
    }
    return tensors, bfloat16(FLOAT8[codes] * scale).tobytes()


def nvfp4(shape, rng, activations: bool = True) -> tuple[Raw, bytes]:
    rows, columns = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    groups = rng.integers(1, 127, (rows, columns // 16), dtype=np.uint8)
    second = np.float32(rng.uniform(1e-4, 1e-3))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    tensors = {
        "weight": ("U8", (rows, columns // 2), packed.tobytes()),
        "weight_scale": ("F8_E4M3", groups.shape, groups.tobytes()),
        "weight_scale_2": ("F32", (), second.tobytes()),
    }
    if activations:
        tensors["input_scale"] = ("F32", (), np.float32(0.1).tobytes())
    values = FLOAT4[codes] * np.repeat(FLOAT8[groups], 16, axis=1) * second
    return tensors, bfloat16(values).tobytes()


def quantize(folder: Path, case: str, encode, declare) -> tuple[Path, Raw]:
    """A quantised folder of a case's shapes, and the plain tensors that it means. ``encode(module)`` may give None."""
    source, rng = folder_of(case), np.random.default_rng(3)
    raw, plain = {}, {}
    for name, (dtype, shape, data) in read_raw(source).items():
        module = name.removesuffix(".weight")
        encoder = encode(module) if name.endswith("weight") and len(shape) == 2 else None
        if encoder is None or (encoder is not fp8 and shape[1] % 16):  # tiny widths that NVFP4 cannot hold stay plain
            raw[name] = plain[name] = (dtype, shape, data)
            continue
        tensors, meant = encoder(shape, rng)
        raw |= {f"{module}.{suffix}": t for suffix, t in tensors.items()}
        plain[name] = ("BF16", shape, meant)
        if module.endswith(("k_proj", "v_proj")):
            raw[f"{module}.{module[-6]}_scale"] = ("F32", (), np.float32(1).tobytes())
    write_folder(folder, raw, source)
    declare(folder, [n.removesuffix(".weight") for n, t in plain.items() if t[0] == "BF16"])
    return folder, plain


def declared(**quantization):
    """Says so in hf_quant_config.json."""

    def write(folder, modules):
        d = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8", **quantization}}
        (folder / "hf_quant_config.json").write_text(json.dumps(d))

    return write


def mixed(folder, modules):
    layers = {
        m: {"quant_algo": "FP8"}
        if "_proj" in m and "mixer.in" in m
        else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for m in modules
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_json(folder / "config.json", quantization_config=quantization)


def only_linear(module: str) -> bool:
    return module.endswith("_proj") and ".mixer." in module


def encode_fp8(module):
    return fp8 if only_linear(module) else None


def encode_nvfp4(module):
    return nvfp4 if only_linear(module) else None


def encode_mixed(module):
    """As Lightning: FP8 in_proj, NVFP4 without activations for the rest and the head."""
    if module.endswith("mixer.in_proj"):
        return fp8
    return (lambda shape, rng: nvfp4(shape, rng, False)) if only_linear(module) or module == "lm_head" else None


KINDS = {
    "fp8": (encode_fp8, declared(quant_algo="FP8", exclude_modules=["lm_head", "backbone.embeddings"])),
    "nvfp4": (
        encode_nvfp4,
        declared(quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head", "backbone.embed*"]),
    ),
    "mixed": (encode_mixed, mixed),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["dense_g8_kv4", "moe_latent_super"])
def test_values_are_exact_at_every_cut(case, kind, tmp_path, count_case):
    folder, plain = quantize(tmp_path, case, *KINDS[kind])
    assert sum(t[0] == "BF16" for t in plain.values()) > 10
    for tensor in (1, 2, 4, 8) if case == "dense_g8_kv4" else (1, 4):
        model = nemotron_jax.load(folder, mesh=make_mesh(tensor), dtype="float32", verify=True)
        held = Held(model)
        for name, (dtype, shape, data) in plain.items():
            if name.startswith("mtp."):
                continue
            info = held.tensors[canonical_name(name)]
            assert (info.dtype, info.shape) == (dtype, shape), name
            assert held.rows(canonical_name(name)).tobytes() == data, name
        count_case()


def test_a_cut_inside_a_group_of_sixteen(tmp_path):
    """At tensor size 8 the down projection of this case has widths that are no multiple of 16."""
    folder, plain = quantize(tmp_path, "dense_g8_kv4", *KINDS["nvfp4"])
    widths = {
        shape[1] // 8 for name, (_, shape, _) in plain.items() if name.endswith(("down_proj.weight", "out_proj.weight"))
    }
    assert any(width % 16 for width in widths)


def test_convert_writes_plain_bfloat16(tmp_path):
    folder, plain = quantize(tmp_path / "quantised", "moe_nano", *KINDS["mixed"])
    declared(quant_algo="MIXED_PRECISION")(folder, [])
    convert(folder, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "plain")
    assert read_raw(tmp_path / "plain") == plain
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    nemotron_jax.load(tmp_path / "plain", verify=True)


# ------------------------------------------------------------------------------------------------ refusals
@pytest.fixture
def no_device_memory(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("device memory was used")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", refuse)


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (
            {"quant_algo": "W4A8_AWQ"},
            "hf_quant_config.json: found quant_algo 'W4A8_AWQ', accepted FP8, NVFP4, W4A16_NVFP4",
        ),
        ({"quant_algo": "FP8_PB_WO"}, "found quant_algo 'FP8_PB_WO'"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "INT4"}}},
            "'INT4' of lm_head",
        ),
        ({"quant_algo": "NVFP4", "group_size": 32}, r"group_size \['32'\], accepted 16"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4'"),
    ],
)
def test_unknown_schemes_are_named(quantization, match, tmp_path, no_device_memory):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", encode_fp8, declared(**quantization))
    with pytest.raises(ValueError, match=match):
        nemotron_jax.load(folder)


@pytest.mark.parametrize("method", ["gptq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_other_methods_are_named(method, tmp_path, no_device_memory):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", encode_fp8, lambda *_: None)
    with pytest.raises(ValueError, match="but neither its config.json nor hf_quant_config.json names the scheme"):
        nemotron_jax.load(folder)
    edit_json(folder / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"found quant_method '{method}', accepted 'modelopt'"):
        nemotron_jax.load(folder)


def test_two_files_that_disagree(tmp_path, no_device_memory):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", *KINDS["fp8"])
    edit_json(folder / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(ValueError, match="says FP8, .* says NVFP4"):
        nemotron_jax.load(folder)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_a_weight_without_its_scales_is_never_used(kind, tmp_path, no_device_memory):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", *KINDS[kind])
    raw = read_raw(folder)
    module = "backbone.layers.0.mixer.out_proj"
    scales = ["weight_scale"] + ["weight_scale_2"] * (kind == "nvfp4")
    for scale in scales:
        write_folder(folder, {n: t for n, t in raw.items() if n != f"{module}.{scale}"}, folder_of("dense_g2_kv2"))
        with pytest.raises(ValueError, match=f"missing {module}.{scale}:"):
            nemotron_jax.load(folder)
        dtype, shape, data = raw[f"{module}.{scale}"]
        bad = ("F32", (3,), bytes(12)) if shape == () else (dtype, shape[::-1], data)
        write_folder(folder, raw | {f"{module}.{scale}": bad}, folder_of("dense_g2_kv2"))
        with pytest.raises(ValueError, match=rf"{module}.{scale} is .* accepted"):
            nemotron_jax.load(folder)
    plain = {n: t for n, t in raw.items() if not n.startswith(module)}
    plain[f"{module}.weight"] = read_raw(folder_of("dense_g2_kv2"))[f"{module}.weight"]
    write_folder(folder, plain | {f"{module}.weight_scale": raw[f"{module}.weight_scale"]}, folder_of("dense_g2_kv2"))
    with pytest.raises(ValueError, match=f"{module}.weight_scale has no quantised weight"):
        nemotron_jax.load(folder)


def test_a_module_stored_otherwise_than_declared(tmp_path, no_device_memory):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", encode_fp8, declared(quant_algo="NVFP4"))
    with pytest.raises(ValueError, match="is stored as FP8, .*hf_quant_config.json says NVFP4"):
        nemotron_jax.load(folder)
    declared(quant_algo="FP8", exclude_modules=["backbone.layers.0.*"])(folder, [])
    with pytest.raises(
        ValueError, match=r"backbone.layers.0.mixer.in_proj.weight is stored as FP8, .* says not quantised"
    ):
        nemotron_jax.load(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_scale_that_is_no_scale(value, tmp_path):
    folder, _ = quantize(tmp_path, "dense_g2_kv2", *KINDS["fp8"])
    raw = read_raw(folder)
    name = "backbone.layers.0.mixer.out_proj.weight_scale"
    write_folder(folder, raw | {name: ("F32", (), np.float32(value).tobytes())}, folder_of("dense_g2_kv2"))
    with pytest.raises(ValueError, match=f"{name} is {value}, accepted"):
        nemotron_jax.load(folder)


def test_a_scheme_that_quantises_the_cache_alone(tmp_path):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    folder = write_folder(tmp_path, raw, source)
    declared(quant_algo=None)(folder, [])
    nemotron_jax.load(folder, verify=True)
