"""Hub ids against a hub on this machine: what is fetched, revisions, tokens, the cache, errors in words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

import nemotron_jax
from nemotron_jax.weights import convert
from nemotron_jax.weights.hub import is_hub_id
from nemotron_jax.weights.loading import default_model, locate
from tests.hub_server import Hub, running
from tests.weights_cases import edit_json, folder_of, read_raw, write_folder

ROOT = Path(__file__).parent.parent
ID = "nvidia/Tiny-Nemotron"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running(Hub()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield server


def folder_with_more(tmp_path) -> Path:
    """A sharded checkpoint with files beside it that no one needs."""
    source = folder_of("dense_g2_kv2")
    folder = write_folder(tmp_path / "remote", read_raw(source), source, files=3)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "modeling_nemotron_h.py", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def same_weights(a, b) -> bool:
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a.weights, b.weights, strict=True))


def test_a_hub_id_loads_and_only_what_is_needed_comes(hub, tmp_path):
    folder = folder_with_more(tmp_path)
    hub.add(ID, folder)
    model = nemotron_jax.load(ID, verify=True)
    assert same_weights(model, nemotron_jax.load(folder_of("dense_g2_kv2")))
    wanted = {p.name for p in folder.glob("model-*")} | {"config.json", "generation_config.json", "chat_template.jinja"}
    assert set(hub.served) == wanted | {"model.safetensors.index.json"}
    assert (model.folder / "chat_template.jinja").exists()
    sent = len(hub.served)
    nemotron_jax.load(ID)
    assert len(hub.served) == sent  # from the cache


def test_one_file(hub):
    hub.add(ID, folder_of("tiny-nemotron-h"))
    assert same_weights(nemotron_jax.load(ID), nemotron_jax.load())
    assert sorted(hub.served).count("model.safetensors") == 1


def test_revisions(hub):
    hub.add(ID, folder_of("dense_g2_kv2"))
    hub.add(ID, folder_of("dense_tied"), revision="v2")
    assert not nemotron_jax.load(ID).config.tie_word_embeddings
    for model in (
        nemotron_jax.load(ID, revision="v2"),
        nemotron_jax.load(f"{ID}@v2"),
        nemotron_jax.load(ID, revision=hub.commit(ID, "v2")),
    ):
        assert model.config.tie_word_embeddings
    with pytest.raises(FileNotFoundError, match=f"hub model {ID} at v3: no such revision"):
        nemotron_jax.load(ID, revision="v3")
    with pytest.raises(ValueError, match="accepted: one"):
        nemotron_jax.load(f"{ID}@v2", revision="v2")
    with pytest.raises(ValueError, match="accepted with a hub id alone"):
        nemotron_jax.load(folder_of("dense_tied"), revision="v2")


def test_tokens(hub, monkeypatch):
    hub.add(ID, folder_of("dense_tied"), token="hf_secret")
    with pytest.raises(ValueError, match="access is refused; .* HF_TOKEN"):
        nemotron_jax.load(ID)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="access is refused"):
        nemotron_jax.load(ID)
    assert not hub.served
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    nemotron_jax.load(ID)


def test_errors_in_words(hub, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="nobody/nothing: there is neither such a folder nor such a model on the hub"
    ):
        nemotron_jax.load("nobody/nothing")
    asked = len(hub.asked)
    for name in ("no-such-folder", "./a/b", "/a/b", "a/b/c", "../x", "a b/c", str(tmp_path / "x")):
        with pytest.raises(FileNotFoundError, match="no such folder, and no hub id"):
            nemotron_jax.load(name)
    assert len(hub.asked) == asked
    assert is_hub_id("nvidia/NVIDIA-Nemotron-Nano-9B-v2") and not is_hub_id("nvidia/..")


def test_what_cannot_be_loaded_is_refused_before_its_weights_are_fetched(hub, tmp_path):
    source = folder_of("dense_g2_kv2")
    folder = write_folder(tmp_path / "remote", read_raw(source), source)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    hub.add(ID, folder)
    with pytest.raises(ValueError, match="found quant_method 'gptq'"):
        nemotron_jax.load(ID)
    assert "model.safetensors" not in hub.served


def test_offline(hub, monkeypatch):
    hub.add(ID, folder_of("dense_tied"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"nor whole in the local cache, and the hub is not reached \(HF_HUB_OFFLINE is set\)"
    ):
        nemotron_jax.load(ID)
    assert not hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online = nemotron_jax.load(ID)
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same_weights(nemotron_jax.load(ID), online)
    assert len(hub.asked) == asked


def test_convert_takes_a_hub_id(hub, tmp_path):
    hub.add(ID, folder_with_more(tmp_path))
    convert(ID, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    assert read_raw(tmp_path / "back") == read_raw(folder_of("dense_g2_kv2"))


def test_the_environment_is_what_counts(tmp_path):
    """The program in a process of its own, with a token, then with the hub gone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    with running(Hub()) as hub:
        hub.add(ID, folder_of("dense_tied"), revision="v2", token="hf_secret")
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
        command = [sys.executable, "-m", "nemotron_jax", "convert", ID, tmp_path / "a", "--revision", "v2", "--json"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tensors"] == len(read_raw(folder_of("dense_tied")))
    command[5] = tmp_path / "b"
    done = subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["tensors"], done.stderr


def test_the_shipped_model_has_a_name(tmp_path, monkeypatch):
    """In every command, not only where shapes are enough; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert locate("tiny-nemotron-h") == default_model()
    (tmp_path / "tiny-nemotron-h").mkdir()
    assert locate("tiny-nemotron-h") == Path("tiny-nemotron-h")
