"""Two processes load one model together, each about half of it, and write it together: the files of one process."""

import filecmp
import hashlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import NemotronHConfig, make_mesh, processes
from nemotron_jax.weights import convert, gathering
from nemotron_jax.weights.orbax import OrbaxCheckpoint
from tests.test_processes import environment, free_port
from tests.weights_cases import CASES, TRAINED, folder_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
def test_each_process_reads_its_share_and_no_program_runs(layout, tmp_path, count_case):
    folder = folder_of("tiny-nemotron-h")
    if layout == "orbax":
        convert(folder, tmp_path / "orbax")
    where = tmp_path / "orbax" if layout == "orbax" else folder
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, "-m", "tests.load_in_processes", str(where), port, "2"]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for i in (0, 1)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    here = nemotron_jax.load(folder, mesh=make_mesh(2))
    for rank, result in enumerate(found):
        assert result["compiled"] == []  # no program, so no collective
        assert "accepted: a mesh of this process alone, or processes that" in result["refused"]
        for p, array in zip(here.parameters, here.weights, strict=True):
            share = np.asarray(array.addressable_shards[rank].data).tobytes()
            assert result["shares"][".".join(map(str, p.path))] == hashlib.sha256(share).hexdigest(), p.path
        if layout == "huggingface":
            # on top of half come norms, which both hold, and rows too narrow for their columns to be read alone
            assert 0.5 * result["bytes"] < result["read"] < 0.6 * (folder / "model.safetensors").stat().st_size
    count_case(2)


# ------------------------------------------------------------------------------------------------- written together
def write_together(folder: Path, out: Path, tensor: int, data: int, how: str = "") -> list[tuple[int, str]]:
    """(status, stderr) of both processes of tests/write_in_processes.py."""
    port, command = free_port(), [sys.executable, "-m", "tests.write_in_processes", folder, out, tensor, data, how]
    both = []
    for i in (0, 1):
        told = {"COORDINATOR": f"127.0.0.1:{port}", "NUM_PROCESSES": 2, "PROCESS_ID": i}
        env = environment(**{f"NEMOTRON_JAX_{name}": value for name, value in told.items()})
        both.append(subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT))
    try:
        errors = [process.communicate(timeout=300)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return [(process.returncode, err) for process, err in zip(both, errors, strict=True)]


def same_files(a: Path, b: Path) -> bool:
    names = sorted(file.name for file in a.iterdir())
    return names == sorted(file.name for file in b.iterdir()) and not filecmp.cmpfiles(a, b, names, shallow=False)[1]


def check_written(case: str, tensor: int, data: int, out: Path) -> None:
    """Together and alone: exported files have the same bytes, saved folders the same manifest and arrays."""
    folder = folder_of(case)
    done = write_together(folder, out, tensor, data)
    assert [status for status, _ in done] == [0, 0], done
    alone = nemotron_jax.load(folder)
    nemotron_jax.export(alone, out / "alone")
    nemotron_jax.save(alone, out / "saved alone")
    assert same_files(out / "exported", out / "alone")
    assert same_files(out / "back", out / "alone")  # converted by both processes from what they saved
    found, wanted = out / "saved", out / "saved alone"
    assert (found / "nemotron_jax.json").read_bytes() == (wanted / "nemotron_jax.json").read_bytes()
    config = NemotronHConfig.from_json(folder)
    found, wanted = OrbaxCheckpoint(found, config), OrbaxCheckpoint(wanted, config)
    assert list(found.tensors) == list(wanted.tensors) and len(found.tensors) > 5
    for name in found.tensors:
        assert found.rows(name).tobytes() == wanted.rows(name).tobytes(), name
    for i in (0, 1):  # what each process converted for itself
        (entry,) = (out / "caches" / str(i)).glob("[!.]*")
        assert (entry / "arrays" / "ocdbt.process_0").is_dir()
        cached = OrbaxCheckpoint(entry, config)
        assert all(cached.rows(name).tobytes() == wanted.rows(name).tobytes() for name in wanted.tensors)
    # What went wrong on the way was an error in both, and left nothing behind; the saved folder above is from before.
    said = [json.loads((out / f"said-{i}.json").read_text()) for i in (0, 1)]
    assert said[0] == said[1]
    asked = data == 1  # else process 0 has all ranks itself, and asks for nothing
    fault = "saved was not written: process 1 cannot read " if asked else ""
    parts = ("is not empty", "saved was not written: ", "none was not written: ", fault, "nowhere", "")
    for text, part in zip(said[0], parts, strict=True):
        assert part in text and bool(part) == bool(text)
    assert said[0][3].endswith("MemoryError('no room')" * asked)
    left = {"alone", "back", "caches", "exported", "saved", "saved alone", "said-0.json", "said-1.json"}
    assert {path.name for path in out.iterdir()} == left


def test_written_together_as_alone(tmp_path, count_case):
    """Groups and KV heads that repeat over ranks, experts, and tensors that several buffers take."""
    check_written("moe_latent_super", 4, 1, tmp_path)
    count_case()


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *TRAINED])
@pytest.mark.parametrize(("tensor", "data"), [(4, 1), (2, 2)])
def test_all_written_together_as_alone(case, tensor, data, tmp_path, count_case):
    check_written(case, tensor, data, tmp_path)
    count_case()


@pytest.mark.full
def test_a_killed_process_leaves_the_saved_folder_whole(tmp_path, count_case):
    (status, err), (victim, _) = write_together(folder_of("dense_g8_kv4"), tmp_path, 4, 1, "killed")
    assert victim == -signal.SIGKILL
    assert status == processes.LOST and "process 1 (host" in err and "is lost" in err
    convert(tmp_path / "saved", tmp_path / "back")
    assert same_files(tmp_path / "back", tmp_path / "exported")
    count_case()


@pytest.mark.parametrize(("shared", "largest"), [("0", 16 << 20), ("1", 64 << 10)])
def test_messages_are_small_where_processes_share_a_gpu(monkeypatch, shared, largest):
    """There larger ones have hung."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    pieces = [(start, stop, buffer.size) for start, stop, buffer in gathering._buffers(20 << 20)]
    assert {size for _, _, size in pieces} == {largest}
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == 20 << 20 and all(stop - start < size for start, stop, size in pieces)
