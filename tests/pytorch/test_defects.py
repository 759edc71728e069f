"""The known defects of the installed transformers are found, and the repairs fit it."""

import json

import numpy as np
import pytest

from tests.conftest import TINY
from tests.pytorch.conftest import SCRIPTS

DUMP = SCRIPTS / "dump_pytorch_reference.py"
# What transformers 5.24, the pinned release, is known for. A release without one of them is a reason to look again.
KNOWN = {"dt_clamp", "time_step_limit_ignored", "tie_ignored", "residual_dtype", "pad_bias_leak", "no_attention"}


@pytest.fixture(scope="module")
def probed(in_torch) -> dict:
    return json.loads(in_torch(DUMP, "--probe", "--json"))["defects"]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_defect_is_detected_and_repaired(probed, count_case, name):
    finding = probed[name]
    assert finding["found"] and finding["amount"] > 1e-2
    assert finding["repaired"] and finding["amount_repaired"] < 1e-4
    count_case()


def test_nothing_else_is_claimed(probed):
    assert {name for name, finding in probed.items() if finding["found"]} == KNOWN


def test_overwritten_weight_is_named(in_torch, count_case):
    """The check of the loaded weights sees a single changed bit, a lost tensor, and repairs the former."""
    script = f"""
import json, sys, torch
sys.path.insert(0, {str(SCRIPTS)!r})
from pytorch_reference.facts import Facts
from pytorch_reference.model import check_weights, load
folder = {str(TINY / "moe_latent_mtp" / "hf")!r}
facts = Facts.of(folder)
model, _ = load(folder, facts, torch.float32, "cpu")
def state():
    check = check_weights(model, folder, facts)
    return [check.clean, check.differing, check.skipped > 0]
out = [state()]
model.model.layers[0].mixer.dt_bias.data[3:4].view(torch.int32).bitwise_xor_(1)
model.model.layers[1].mixer.experts.up_proj.data[5, 0, 0] += 1
out.append(state())
check_weights(model, folder, facts, repair=True)
out.append(state())
print(json.dumps(out))
"""
    before, damaged, repaired = json.loads(in_torch("-c", script).splitlines()[-1])
    assert before == repaired == [True, [], True]
    assert damaged == [False, ["layers.0.mixer.dt_bias", "layers.1.mixer.experts.5.up_proj.weight"], True]
    count_case()


def test_unrepaired_variant_differs(in_torch, tmp_path, count_case):
    """`hf` is what transformers computes, `fixed` what the stored reference says: the same ids, different logits."""
    case = TINY / "dt_limit_finite"
    out = tmp_path / "ref.npz"
    in_torch(DUMP, case / "hf", out, "--ids", case / "ref.npz", "--variants", "hf,fixed",
             "--oracle", "--threads", 2)  # fmt: skip
    with np.load(out) as ours, np.load(case / "ref.npz") as stored:
        assert np.abs(ours["fixed/logits"] - stored["fixed/logits"]).max() < 2e-5
        assert np.abs(ours["hf/logits"] - ours["fixed/logits"]).max() > 0.5
        assert set(stored.files) <= set(ours.files)
        for name in stored.files:
            if "/" in name:
                valid = stored["pad_mask"] == 1 if name == "fixed/pad_logits" else ...
                assert np.abs(ours[name][valid] - stored[name][valid]).max() < 2e-5, name
                count_case()


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["nowhere", "out.npz"], "config.json"),
        ([TINY / "dense_tied" / "hf", "out.npz", "--variants", "best"], "best"),
        ([TINY / "dense_tied" / "hf", "out.npz", "--random", 0, 5], "at least 1"),
        ([TINY / "dense_tied" / "hf"], "OUT.npz"),
    ],
)
def test_bad_input(torch_python, tmp_path, arguments, word):
    import subprocess

    done = subprocess.run([torch_python, DUMP, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and word in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out.npz").exists()
