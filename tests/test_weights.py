"""Import from Hugging Face layout: one-to-one accounting, damaged files, exact bytes, memory on the devices."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, make_mesh
from nemotron_jax.parameters import assemble, planned_bytes
from nemotron_jax.weights import loading
from nemotron_jax.weights.held import Held, verify
from nemotron_jax.weights.huggingface import Checkpoint
from nemotron_jax.weights.source import canonical_name
from tests.weights_cases import CASES, TRAINED, edit_json, folder_of, read_raw, write_file, write_folder

NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@pytest.fixture
def no_device_memory(monkeypatch):
    """Fails a test that puts anything on a device."""

    def refuse(*args, **kwargs):
        raise AssertionError("device memory was used")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", refuse)


def values(raw, name) -> np.ndarray:
    dtype, shape, data = raw[name]
    return np.frombuffer(data, NUMPY[dtype]).reshape(shape)


# ------------------------------------------------------------------------------------------------ accounting
@pytest.mark.parametrize("case", ["dense_g2_kv2", "dense_bias", "moe_latent_mtp"])
def test_each_missing_tensor_is_named(case, tmp_path, no_device_memory, count_case):
    source = folder_of(case)
    raw = read_raw(source)
    names = [name for name in raw if not name.startswith("mtp.")]
    if case == "moe_latent_mtp":  # experts are many of a kind
        names = [name for name in names if ".experts." not in name or ".experts.3." in name]
    for name in names:
        folder = write_folder(tmp_path / "one", {n: t for n, t in raw.items() if n != name}, source)
        with pytest.raises(ValueError, match="missing " + canonical_name(name).replace(".", r"\.") + r" \("):
            nemotron_jax.load(folder)
        count_case()


def test_every_unknown_misshapen_or_integer_tensor_is_named_at_once(tmp_path, no_device_memory):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    raw["backbone.layers.0.mixer.extra.weight"] = ("F32", (2,), bytes(8))
    raw["backbone.layers.99.norm.weight"] = ("F32", (2,), bytes(8))
    for name in ("backbone.layers.0.mixer.in_proj.weight", "backbone.layers.1.mixer.up_proj.weight"):
        dtype, (rows, columns), data = raw[name]
        raw[name] = (dtype, (columns, rows), data)
    dtype, shape, data = raw["backbone.norm_f.weight"]
    raw["backbone.norm_f.weight"] = ("I32", shape, data)
    with pytest.raises(ValueError) as error:
        nemotron_jax.load(write_folder(tmp_path, raw, source))
    for part in (
        "unknown backbone.layers.0.mixer.extra.weight",
        "unknown backbone.layers.99.norm.weight",
        "backbone.layers.0.mixer.in_proj.weight has shape",
        "mamba_num_heads*mamba_head_dim",
        "backbone.layers.1.mixer.up_proj.weight has shape",
        "backbone.norm_f.weight has dtype I32, accepted F64, F32, F16, BF16",
    ):
        assert part in str(error.value)


def test_tied_head(tmp_path, no_device_memory, caplog):
    source = folder_of("dense_tied")
    raw = read_raw(source)
    head = dict(raw)
    head["lm_head.weight"] = raw["backbone.embeddings.weight"]
    write_folder(tmp_path / "same", head, source)
    dtype, shape, data = raw["backbone.embeddings.weight"]
    head["lm_head.weight"] = (dtype, shape, bytes(len(data)))
    write_folder(tmp_path / "other", head, source)
    untied = write_folder(tmp_path / "untied", raw, source)
    edit_json(untied / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lm_head.weight and the embedding differ"):
        nemotron_jax.load(tmp_path / "other")
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        nemotron_jax.load(untied)
    config = NemotronHConfig.from_json(tmp_path / "same")
    loading.check_tensors(NemotronH(config), Checkpoint(tmp_path / "same"))
    assert "lm_head.weight" in caplog.text


def test_mtp_is_skipped_in_one_line(caplog):
    nemotron_jax.load(folder_of("moe_latent_mtp"))
    lines = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(lines) == 1 and "mtp.layers.0" in lines[0]


def test_other_prefixes(tmp_path):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    expected = nemotron_jax.load(source).weights
    for prefix in ("model.", "language_model.backbone."):
        renamed = {name.replace("backbone.", prefix).replace("embeddings", "embedding"): t for name, t in raw.items()}
        folder = write_folder(tmp_path / prefix, renamed, source)
        for a, b in zip(expected, nemotron_jax.load(folder).weights, strict=True):
            np.testing.assert_array_equal(a, b)
    both = raw | {"model.norm_f.weight": raw["backbone.norm_f.weight"]}
    with pytest.raises(ValueError, match="are the same parameter norm_f.weight"):
        nemotron_jax.load(write_folder(tmp_path / "both", both, source))


def test_towers_around_a_language_model_are_skipped(tmp_path, caplog):
    source = folder_of("dense_g2_kv2")
    raw = {f"language_model.{name}": t for name, t in read_raw(source).items()}
    raw["vision_model.patch.weight"] = ("F32", (2,), bytes(8))
    folder = write_folder(tmp_path, raw, source)
    with pytest.raises(ValueError, match="unknown vision_model.patch.weight"):
        nemotron_jax.load(folder)
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "NemotronH_Nano_VL_V2", "llm_config": plain}))
    nemotron_jax.load(folder, verify=True)
    assert "vision_model.patch.weight" in caplog.text


# ------------------------------------------------------------------------------------------------ damage
@pytest.mark.parametrize("keep", [0, 7, 8, 100, "header", "most", "all but one"])
def test_a_truncated_file_is_named(keep, tmp_path, no_device_memory):
    source = folder_of("dense_g8_kv4")
    shutil.copytree(source, tmp_path / "m")
    file = tmp_path / "m" / "model-00003-of-00015.safetensors"
    file.chmod(0o644)
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    size = {"header": header, "most": header + 3 * (len(data) - header) // 4, "all but one": len(data) - 1}.get(
        keep, keep
    )
    file.write_bytes(data[:size])
    with pytest.raises(ValueError, match="model-00003-of-00015.safetensors cannot be read"):
        nemotron_jax.load(tmp_path / "m")


def test_a_file_cut_short_while_it_is_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, read_raw(folder_of("dense_g2_kv2")), folder_of("dense_g2_kv2"))
    opened = loading.open_source

    def open_then_cut(*args):
        source = opened(*args)
        with open(folder / "model.safetensors", "r+b") as f:
            f.truncate(20000)
        return source

    monkeypatch.setattr(loading, "open_source", open_then_cut)
    with pytest.raises(ValueError, match="model.safetensors ends at byte .*, inside tensor backbone.*cut short"):
        nemotron_jax.load(folder)


def test_any_flipped_byte_of_a_header_is_noticed_or_harmless(tmp_path, count_case):
    """A flip in a name, shape, dtype or offset is refused; one in free text (``__metadata__``) changes no tensor."""
    source = folder_of("dense_tied")
    folder = write_folder(tmp_path, read_raw(source), source)
    config = NemotronHConfig.from_json(folder)
    model, intact = NemotronH(config), Checkpoint(folder).tensors
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    flips = random.Random(0)
    refused = 0
    with open(file, "r+b") as f:
        for position in range(header):
            f.seek(position)
            f.write(bytes([data[position] ^ (1 << flips.randrange(8))]))
            f.flush()
            try:
                found = Checkpoint(folder)
                loading.check_tensors(model, found)
                assert found.tensors == intact, position
                assert b"__metadata__" in data[max(0, position - 40) : position + 40]
            except ValueError:
                refused += 1
            f.seek(position)
            f.write(data[position : position + 1])
    assert refused > header - 30
    count_case(header)


def test_a_wrong_index(tmp_path, no_device_memory):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    folder = write_folder(tmp_path, raw, source, files=3)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    names = list(good["weight_map"])

    def refused(match, kind=ValueError, **changes):
        index.write_text(json.dumps({"weight_map": {k: v for k, v in (good["weight_map"] | changes).items() if v}}))
        with pytest.raises(kind, match=match):
            nemotron_jax.load(folder)

    refused("found it in model-00001", **{names[0]: "model-00002-of-00003.safetensors"})
    refused(
        "lists tensor gone.weight in model-00001-of-00003.safetensors",
        **{"gone.weight": "model-00001-of-00003.safetensors"},
    )
    refused(f"tensor {names[0]} of .* is not in", **{names[0]: None})
    refused("files that are missing: model-9.safetensors", FileNotFoundError, **{names[0]: "model-9.safetensors"})
    for text in ("{", "[]", '{"weight_map": 3}', '{"metadata": {}}', '{"weight_map": {"a": 3}}', "\xff"):
        index.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="is no safetensors index"):
            nemotron_jax.load(folder)
    index.unlink()
    with pytest.raises(ValueError, match="holds 3 safetensors files and no model.safetensors.index.json"):
        nemotron_jax.load(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no \*.safetensors file"):
        nemotron_jax.load(folder)


def test_one_tensor_in_two_files_and_twice_in_one(tmp_path, no_device_memory):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    folder = write_folder(tmp_path, raw, source, files=2)
    first, second = sorted(folder.glob("*.safetensors"))
    name = "backbone.norm_f.weight"
    for file in (first, second):
        write_file(file, {n: t for n, t in raw.items() if n in json.dumps(read_one(file))} | {name: raw[name]})
    with pytest.raises(ValueError, match=f"tensor {name} stands in both"):
        nemotron_jax.load(folder)
    single = write_folder(tmp_path / "single", raw, source) / "model.safetensors"
    data = single.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].replace(b"layers.2.norm", b"layers.0.norm")
    single.write_bytes(data[:8] + text + data[8 + size :])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        nemotron_jax.load(single.parent)


def read_one(file):
    data = file.read_bytes()
    return sorted(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def test_an_unreadable_file(tmp_path, no_device_memory):
    source = folder_of("dense_g2_kv2")
    folder = write_folder(tmp_path, read_raw(source), source)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()  # permissions do not bind every user; no one can read this as a file
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        nemotron_jax.load(folder)


# ------------------------------------------------------------------------------------------------ bytes
@pytest.mark.parametrize("case", [*CASES, *TRAINED])
@pytest.mark.parametrize("tensor", [1, 4])
def test_what_is_loaded_is_the_file(case, tensor, count_case):
    """Against the raw bytes of the file, with no code of ours but ``Held``; and ``verify`` agrees."""
    folder = folder_of(case)
    raw = {canonical_name(name): name for name in read_raw(folder)}
    raw_tensors = read_raw(folder)
    model = nemotron_jax.load(folder, mesh=make_mesh(tensor, 2), verify=True)
    held = Held(model)
    assert set(held.tensors) == {name for name in raw if not name.startswith("mtp.")}
    for name, info in held.tensors.items():
        dtype, shape, data = raw_tensors[raw[name]]
        assert (info.name, info.dtype, info.shape) == (raw[name], dtype, shape)
        assert held.rows(name).tobytes() == data, name
    count_case()


def test_no_parameter_keeps_an_initial_value():
    """Models that had different random values before are byte-equal to the file afterwards."""
    folder = folder_of("dense_tied")
    source, config = Checkpoint(folder), NemotronHConfig.from_json(folder)
    filled = []
    for seed in (1, 2):
        model = NemotronH(config, rngs=seed)
        with pytest.raises(ValueError, match="differs from the file"):
            verify(model, source)
        before = model.weights
        model.fill(source)
        verify(model, source)
        assert not any(np.array_equal(a, b) for a, b in zip(before, model.weights, strict=True))
        filled.append(model.weights)
    for a, b in zip(*filled, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("rules", [ShardingRules(), ShardingRules.from_dict({"experts": "tensor", "vocab": "none"})])
def test_experts_cut_either_way(rules):
    nemotron_jax.load(folder_of("moe_latent_super"), mesh=make_mesh(4), rules=rules, verify=True)


@pytest.mark.parametrize(
    "path", [("layers", 0, "mixer", "dt_bias"), ("embeddings", "table"), ("layers", 0, "mixer", "out")]
)
def test_verify_names_what_differs(path):
    folder = folder_of("dense_g8_kv4")
    model = nemotron_jax.load(folder, mesh=make_mesh(4))
    array = model.parameter(*path)
    changed = np.asarray(array).copy()
    changed.reshape(-1).view(np.uint8)[-1] ^= 1
    model.replace_weights({path: jnp.asarray(changed)})
    (layout,) = (p.layout for p in model.parameters if p.path == path)
    with pytest.raises(ValueError, match=layout.sections[0].tensor.replace(".", r"\.")) as error:
        verify(model, Checkpoint(folder))
    assert "CPU_3" in str(error.value) or "TFRT_CPU_3" in str(error.value) or "cpu:3" in str(error.value).lower()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes_are_one_cast(dtype):
    folder = folder_of("dense_g2_kv2")
    raw = read_raw(folder)
    model = nemotron_jax.load(folder, mesh=make_mesh(2), dtype=dtype)
    table = np.asarray(model.parameter("lm_head", "table"))
    assert table.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(table, values(raw, "lm_head.weight").astype(dtype))
    assert model.parameter("layers", 0, "norm").dtype == jnp.float32


# ------------------------------------------------------------------------------------------------ memory and speed
@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (2, 2), (4, 2)])
def test_devices_hold_their_shards_and_nothing_else(shape):
    others = jax.live_arrays()  # held, so that no identity is used again
    before = {id(a) for a in others}
    model = nemotron_jax.load(folder_of("dense_g8_kv4"), mesh=make_mesh(*shape))
    per_device = dict.fromkeys(model.mesh.devices.flat, 0)
    for array in jax.live_arrays():
        if id(array) not in before:
            for shard in array.addressable_shards:
                per_device[shard.device] += shard.data.nbytes
    assert set(per_device.values()) == {model.bytes_per_device()}
    assert planned_bytes(model.parameters, model.mesh) <= shape[0] * model.bytes_per_device()


def test_nothing_is_compiled_while_loading():
    """No program at all, so no collective either."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    try:
        nemotron_jax.load(folder_of("moe_latent_super"), mesh=make_mesh(4, 2))
        assert not compiled
        jax.jit(lambda x: x + 41)(1.0)  # the listener does hear
        assert compiled
    finally:
        jax.monitoring.clear_event_listeners()


