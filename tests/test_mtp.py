"""Multi-token prediction: equal to the float64 oracle, at every degree and plan, in one piece and in many."""

import dataclasses
import functools
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nemotron_jax
from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, make_mesh
from tests import tiny
from tests.conftest import TINY

CASE = TINY / "moe_latent_mtp"
WHOLE = ShardingRules.from_dict({"experts": "tensor"})
SHAPE = dict(
    hybrid_override_pattern="-",
    num_nextn_predict_layers=2,
    mtp_hybrid_override_pattern="*E",
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=48,
    moe_latent_size=20,
)


@pytest.fixture(scope="module")
def stored():
    r = np.load(CASE / "ref.npz")
    return np.concatenate([r["ids"], r["fixed/greedy"]], 1), r["oracle/mtp_logits"]


@functools.cache
def load(tensor=1, **settings):
    return nemotron_jax.load(CASE / "hf", mesh=make_mesh(tensor), dtype="float32", mtp=True, progress=False, **settings)


@functools.cache
def random(tensor=1, data=1, fusion="none", rules=None):
    return NemotronH(tiny.config(**SHAPE), mesh=make_mesh(tensor, data), fusion=fusion, rules=rules, mtp=True, rngs=0)


GRID = [(tp, plan, rules) for tp in (1, 2, 4) for plan in ("none", "all", "all/gather") for rules in (None, WHOLE)]
DEFAULT = [(1, "none", None), (2, "all", WHOLE), (4, "all/gather", None), (4, "none", WHOLE)]


@pytest.mark.parametrize(
    ("tp", "plan", "rules"), [pytest.param(*c, marks=[] if c in DEFAULT else [pytest.mark.full]) for c in GRID]
)
def test_equals_the_oracle(tp, plan, rules, stored, count_case):
    ids, expected = stored
    model = load(tp, fusion=plan, rules=rules)
    tiny.close(model.mtp_logits(ids), expected, 1e-4)
    assert model.mtp_plan(2, 4).fused_boundaries == (2 if tp > 1 and plan != "none" else 0)
    count_case()


def test_pieces_with_the_step_s_own_cache(stored, count_case):
    """States and next tokens arrive as generation produces them: a prompt, then one or a few at a time."""
    ids, expected = stored
    model = load(2, fusion="all/gather")
    final = model(ids, hidden_states=True).hidden_states.final
    cache, logits = model.new_mtp_cache(2, 24), []
    for start, stop in ((0, 20), (20, 21), (21, 22), (22, 27), (27, 52)):
        out = model.draft(final[:, start:stop], ids[:, start + 1 : stop + 1], cache)
        cache = out.cache
        logits.append(out.logits)
    tiny.close(jnp.concatenate(logits, 1), expected, 1e-4)
    assert cache.length.tolist() == [52, 52] and cache.capacity >= 52
    count_case()


def test_taking_tokens_back(stored, count_case):
    """A draft that was refused: the length alone goes back, and what follows is as if it had never been."""
    ids, expected = stored
    model = load()
    final = model(ids, hidden_states=True).hidden_states.final
    first = model.draft(final[:, :20], ids[:, 1:21])
    wrong = model.draft(final[:, 20:23], (ids[:, 21:24] + 7) % 128, first.cache)
    back = dataclasses.replace(wrong.cache, length=wrong.cache.length - 3, longest=None)
    right = model.draft(final[:, 20:23], ids[:, 21:24], back)
    tiny.close(right.logits, expected[:, 20:23], 1e-4)
    count_case()


@pytest.mark.parametrize(
    ("tensor", "data", "plan", "rules"),
    [(4, 1, "all/gather", WHOLE), (2, 2, "all/psum", None), (8, 1, "kinds:E/gather", None)],
)
def test_two_steps_equal_one_device(tensor, data, plan, rules, count_case):
    ids = tiny.tokens(0, 2, 13)
    tiny.close(random(tensor, data, plan, rules).mtp_logits(ids, depth=2), random().mtp_logits(ids, depth=2))
    count_case()


def test_deeper_steps_chain(count_case):
    """Depth 3 with two stored steps: the states of each feed the next, the last step runs again."""
    model, ids = random(), tiny.tokens(1, 2, 9)
    x, cut = model(ids, hidden_states=True).hidden_states.final, 9
    for depth, step in ((1, 0), (2, 1), (3, 1)):
        cut -= 1
        out = model.draft(x[:, :cut], ids[:, depth:], step=step)
        tiny.close(model.mtp_logits(ids, depth=depth), out.logits)
        x = out.hidden
    other = model.draft(model(ids, hidden_states=True).hidden_states.final[:, :8], ids[:, 1:], step=1)
    assert (
        np.abs(np.asarray(other.logits - model.mtp_logits(ids))).max() > 0.1
    )  # the two steps have weights of their own
    count_case(3)


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.full)])
def test_padded_rows_equal_single_runs(side, count_case):
    model, ids = random(2, fusion="all/gather"), tiny.tokens(2, 3, 9)
    mask = np.zeros((3, 9), bool)
    for row, n in enumerate((9, 5, 2)):
        mask[row, slice(9 - n, 9) if side == "left" else slice(0, n)] = True
    logits = np.asarray(model.mtp_logits(np.where(mask, ids, 0), mask=mask))
    assert np.isfinite(logits).all()
    for row in range(3):
        alone = model.mtp_logits(ids[row][mask[row]][None])
        places = np.flatnonzero(mask[row])[:-1]
        tiny.close(logits[row, places], alone[0])
    final = model(np.where(mask, ids, 0), mask=mask, hidden_states=True).hidden_states.final
    pairs = mask[:, :-1] & mask[:, 1:]
    drafted = model.draft(final[:, :-1], np.where(mask, ids, 0)[:, 1:], mask=pairs)
    tiny.close(np.asarray(drafted.logits)[pairs], logits[:, :8][pairs])
    assert drafted.cache.length.tolist() == [8, 4, 1]
    count_case(3)


