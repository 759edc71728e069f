"""A checkpoint that went through Orbax, or through a model's arrays on a mesh, is one that PyTorch loads as before."""

import json

import pytest

import nemotron_jax as package
from nemotron_jax import make_mesh
from nemotron_jax.weights import convert
from tests.conftest import TINY
from tests.pytorch.conftest import SCRIPTS

CASES = ("dense_g8_kv4", "moe_latent_super")
ROUTES = ("orbax", "model")


@pytest.fixture(scope="module")
def written(in_torch, tmp_path_factory):
    """(case, route) -> what transformers made of the folder beside what it made of the original."""
    folder = tmp_path_factory.mktemp("exported")
    for case in CASES:
        source = TINY / case / "hf"
        convert(source, folder / case / "there")
        convert(folder / case / "there", folder / case / "orbax")
        package.export(package.load(source, mesh=make_mesh(4)), folder / case / "model")
    # One process for all: importing transformers takes most of the time.
    program = f"""
import hashlib, json, sys, torch
sys.path.insert(0, {str(SCRIPTS)!r})
from pathlib import Path
from pytorch_reference.facts import Facts
from pytorch_reference.model import check_weights, load
torch.set_num_threads(1)
def seen(folder):
    facts = Facts.of(folder)
    model, _ = load(folder, facts, torch.float32, "cpu")
    check = check_weights(model, folder, facts, repair=True)
    state = {{}}
    for name, value in model.state_dict().items():
        data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        state[name] = [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    with torch.no_grad():
        logits = model(torch.arange(11)[None] % facts.vocab_size, use_cache=False).logits
    return {{
        "state": state, "clean": check.clean, "differing": check.differing, "finite": bool(logits.isfinite().all()),
        "logits": hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest(),
    }}
out = {{}}
for case in {CASES!r}:
    for route in ("source", *{ROUTES!r}):
        folder = Path({str(TINY)!r}) / case / "hf" if route == "source" else Path({str(folder)!r}) / case / route
        out[case + " " + route] = seen(folder)
print(json.dumps(out))
"""
    return json.loads(in_torch("-c", program).splitlines()[-1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_pytorch_loads_the_same(written, count_case, case, route):
    """Every entry of the state dict, byte for byte, and what the model computes with them."""
    ours, original = written[f"{case} {route}"], written[f"{case} source"]
    assert len(original["state"]) > 10 and original["finite"]
    assert ours["state"] == original["state"]
    assert ours == original
    count_case()


def test_cases_differ(written):
    """Hashes that are equal for any two models would prove nothing."""
    a, b = (written[f"{case} source"] for case in CASES)
    assert a["logits"] != b["logits"] and a["state"] != b["state"]
