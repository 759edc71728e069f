"""The kept conversion: restored without reading the source, made anew when that changes, never used when damaged."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import cli, make_mesh
from nemotron_jax.weights import conversion_cache, orbax, writing
from nemotron_jax.weights.conversion_cache import STAMP, SWITCH
from nemotron_jax.weights.huggingface import Checkpoint
from tests.conftest import TINY
from tests.test_quantized import KINDS, encode_fp8, quantize
from tests.weights_cases import edit_json, folder_of, read_raw, write_file

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def switched_off(monkeypatch, tmp_path):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def quantised(tmp_path) -> Path:
    return quantize(tmp_path / "quantised", "dense_g2_kv2", *KINDS["fp8"])[0]


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """The entries written since the start of the test."""
    written, write = [], conversion_cache.write

    def counted(path, *args, **kwargs):
        write(path, *args, **kwargs)
        written.append(path)

    monkeypatch.setattr(conversion_cache, "write", counted)
    return written


@contextlib.contextmanager
def no_weights_read(monkeypatch):
    """Reading bytes of a tensor in Hugging Face layout is an error."""

    def refuse(self, tensor, *args):
        raise AssertionError(f"{tensor.name} of the source was read")

    with monkeypatch.context() as m:
        m.setattr(Checkpoint, "_pread", refuse)
        yield


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.iterdir() if not p.name.startswith("."))


def anew(caplog) -> list[str]:
    """The lines that say that a source is converted again."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [line for line in lines if "converted anew" in line]


def same(a, b) -> bool:
    return len(a.weights) == len(b.weights) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(a.weights, b.weights, strict=True)
    )


# ------------------------------------------------------------------------------------------------ restoring
@pytest.mark.parametrize(("case", "kind"), [("dense_g2_kv2", "fp8"), ("moe_latent_super", "mixed")])
def test_the_second_start_reads_no_weights_of_the_source(case, kind, tmp_path, cache, conversions, monkeypatch):
    folder, _ = quantize(tmp_path / "quantised", case, *KINDS[kind])
    first = nemotron_jax.load(folder, conversion_cache=cache)
    assert same(first, nemotron_jax.load(folder)) and len(conversions) == 1
    with no_weights_read(monkeypatch):
        with pytest.raises(AssertionError, match="of the source was read"):  # so reading it would be seen
            nemotron_jax.load(folder)
        for mesh, dtype in ((make_mesh(1), None), (make_mesh(4), "float32"), (make_mesh(2, 2), None)):
            model = nemotron_jax.load(folder, mesh=mesh, dtype=dtype, conversion_cache=cache)
            assert model.folder == folder
    assert len(conversions) == 1 and len(entries(cache)) == 1
    assert same(
        nemotron_jax.load(folder, mesh=make_mesh(4), dtype="float32", conversion_cache=cache),
        nemotron_jax.load(folder, mesh=make_mesh(4), dtype="float32"),
    )


def test_an_entry_is_an_orbax_folder_of_plain_weights(quantised, cache):
    nemotron_jax.load(quantised, conversion_cache=cache)
    (entry,) = entries(cache)
    assert orbax.is_orbax(entry) and not (entry / "hf_quant_config.json").exists()
    assert same(nemotron_jax.load(entry, verify=True), nemotron_jax.load(quantised))


def test_what_was_restored_is_written_like_what_was_converted(quantised, cache, tmp_path):
    for i, asked in enumerate((False, cache, cache)):
        nemotron_jax.export(nemotron_jax.load(quantised, conversion_cache=asked), tmp_path / str(i))
        assert read_raw(tmp_path / str(i)) == read_raw(tmp_path / "0")
        nemotron_jax.load(tmp_path / str(i))  # its small files no longer say quantised
        assert not (tmp_path / str(i) / "hf_quant_config.json").exists()