def test_reading_ahead_is_bounded(monkeypatch):
    """The shares being read never exceed READ_AHEAD by more than the largest parameter's."""
    from nemotron_jax import parameters

    folder = folder_of("tiny-nemotron-h")
    config = NemotronHConfig.from_json(folder)
    model = NemotronH(config, mesh=make_mesh(4))
    held, peak = 0, 0
    allocate, finish = parameters.aligned, parameters._finish

    def allocating(shape, dtype):
        nonlocal held, peak
        share = allocate(shape, dtype)
        held, peak = held + share.nbytes, max(peak, held + share.nbytes)
        return share

    def finishing(filling, *args):
        nonlocal held
        held -= filling.bytes
        return finish(filling, *args)

    monkeypatch.setattr(parameters, "aligned", allocating)
    monkeypatch.setattr(parameters, "_finish", finishing)
    monkeypatch.setattr(parameters, "READ_AHEAD", 100_000)
    assemble(model.parameters, model.mesh, Checkpoint(folder))
    largest = max(p.bytes_per_device for p in model.parameters) * 4
    total = model.bytes_per_device() * 4
    assert held == 0 and peak <= 100_000 + largest < total


def test_progress_counts_every_byte_once():
    folder = folder_of("moe_nano")
    model = NemotronH(NemotronHConfig.from_json(folder), mesh=make_mesh(2, 2))
    counted = []
    model.fill(Checkpoint(folder), counted.append)
    assert sum(counted) == planned_bytes(model.parameters, model.mesh) > 0