def test_the_model_itself_does_not_change(stored, count_case):
    """With or without the MTP layers loaded, logits are the same bits."""
    ids, _ = stored
    plain = nemotron_jax.load(CASE / "hf", dtype="float32", progress=False)
    assert np.array_equal(plain(ids[:, :5]).logits, load()(ids[:, :5]).logits)
    assert len(plain.parameters) < len(load().parameters)
    count_case()


def test_random_values_do_not_depend_on_the_degree_or_on_mtp(count_case):
    plain = NemotronH(tiny.config(**SHAPE), rngs=0)
    ids = tiny.tokens(3, 1, 4)
    assert np.array_equal(plain(ids).logits, random()(ids).logits)
    whole = np.asarray(random().parameter("mtp", 1, "eh_proj"))
    assert np.array_equal(whole, random(4).parameter("mtp", 1, "eh_proj"))
    assert not np.array_equal(whole, random().parameter("mtp", 0, "eh_proj"))
    count_case(2)


def test_what_is_refused():
    with pytest.raises(ValueError, match="num_nextn_predict_layers = 0"):
        NemotronH(tiny.config(), mtp=True)
    plain = NemotronH(tiny.config(**SHAPE), rngs=0)
    for call in (
        lambda: plain.mtp_logits(np.zeros((1, 4), int)),
        lambda: plain.draft(jnp.zeros((1, 1, 40)), np.zeros((1, 1), int)),
    ):
        with pytest.raises(ValueError, match="mtp=True"):
            call()
    model = random()
    with pytest.raises(ValueError, match="step: found 2, accepted 0 to 1"):
        model.draft(jnp.zeros((1, 1, 40)), np.zeros((1, 1), int), step=2)
    with pytest.raises(ValueError, match=r"hidden: found shape \(1, 2, 40\), accepted \(1, 1, 40\)"):
        model.draft(jnp.zeros((1, 2, 40)), np.zeros((1, 1), int))
    with pytest.raises(ValueError, match="depth: found 4, accepted 1 to 3"):
        model.mtp_logits(np.zeros((1, 4), int), depth=4)
    # dimensions of layers that are not there do not restrict the degree
    odd = tiny.config(**dict(SHAPE, moe_intermediate_size=20))
    assert NemotronH(odd, mesh=make_mesh(8)).axis.size == 8
    with pytest.raises(ValueError, match="moe_intermediate_size = 20"):
        NemotronH(odd, mesh=make_mesh(8), mtp=True)


def test_a_missing_mtp_tensor_is_named(tmp_path):
    """Asked for, and not in the file: an error and no random layer."""
    tensors = {}
    for file in (CASE / "hf").glob("*.safetensors"):
        tensors |= load_file(file)
    assert tensors.pop("mtp.layers.0.enorm.weight").shape == (48,)
    tensors["mtp.layers.1.surprise.weight"] = np.zeros(3, np.float32)
    (tmp_path / "hf").mkdir()
    shutil.copy(CASE / "hf" / "config.json", tmp_path / "hf")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"missing mtp.layers.0.enorm.weight \(48,\); unknown mtp.layers.1.surprise.weight"
    ):
        nemotron_jax.load(tmp_path / "hf", mtp=True, progress=False)
    nemotron_jax.load(tmp_path / "hf", progress=False)


def test_the_plan_of_a_step():
    config = tiny.config(**SHAPE)
    model = NemotronH(config, mesh=make_mesh(4), fusion="layers:g", mtp=True)
    assert model.plan(1, 1).letters == "g" and model.mtp_plan(1, 1).letters == ".."
    kinds = NemotronH(config, mesh=make_mesh(4), fusion="kinds:E/gather", mtp=True)
    assert kinds.plan(1, 1).letters == "." and kinds.mtp_plan(1, 1).letters == ".g"


def test_released_models_with_mtp():
    for preset in ("nemotron-3.5-lightning-30b-a3b", "nemotron-3-super-120b-a12b"):
        config = NemotronHConfig.preset(preset)
        with_mtp, without = (NemotronH(config, mesh=make_mesh(8), mtp=flag) for flag in (True, False))
        assert with_mtp.bytes_per_device() > without.bytes_per_device()
        assert {p.path[0] for p in without.parameters} == {"embeddings", "layers", "lm_head", "norm_f"}