def test_verify_compares_with_the_source(quantised, cache, monkeypatch):
    """Numbers that went wrong on the way into the entry are found."""
    write = writing.write_arrays

    def wrong(folder, source, *args):
        rows = source.rows

        def damaged(name, *a, **k):
            values = rows(name, *a, **k)
            return values + values.dtype.type(1) if name == "layers.0.mixer.D" else values

        source.rows = damaged
        write(folder, source, *args)

    monkeypatch.setattr(writing, "write_arrays", wrong)
    nemotron_jax.load(quantised, conversion_cache=cache)
    with pytest.raises(ValueError, match=r"differs from the file: .*layers\.0\.mixer\.D"):
        nemotron_jax.load(quantised, conversion_cache=cache, verify=True)


# ------------------------------------------------------------------------------------------------ the source changes
def rewrite_weights(folder):
    """Another weight in the same place: the size and the header stay."""
    raw = read_raw(folder)
    dtype, shape, data = raw["backbone.layers.0.mixer.D"]
    raw["backbone.layers.0.mixer.D"] = dtype, shape, data[::-1]
    write_file(folder / "model.safetensors", raw)


def same_time_other_header(folder):
    """A header of the same length that names the dtype otherwise, behind an unchanged time."""
    file = folder / "model.safetensors"
    times, data = file.stat(), file.read_bytes()
    assert data.count(b'"format": "pt"') == 1
    file.write_bytes(data.replace(b'"format": "pt"', b'"format": "np"'))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = {
    "model.safetensors": rewrite_weights,
    "model.safetensors ": lambda folder: os.utime(folder / "model.safetensors"),
    "model.safetensors  ": same_time_other_header,
    "config.json": lambda folder: edit_json(folder / "config.json", layer_norm_epsilon=1e-4),
    "hf_quant_config.json": lambda folder: edit_json(folder / "hf_quant_config.json", producer={"name": "other"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_source_is_noticed(name, quantised, cache, conversions, caplog):
    nemotron_jax.load(quantised, conversion_cache=cache)
    CHANGES[name](quantised)
    caplog.clear()
    model = nemotron_jax.load(quantised, conversion_cache=cache)
    (line,) = anew(caplog)
    assert f"{quantised} is converted anew: {name.strip()} has changed" in line
    assert same(model, nemotron_jax.load(quantised))
    nemotron_jax.load(quantised, conversion_cache=cache)
    assert len(conversions) == 2 and len(entries(cache)) == 1


def test_other_small_files_do_not_matter(quantised, cache, conversions):
    nemotron_jax.load(quantised, conversion_cache=cache)
    (quantised / "README.md").write_text("new")
    nemotron_jax.load(quantised, conversion_cache=cache)
    assert len(conversions) == 1


def test_a_source_that_changes_while_it_is_converted(quantised, cache, monkeypatch):
    write = writing.write_arrays

    def slow(folder, source, *args):
        write(folder, source, *args)
        rewrite_weights(quantised)

    monkeypatch.setattr(writing, "write_arrays", slow)
    with pytest.raises(ValueError, match="changed while it was converted: model.safetensors has changed"):
        nemotron_jax.load(quantised, conversion_cache=cache)
    assert entries(cache) == []


def test_another_source_has_another_entry(quantised, cache, conversions, tmp_path):
    other, _ = quantize(tmp_path / "other" / "quantised", "dense_g8_kv4", *KINDS["fp8"])
    for folder in (quantised, other, quantised, other):
        assert same(nemotron_jax.load(folder, conversion_cache=cache), nemotron_jax.load(folder))
    assert len(conversions) == 2 and len(entries(cache)) == 2


# ------------------------------------------------------------------------------------------------ damage
def cut_data(entry):
    file = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def flip_byte(entry):
    file = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "data cut short": cut_data,
    "a byte flipped": flip_byte,
    "arrays gone": lambda entry: shutil.rmtree(entry / orbax.ARRAYS),
    "no manifest": lambda entry: (entry / "nemotron_jax.json").unlink(),
    "no stamp": lambda entry: (entry / STAMP).unlink(),
    "half a stamp": lambda entry: os.truncate(entry / STAMP, 40),
    "a stamp of something else": lambda entry: (entry / STAMP).write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_not_used(damage, quantised, cache, conversions, caplog):
    nemotron_jax.load(quantised, conversion_cache=cache)
    DAMAGE[damage](entries(cache)[0])
    caplog.clear()
    model = nemotron_jax.load(quantised, conversion_cache=cache)
    (line,) = anew(caplog)
    assert "is converted anew" in line and "is damaged" in line
    assert same(model, nemotron_jax.load(quantised))
    assert len(conversions) == 2 and len(entries(cache)) == 1


class Loading:
    """A process that loads with a cache. It stops until :meth:`go` before it loads, and before an entry is complete."""

    def __init__(self, *arguments: object):
        program = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
import nemotron_jax
from nemotron_jax.weights import writing
write = writing.write_arrays
def stop(word):
    print(word, flush=True)
    sys.stdin.readline()
def stopping(*arguments):
    write(*arguments)
    stop("written")
writing.write_arrays = stopping
stop("ready")
nemotron_jax.load(sys.argv[1], conversion_cache=sys.argv[2], verify=True)
print("loaded", flush=True)
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, word: str) -> None:
        line = self.process.stdout.readline().strip()
        assert line == word, line or self.process.stderr.read()

    def waits(self) -> None:
        """It says that it waits, and does."""
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "waiting for another process" in line:
                break
        else:
            pytest.fail(f"it did not wait: {lines}")
        time.sleep(1)
        assert self.process.poll() is None


def test_a_killed_conversion_leaves_nothing_that_is_used(quantised, cache, conversions, caplog):
    """Killed when every array is written, and only the stamp and the rename are missing."""
    with Loading(quantised, cache) as process:
        process.says("ready")
        process.go()
        process.says("written")
    assert process.process.returncode == -signal.SIGKILL
    assert entries(cache) == [] and list(cache.glob(".*.saving-*"))
    model = nemotron_jax.load(quantised, conversion_cache=cache)
    assert "was interrupted; what it left" in caplog.text
    assert len(conversions) == 1 and len(entries(cache)) == 1 and not list(cache.glob(".*.saving-*"))
    assert same(model, nemotron_jax.load(quantised))


def test_processes_at_the_same_time(quantised, cache, conversions):
    """While one converts, another waits, and restores what the first wrote."""
    with Loading(quantised, cache) as first, Loading(quantised, cache) as second:
        for process in (first, second):
            process.says("ready")
        first.go()
        first.says("written")
        second.go()
        second.waits()
        first.go()
        for process in (first, second):
            process.says("loaded")  # the second one did not convert
            assert process.process.wait(60) == 0
    nemotron_jax.load(quantised, conversion_cache=cache, verify=True)
    assert conversions == []


def test_an_entry_is_not_replaced_while_it_is_read(quantised, cache):
    """A process that finds the source changed waits for one that is still restoring the old entry."""
    nemotron_jax.load(quantised, conversion_cache=cache)
    config = nemotron_jax.NemotronHConfig.from_json(quantised)
    entry = conversion_cache.Entry(cache, str(quantised), quantised, config)
    before = (entry.path / STAMP).read_bytes()
    with Loading(quantised, cache) as other:
        other.says("ready")
        with entry.opened(lambda: pytest.fail("converted again"), print) as source:
            os.utime(quantised / "model.safetensors")
            other.go()
            other.go()
            other.waits()
            assert (entry.path / STAMP).read_bytes() == before and source.rows("norm_f.weight").any()
            assert not list(cache.glob(".*.saving-*"))
        other.says("written")
        other.says("loaded")
    assert (entry.path / STAMP).read_bytes() != before


# ------------------------------------------------------------------------------------------------ when it is used
def test_off_unless_asked(quantised, conversions, tmp_path, monkeypatch):
    plain = folder_of("bf16_dense")
    user = tmp_path / "user" / "nemotron_jax" / "converted"
    nemotron_jax.load(quantised)
    assert conversions == []
    for word in ("off", "0"):
        monkeypatch.setenv(SWITCH, word)
        nemotron_jax.load(quantised)
    monkeypatch.setenv(SWITCH, "on")
    nemotron_jax.load(plain)  # the variable is for quantised checkpoints
    nemotron_jax.load(quantised, conversion_cache=False)
    assert conversions == []
    nemotron_jax.load(quantised)
    assert [p.parent for p in conversions] == [user]
    monkeypatch.setenv(SWITCH, str(tmp_path / "elsewhere"))
    nemotron_jax.load(quantised)
    assert conversions[-1].parent == tmp_path / "elsewhere"
    nemotron_jax.load(quantised, conversion_cache="off")
    model = nemotron_jax.load(plain, conversion_cache="on")
    assert conversions[-1].parent == user and len(conversions) == 3
    assert same(model, nemotron_jax.load(plain))
    assert same(nemotron_jax.load(plain, conversion_cache=True), model) and len(conversions) == 3


def test_an_orbax_folder_is_not_converted(tmp_path, cache, conversions):
    nemotron_jax.save(nemotron_jax.load(folder_of("dense_g2_kv2")), tmp_path / "saved")
    nemotron_jax.load(tmp_path / "saved", conversion_cache=cache)
    assert conversions == [] and not cache.exists()


def test_folders_that_are_none(quantised, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="found the file .*, accepted a folder"):
        nemotron_jax.load(quantised, conversion_cache=tmp_path / "file")
    with pytest.raises(ValueError, match="found the checkpoint .*, accepted a folder for conversions alone"):
        nemotron_jax.load(quantised, conversion_cache=quantised)
    with pytest.raises(ValueError, match="cannot be made"):
        nemotron_jax.load(quantised, conversion_cache=tmp_path / "file" / "inside")


def test_a_source_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, cache):
    folder, _ = quantize(tmp_path / "quantised", "dense_g2_kv2", encode_fp8, KINDS["fp8"][1])
    raw = read_raw(folder)
    write_file(folder / "model.safetensors", {n: t for n, t in raw.items() if n != "backbone.layers.0.mixer.D"})
    with pytest.raises(ValueError, match=r"missing layers.0.mixer.D"):
        nemotron_jax.load(folder, conversion_cache=cache)
    assert entries(cache) == []


def test_no_room(quantised, cache, monkeypatch):
    nothing = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nothing)
    with pytest.raises(ValueError, match=r"cache/.* was not written: it needs \d+ bytes, 10 are free"):
        nemotron_jax.load(quantised, conversion_cache=cache)
    assert entries(cache) == []


