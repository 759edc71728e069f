"""Two processes load one model together: each reads about half, and none waits for the other."""

import hashlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import make_mesh
from nemotron_jax.weights import convert
from tests.weights_cases import folder_of

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
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    here = nemotron_jax.load(folder, mesh=make_mesh(2))
    for rank, result in enumerate(found):
        assert result["compiled"] == []  # no program, so no collective
        for p, array in zip(here.parameters, here.weights, strict=True):
            share = np.asarray(array.addressable_shards[rank].data).tobytes()
            assert result["shares"][".".join(map(str, p.path))] == hashlib.sha256(share).hexdigest(), p.path
        if layout == "huggingface":
            # on top of half come norms, which both hold, and rows too narrow for their columns to be read alone
            assert 0.5 * result["bytes"] < result["read"] < 0.6 * (folder / "model.safetensors").stat().st_size
    count_case(2)
