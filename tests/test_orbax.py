"""Conversion, save and restore: nothing lost either way, any mesh, strict, and never half a checkpoint."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nemotron_jax
from nemotron_jax import NemotronH, NemotronHConfig, cli, make_mesh
from nemotron_jax.weights import atomic, convert, orbax
from nemotron_jax.weights.held import verify
from nemotron_jax.weights.huggingface import Checkpoint
from tests.weights_cases import CASES, TRAINED, edit_json, folder_of, read_raw, write_folder

ROOT = Path(__file__).parent.parent
MESHES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)]


@pytest.fixture
def converted(tmp_path) -> Path:
    convert(folder_of("dense_g8_kv4"), tmp_path / "converted")
    return tmp_path / "converted"


def same(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


# ------------------------------------------------------------------------------------------------ nothing lost
@pytest.mark.parametrize("case", [*CASES, *TRAINED])
def test_there_and_back(case, tmp_path, count_case):
    source = folder_of(case)
    there = convert(source, tmp_path / "there")
    back = convert(tmp_path / "there", tmp_path / "back")
    raw = read_raw(source)
    assert read_raw(tmp_path / "back") == raw
    assert (
        (there.tensors, there.bytes) == (back.tensors, back.bytes) == (len(raw), sum(len(t[2]) for t in raw.values()))
    )
    for file in source.iterdir():
        if (
            file.suffix == ".safetensors"
            or file.suffix in (".json", ".jinja")
            and not file.name.endswith(".index.json")
        ):
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    if (source / "model.safetensors.index.json").exists():
        maps = [
            json.loads((f / "model.safetensors.index.json").read_text())["weight_map"]
            for f in (source, tmp_path / "back")
        ]
        assert maps[0] == maps[1]
    count_case()


def test_mtp_is_carried(tmp_path):
    convert(folder_of("moe_latent_mtp"), tmp_path / "there")
    names = [
        name
        for name in json.loads((tmp_path / "there" / "nemotron_jax.json").read_text())["arrays"]
        if name.startswith("mtp.")
    ]
    assert any("experts.up_proj" in name for name in names) and "mtp.layers.0.eh_proj.weight" in names
    nemotron_jax.load(tmp_path / "there", mtp=True, verify=True)


@pytest.mark.parametrize("case", ["dense_bias", "moe_latent_super", "bf16_dense"])
def test_a_loaded_model_exports_its_files(case, tmp_path):
    """From a mesh on which groups and KV heads repeat and the bias of a row-parallel product stands once."""
    source = folder_of(case)
    model = nemotron_jax.load(source, mesh=make_mesh(4, 2))
    nemotron_jax.export(model, tmp_path / "out")
    assert read_raw(tmp_path / "out") == read_raw(source)
    nemotron_jax.load(tmp_path / "out", verify=True)


def test_a_model_in_another_dtype_exports_that(tmp_path):
    source = folder_of("dense_g2_kv2")
    nemotron_jax.export(nemotron_jax.load(source, dtype="bfloat16"), tmp_path / "out")
    raw = read_raw(tmp_path / "out")
    assert raw["lm_head.weight"][0] == "BF16"  # narrower than the file: that is what there is
    assert raw["backbone.norm_f.weight"] == read_raw(source)["backbone.norm_f.weight"]


def test_changed_weights_are_not_rounded_to_the_file_dtype(tmp_path):
    model = nemotron_jax.load(folder_of("bf16_dense"))
    norm = np.asarray(model.parameter("norm_f")) + np.float32(2**-20)
    model.replace_weights({("norm_f",): jnp.asarray(norm)})
    nemotron_jax.save(model, tmp_path / "saved")
    assert same(nemotron_jax.load(tmp_path / "saved").parameter("norm_f"), norm)


def test_random_weights_save(tmp_path):
    model = NemotronH(NemotronHConfig.from_json(folder_of("dense_tied")), rngs=0)
    nemotron_jax.save(model, tmp_path / "saved")
    restored = nemotron_jax.load(tmp_path / "saved", mesh=make_mesh(2))
    nemotron_jax.export(restored, tmp_path / "out")
    again = nemotron_jax.load(tmp_path / "out")
    assert all(same(a, b) for a, b in zip(model.weights, again.weights, strict=True))
    with pytest.raises(ValueError, match="abstract"):
        nemotron_jax.save(NemotronH(model.config), tmp_path / "none")


# ------------------------------------------------------------------------------------------------ any mesh
@pytest.mark.parametrize("case", ["dense_g8_kv4", "dense_bias", "moe_latent_super"])
def test_saved_at_four_restored_anywhere(case, tmp_path, count_case):
    """Weights byte-equal to an import on the same mesh, so logits are; once they are computed."""
    source = folder_of(case)
    nemotron_jax.save(nemotron_jax.load(source, mesh=make_mesh(4)), tmp_path / "saved")
    for tensor, data in MESHES:
        if case != "dense_g8_kv4" and tensor == 8:
            continue  # these have 4 query heads
        mesh = make_mesh(tensor, data)
        imported, restored = nemotron_jax.load(source, mesh=mesh), nemotron_jax.load(tmp_path / "saved", mesh=mesh)
        for p, a, b in zip(imported.parameters, imported.weights, restored.weights, strict=True):
            assert a.sharding == b.sharding and same(a, b), p.path
        count_case()
    if case == "dense_g8_kv4":
        ids = np.arange(6).reshape(1, 6)
        assert same(imported(np.repeat(ids, 2, 0)).logits, restored(np.repeat(ids, 2, 0)).logits)


def test_the_folder_does_not_depend_on_the_mesh(tmp_path):
    trees = []
    for name, mesh in (("a", make_mesh(1)), ("b", make_mesh(8)), ("c", make_mesh(2, 4))):
        nemotron_jax.save(nemotron_jax.load(folder_of("dense_g8_kv4"), mesh=mesh), tmp_path / name)
        trees.append(ocp.PyTreeCheckpointer().restore(tmp_path / name / "arrays"))
    for tree in trees[1:]:
        assert jax.tree.structure(tree) == jax.tree.structure(trees[0])
        assert all(map(same, jax.tree.leaves(tree), jax.tree.leaves(trees[0])))


def test_sections_are_plain_arrays_that_orbax_restores_by_itself(converted):
    """One array per section, each onto a mesh by an ordinary NamedSharding, repeated groups once."""
    config = NemotronHConfig.from_json(converted)
    inner, groups, heads = config.inner_size, config.n_groups * config.ssm_state_size, config.mamba_num_heads
    dtype, shape, data = read_raw(folder_of("dense_g8_kv4"))["backbone.layers.0.mixer.in_proj.weight"]
    whole = np.frombuffer(data, np.float32).reshape(shape)
    mesh = Mesh(np.array(jax.devices()), ("t",))
    sizes = {"z": inner, "x": inner, "B": groups, "C": groups, "dt": heads}
    path = converted / "arrays"
    tree = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(
            m.shape, m.dtype, sharding=NamedSharding(mesh, P("t") if m.shape[0] % 8 == 0 else P())
        ),
        ocp.StandardCheckpointer().metadata(path).item_metadata.tree,
        is_leaf=lambda m: hasattr(m, "storage"),
    )
    restored = ocp.StandardCheckpointer().restore(path, tree)["layers"]["0"]["mixer"]
    start = 0
    for name, rows in sizes.items():
        array = restored["in_proj"]["weight"][name]
        assert array.sharding.spec == P("t") and array.shape == (rows, config.hidden_size)
        np.testing.assert_array_equal(array, whole[start : start + rows])
        start += rows
    assert start == shape[0] and set(restored["conv1d"]["weight"]) == {"x", "B", "C"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_restored_in_another_dtype(dtype, converted):
    imported = nemotron_jax.load(folder_of("dense_g8_kv4"), dtype=dtype, mesh=make_mesh(2))
    restored = nemotron_jax.load(converted, dtype=dtype, mesh=make_mesh(2), verify=True)
    assert all(map(same, imported.weights, restored.weights))
    assert restored.parameter("lm_head", "table").dtype == jnp.dtype(dtype)


def test_pieces_do_not_cross_the_cuts_of_eight_ranks():
    for shape, stack in (
        ((8192, 4096), 0),
        ((4096, 8192), 0),
        ((131072, 4096), 0),
        ((512, 5120, 2048), 512),
        ((4096, 15680), 0),
    ):
        stored = orbax.Stored("t", "BF16", shape, stack=stack)
        chunk = orbax.chunk_shape(stored)
        assert np.prod(chunk) * 2 <= orbax.CHUNK
        assert all((n // 8) % c == 0 for n, c in zip(shape[-2:], chunk[-2:], strict=True))
    assert orbax.chunk_shape(orbax.Stored("t", "F32", (10240, 1, 4))) == (10240, 1, 4)


# ------------------------------------------------------------------------------------------------ strict
def arrays_of(folder: Path) -> dict:
    return ocp.PyTreeCheckpointer().restore(folder / "arrays")


def put_arrays(folder: Path, tree: dict) -> None:
    shutil.rmtree(folder / "arrays")
    ocp.PyTreeCheckpointer().save(folder / "arrays", tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mixer: mixer["in_proj"]["weight"].pop("B"), r"missing array layers.0.mixer.in_proj.weight.B"),
        (lambda mixer: mixer.pop("D"), r"missing array layers.0.mixer.D"),
        (lambda mixer: mixer.update(E=np.zeros(3, np.float32)), r"unknown array layers.0.mixer.E"),
        (
            lambda mixer: mixer.update(D=mixer["D"][:-1]),
            r"array layers.0.mixer.D is F32 \(\d+,\), accepted F32 \(\d+,\)",
        ),
        (lambda mixer: mixer.update(D=mixer["D"].astype(np.float16)), r"array layers.0.mixer.D is F16"),
    ],
)
def test_another_tree_is_refused(change, message, converted):
    tree = arrays_of(converted)
    change(tree["layers"]["0"]["mixer"])
    put_arrays(converted, tree)
    with pytest.raises(ValueError, match=message):
        nemotron_jax.load(converted)


def test_another_config_is_refused(converted):
    config = json.loads((converted / "config.json").read_text())
    pattern = NemotronHConfig.from_json(converted).hybrid_override_pattern
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers")
    plain = {key: value for key, value in config.items() if key not in keys}

    def refused(match, **changes):
        (converted / "config.json").write_text(json.dumps(plain | {"hybrid_override_pattern": pattern} | changes))
        with pytest.raises(ValueError, match=match):
            nemotron_jax.load(converted)

    refused("layers of its arrays", hybrid_override_pattern=pattern + "M")
    refused("layers of its arrays", hybrid_override_pattern=pattern[:-1])
    refused("layers of its arrays", hybrid_override_pattern=pattern[1:] + pattern[0])
    refused(r"layers.0.mixer.in_proj.weight", ssm_state_size=config["ssm_state_size"] * 2)
    refused(r"up_proj.weight has shape", intermediate_size=config["intermediate_size"] * 2)


def test_a_damaged_manifest_or_another_version_is_refused(converted):
    file = converted / "nemotron_jax.json"
    good = json.loads(file.read_text())
    for text, match in (
        (
            json.dumps(good | {"version": 2}),
            "found format 'nemotron-jax-orbax' version 2, accepted 'nemotron-jax-orbax' version 1",
        ),
        (json.dumps(good | {"format": "other"}), "found format 'other'"),
        (file.read_text()[:-40], "cannot be read"),
        (json.dumps({k: v for k, v in good.items() if k != "arrays"}), "is damaged"),
        (json.dumps(good | {"tensors": {k: v for k, v in list(good["tensors"].items())[1:]}}), "unknown array"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            nemotron_jax.load(converted)


def test_missing_pieces_are_noticed(converted):
    import tensorstore as ts

    kv = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{converted}/arrays/"}).result()
    kv.delete_range(ts.KvStore.KeyRange("layers.0.mixer.D/0", "layers.0.mixer.D/1")).result()
    with pytest.raises(ValueError, match=r"array layers.0.mixer.D has 0 of its 1 pieces"):
        nemotron_jax.load(converted)
    shutil.rmtree(converted / "arrays" / "d")
    with pytest.raises(ValueError, match="arrays"):
        nemotron_jax.load(converted)
    shutil.rmtree(converted / "arrays")
    with pytest.raises(ValueError, match="arrays"):
        nemotron_jax.load(converted)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "truncated"])
def test_convert_checks_before_it_writes(fault, tmp_path):
    source = folder_of("dense_g2_kv2")
    raw = read_raw(source)
    name = "backbone.layers.0.mixer.in_proj.weight"
    dtype, (rows, columns), data = raw[name]
    if fault == "missing":
        del raw[name]
    elif fault == "unknown":
        raw["backbone.layers.0.mixer.extra"] = raw[name]
    elif fault == "shape":
        raw[name] = (dtype, (columns, rows), data)
    folder = write_folder(tmp_path / "source", raw, source)
    if fault == "truncated":
        os.truncate(folder / "model.safetensors", 20000)
    with pytest.raises(ValueError, match="cannot be read" if fault == "truncated" else "in_proj.weight|extra"):
        convert(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


# ------------------------------------------------------------------------------------------------ whole or not at all
def test_targets_that_may_not_be_replaced(tmp_path, converted):
    source = folder_of("dense_g2_kv2")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    copy = write_folder(tmp_path / "copy", read_raw(source), source)
    for target in ("file", "folder", "copy"):
        with pytest.raises(ValueError, match="accepted: a"):
            convert(source, tmp_path / target)
    with pytest.raises(ValueError, match="is not empty"):
        convert(source, tmp_path / "folder", overwrite=True)
    with pytest.raises(ValueError, match="is the source itself"):
        convert(copy, copy, overwrite=True)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine" and read_raw(copy) == read_raw(source)
    convert(source, converted)  # one of ours
    assert NemotronHConfig.from_json(converted) == NemotronHConfig.from_json(source)
    convert(converted, copy, overwrite=True)
    assert read_raw(copy) == read_raw(source)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_leaves_what_was_there(exchange, converted, monkeypatch):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    before = arrays_of(converted)
    model = nemotron_jax.load(folder_of("dense_g2_kv2"))

    def failing(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orbax._Streamed, "rows", failing)
        with pytest.raises(ValueError, match="converted was not written: .*No space left on device"):
            nemotron_jax.save(model, converted)
    assert all(map(same, jax.tree.leaves(before), jax.tree.leaves(arrays_of(converted))))
    assert [p.name for p in converted.parent.iterdir()] == ["converted"]
    nemotron_jax.save(model, converted)
    verify(nemotron_jax.load(converted), Checkpoint(folder_of("dense_g2_kv2")))
    assert [p.name for p in converted.parent.iterdir()] == ["converted"]


def test_a_stop_between_two_renames_is_put_right(converted, caplog):
    """Where two names cannot be exchanged, there is a moment with none; the next start finds the previous folder."""
    converted.rename(converted.parent / ".converted.previous")
    nemotron_jax.load(converted)
    assert "the previous checkpoint is put back" in caplog.text


def test_two_saves_of_one_path_at_a_time_are_refused(converted):
    with atomic.replacing(converted) as new:
        (new / "half").write_text("half")
        script = f"import nemotron_jax.weights.atomic as a\nwith a.replacing({str(converted)!r}): pass"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
        assert "another process is saving to" in other.stderr and other.returncode == 1
        shutil.copytree(converted, new, dirs_exist_ok=True)
    assert (converted / "half").exists()


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for it: writes fail in the middle."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from nemotron_jax import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "print([cli.main(['convert', *sys.argv[i:i + 2], '--json']) for i in (1, 3)])"
    )
    source = folder_of("tiny-nemotron-h")
    convert(source, tmp_path / "orbax")
    arguments = [source, tmp_path / "a", tmp_path / "orbax", tmp_path / "b"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"[{cli.BAD_INPUT}, {cli.BAD_INPUT}]\n", done.stderr
    for target in ("a", "b"):
        assert f"{tmp_path / target} was not written" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["orbax"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200_000


def killed_saves(tmp_path: Path, moments: int) -> list[str]:
    """Kill a process at random moments of its saves; what is there must load and be one of the two, whole."""
    first = folder_of("dense_tied")
    raw = {n: (d, s, bytes(b ^ 1 for b in data)) for n, (d, s, data) in read_raw(first).items()}
    second = write_folder(tmp_path / "second", raw, first)
    path, found, lines = tmp_path / "saved", [], []
    moment = random.Random(7)
    for _ in range(moments):
        arguments = [sys.executable, "-m", "tests.save_until_killed", str(first), str(second), str(path)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(moment.uniform(0, 1.0))
        finally:
            process.send_signal(signal.SIGKILL)
            lines.append(process.communicate()[1])
        convert(path, tmp_path / "back")
        which = [
            name
            for name, folder in (("first", first), ("second", second))
            if read_raw(folder) == read_raw(tmp_path / "back")
        ]
        assert len(which) == 1
        found += which
        shutil.rmtree(tmp_path / "back")
    return found


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path, count_case, caplog):
    killed_saves(tmp_path, 3)
    assert "was interrupted" in caplog.text
    count_case(3)


@pytest.mark.full
def test_twenty_killed_saves(tmp_path, count_case, caplog):
    found = killed_saves(tmp_path, 20)
    assert set(found) == {"first", "second"}  # the moments fell on either side of a replacement
    assert caplog.text.count("was interrupted") >= 5
    count_case(20)


# ------------------------------------------------------------------------------------------------ the program
def test_convert_command(tmp_path, capsys):
    source = folder_of("moe_latent_mtp")
    assert cli.main(["convert", str(source), str(tmp_path / "there"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    raw = read_raw(source)
    assert (
        result["tensors"] == len(raw)
        and result["bytes"] == sum(len(t[2]) for t in raw.values())
        and result["seconds"] > 0
    )
    assert cli.main(["convert", str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert read_raw(tmp_path / "back") == raw
    assert cli.main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    edit_json(tmp_path / "back" / "config.json", vocab_size=7)
    assert cli.main(["convert", str(tmp_path / "back"), str(tmp_path / "x")]) == 2
    assert "embeddings.weight has shape" in capsys.readouterr().err