def test_a_hub_name_keeps_its_entry_over_revisions(tmp_path):
    name = conversion_cache.source_name
    snapshot = tmp_path / "snapshots" / "abc"
    assert name("owner/model", snapshot, None) == name("owner/model@main", snapshot, None) == "owner/model@main"
    assert name("owner/model", snapshot, "v2") == name("owner/model@v2", snapshot, None) == "owner/model@v2"
    snapshot.mkdir(parents=True)
    other = tmp_path / "snapshots" / "def"
    other.mkdir()
    assert conversion_cache.fingerprint(snapshot) != conversion_cache.fingerprint(other)  # the commit is in the path


@pytest.mark.parametrize("command", ["generate --prompt x", "score", "chat", "compare --save r.npz", "bench decode"])
def test_every_command_hands_it_on(command, tmp_path, monkeypatch, capsys):
    asked = []

    def load(name, *, conversion_cache, **kwargs):
        asked.append((name, conversion_cache))
        raise ValueError("that was all")

    monkeypatch.setattr(nemotron_jax, "load", load)
    monkeypatch.setattr(nemotron_jax.weights, "load", load)
    monkeypatch.setattr(cli, "build_mesh", lambda args: make_mesh(1))
    monkeypatch.setattr("nemotron_jax.commands.bench.build_mesh", lambda args: make_mesh(1))
    (tmp_path / "text").write_text("x")
    name, *rest = command.split()
    where = rest if name == "bench" else []
    folder = str(TINY / "dense_tied" / "hf")
    line = [name, *where, folder, *([str(tmp_path / "text")] if name == "score" else []), *rest[len(where) :]]
    for extra, expected in (([], None), (["--conversion-cache", "there"], "there"), (["--conversion-cache=on"], "on")):
        asked.clear()
        assert cli.main([*line, *extra]) == 2 and asked == [(folder, expected)]
    assert "that was all" in capsys.readouterr().err


def test_inspect_reads_no_weights_and_takes_no_cache(capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--conversion-cache", "there"])
    assert "unrecognized arguments: --conversion-cache" in capsys.readouterr().err
