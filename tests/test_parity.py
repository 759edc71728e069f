"""``compare``: against PyTorch's stored outputs, on purpose-built differences, and between runs of our own."""

import dataclasses
import json

import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import cli, make_mesh
from nemotron_jax.cache_layout import states, unpack
from nemotron_jax.parity import compare, compare_arrays, metrics, read_reference, record, save_run
from nemotron_jax.parity.comparison import check_fit
from nemotron_jax.sharding import Layout, Section
from tests import damage
from tests.conftest import DATA, TINY

DENSE = "dense_g2_kv2"


def reference(name: str):
    return TINY / name / "ref.npz"


def loaded(name: str = DENSE, tp: int = 1, data: int = 1, **options):
    return nemotron_jax.load(TINY / name / "hf", mesh=make_mesh(tp, data), dtype="float32", **options)


@pytest.fixture(scope="module")
def whole():
    """One run of the dense model and its comparison, with everything in it."""
    model = loaded()
    stored = read_reference(reference(DENSE))
    found = record(model, stored.arrays, set(stored.arrays))
    return model, stored, found


def short(stored, *names: str) -> dict[str, np.ndarray]:
    """A reference cut down to the prompt, so that comparing takes one program."""
    names = names or ("ids", "embed", "layer", "mixer", "final", "logits", "conv", "ssm", "k", "v")
    return {name: stored[name] for name in names}


# ---------------------------------------------------------------------------------------- against PyTorch
def test_everything_of_a_dense_model_is_within_tolerance(whole, count_case):
    model, stored, found = whole
    c = compare_arrays(found, stored, {"dtype": "float32", "pattern": model.config.hybrid_override_pattern})
    assert c.ok and c.within_tolerance is True and c.first_layer_beyond_tolerance is None
    assert set(c.arrays) == {"embed", "layer", "mixer", "final", "logits", "full_logits", "greedy_logits", "pad_logits",
                             "pad_greedy_logits", "conv", "ssm", "k", "v"}  # fmt: skip
    assert all(d.entries > 0 and d.max_abs < 1e-4 for d in c.arrays.values())
    assert c.greedy.matches == c.greedy.total == 6 * 32
    assert [row.layer for row in c.layers] == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [row.kind for row in c.layers] == [
        "embedding",
        "mamba",
        "mlp",
        "mamba",
        "attention",
        "mlp",
        "mamba",
        "mlp",
        "final norm",
    ]
    assert {"heldout_nats", "topk_idx"} <= set(c.skipped) and c.unknown == ()
    assert c.distributions["full_logits"].top1 == 1.0 and c.distributions["full_logits"].kl_max < 1e-6
    count_case()


def test_experts_and_their_weights_are_compared(count_case):
    """tests/test_reference.py has the dense cases at every degree and plan."""
    c = compare(loaded("moe_nano", tp=2, fusion="all/gather"), reference("moe_nano"))
    assert c.ok and c.within_tolerance is True, c.problems
    assert c.experts.agreement == 1.0 and c.experts.tokens == 5 * 74 and c.experts.flips == ()
    assert 0 < c.experts.weights.max_abs < 1e-4
    count_case()


def test_bfloat16_is_judged_against_float64(count_case):
    model = nemotron_jax.load(TINY / "bf16_dense" / "hf", dtype="bfloat16", mesh=make_mesh(2), fusion="all/gather")
    c = compare(model, reference("bf16_dense"))
    assert c.tolerance is None and c.within_tolerance is True
    rule = c.narrow
    assert set(rule.pytorch) == {"fixed", "kernel"} and rule.limit == 1.05 * max(rule.pytorch.values())
    assert 0.5 * rule.limit < rule.ours <= rule.limit  # it is a bfloat16 run, not a float32 one
    # The rule can fail: one percent of noise on our logits is over it.
    stored = read_reference(reference("bf16_dense"))
    noisy = {
        "full_logits": stored["oracle/logits"] * (1 + 0.02 * np.sign(stored["oracle/logits"])),
        "greedy": stored["greedy"],
    }
    worse = compare_arrays(noisy, stored, {"dtype": "bfloat16"})
    assert worse.within_tolerance is False and not worse.ok
    count_case()


def test_narrow_rule_leaves_out_what_follows_another_token():
    """``kernel`` chose other greedy tokens than the oracle's; only the part before they part is its error."""
    stored = read_reference(reference("bf16_dense"))
    found = {"full_logits": stored["full_logits"], "greedy": stored["greedy"]}
    rule = compare_arrays(found, stored, {"dtype": "bfloat16"}).narrow
    assert rule.ours == rule.pytorch["fixed"]
    assert not np.array_equal(stored.others["kernel/greedy"], stored["greedy"])
    assert rule.pytorch["kernel"] < 2 * rule.pytorch["fixed"]  # far larger if other tokens were compared


@pytest.mark.parametrize("name, nats", [("tiny-nemotron-h", 2.2568)])
def test_heldout_loss_of_the_shipped_model(name, nats, count_case):
    stored = read_reference(DATA / "models" / name / "reference.npz")
    some = {"heldout_ids": stored["heldout_ids"], "heldout_nats": stored["heldout_nats"]}
    c = compare(nemotron_jax.load(dtype="float32"), some)
    assert c.ok and abs(c.heldout[0] - c.heldout[1]) < 1e-4 and round(c.heldout[0], 4) == nats
    off = compare_arrays({"heldout_nats": stored["heldout_nats"] + 2e-4}, read_reference(some), {"dtype": "float32"})
    assert not off.ok and "held-out" in off.problems[0]
    count_case()


# ---------------------------------------------------------------------------------------- damage is named
@pytest.mark.parametrize(
    "path, layer, kind",
    [
        (("embeddings", "table"), -1, "embedding"),
        (("layers", 0, "mixer", "in_proj"), 0, "mamba"),
        (("layers", 3, "mixer", "qkv"), 3, "attention"),
        (("layers", 4, "norm"), 4, "mlp"),
        (("layers", 5, "mixer", "D"), 5, "mamba"),
        (("norm_f",), 7, "final norm"),
    ],
)
def test_one_changed_weight_is_named(whole, path, layer, kind, count_case):
    model, stored, _ = whole
    sound = model.weights
    try:
        if path[0] == "embeddings":  # the row of a token that occurs
            table = model.parameter(*path)
            model.replace_weights({path: table.at[int(stored["ids"][0, 0]), 0].add(0.5)})
        else:
            damage.change_one_weight(model, *path)
        c = compare(model, short(stored))
    finally:
        model.weights = sound
    assert c.within_tolerance is False and not c.ok
    assert c.first_layer_beyond_tolerance == layer
    assert next(row.kind for row in c.layers if row.layer == layer) == kind
    count_case()


@pytest.mark.parametrize("plan, layer", [("none", 2), ("all/gather", 3)])
def test_a_sum_taken_twice_is_named(whole, plan, layer, count_case):
    _, stored, _ = whole
    with damage.reduced_twice(layer):
        c = compare(loaded(tp=2, fusion=plan), short(stored))
    assert c.first_layer_beyond_tolerance == layer and c.within_tolerance is False
    assert compare(loaded(tp=2, fusion=plan), short(stored)).ok
    count_case()


def test_nan_is_never_within_tolerance(whole):
    model, stored, _ = whole
    sound = model.weights
    try:
        damage.fill_with_nan(model, "layers", 2, "mixer", "D")
        c = compare(model, short(stored))
    finally:
        model.weights = sound
    assert c.within_tolerance is False and c.first_layer_beyond_tolerance == 2
    assert json.dumps(c.to_json(), allow_nan=False)  # still JSON


@pytest.mark.parametrize(
    "name", ["logits", "full_logits", "pad_logits", "pad_greedy_logits", "conv", "ssm", "k", "v", "mixer"]
)
def test_each_array_alone_can_fail(whole, name):
    _, stored, found = whole
    bad = dict(found)
    value = bad[name].copy()
    if name == "pad_logits":
        value[stored["pad_mask"] == 1] += 2e-4
    else:
        value.reshape(-1)[-1] += 2e-4
    c = compare_arrays(bad | {name: value}, stored, {"dtype": "float32", "pattern": "M-M*-M-"})
    assert c.within_tolerance is False and any(p.startswith(name) for p in c.problems)


def test_pads_do_not_count(whole):
    _, stored, found = whole
    value = found["pad_logits"].copy()
    assert (stored["pad_mask"] == 0).any()
    value[stored["pad_mask"] == 0] = np.nan
    assert compare_arrays(found | {"pad_logits": value}, stored, {"dtype": "float32"}).ok


def test_a_state_that_is_wrong_alone_names_its_layer(whole):
    _, stored, found = whole
    ssm = found["ssm"].copy()
    ssm[1, 0, 0, 0, 0] += 1.0  # the second Mamba block is block 2
    c = compare_arrays(found | {"ssm": ssm}, stored, {"dtype": "float32", "pattern": "M-M*-M-"})
    assert c.first_layer_beyond_tolerance == 2


# ---------------------------------------------------------------------------------------- greedy tokens
def test_greedy_ties_accept_the_two_best_and_nothing_else():
    logits = np.zeros((1, 3, 8), np.float32)
    logits[..., 5], logits[..., 6] = 1.0, 1.0 - 1e-4
    logits[0, 2, 6] = 0.5  # no tie at the last position
    best, margin = metrics.two_best(logits)
    assert (
        (best[..., 0] == 5).all() and (best[..., 1] == 6).all() and np.allclose(margin, [[1e-4, 1e-4, 0.5]], rtol=1e-3)
    )
    stored = np.full((1, 3), 5)
    for choice, matches in ((5, [1, 1, 1]), (6, [1, 1, 0]), (7, [0, 0, 0])):
        found = metrics.greedy_matches(np.full((1, 3), choice), stored, margin, best, 2e-4)
        assert found.astype(int).tolist() == [matches]


def test_greedy_counts_and_divergence(whole):
    _, stored, found = whole
    logits = found["greedy_logits"].copy()
    logits[1, 4] = -logits[1, 4]
    c = compare_arrays(found | {"greedy_logits": logits}, stored, {"dtype": "float32"})
    assert c.greedy.total == 192 and c.greedy.matches == 191
    assert c.greedy.divergence == {"greedy": (None, 4), "pad_greedy": (None,) * 4}
    assert any("1 of 192 greedy tokens" in p for p in c.problems)


def test_experts_that_flip_are_listed_with_their_gap():
    stored = {
        "topk_idx": np.array([[[1, 4], [0, 2]]]),
        "topk_w": np.ones((1, 2, 2)),
        "topk_gap": np.array([[0.5, 1e-7]]),
    }
    ours = {"topk_idx": np.array([[[1, 4], [0, 3]]]), "topk_w": np.ones((1, 2, 2)) * [[[1.25], [9.0]]]}
    found = metrics.experts(ours, stored)
    assert found.agreement == 0.5 and found.flips == ((0, 1, 1e-7),)
    assert found.weights.max_abs == 0.25  # only where the same experts were chosen


# ---------------------------------------------------------------------------------------- metrics
def test_differences():
    d = metrics.difference(np.array([3.0, 0.0]), np.array([0.0, 4.0]))
    assert (d.max_abs, d.relative_rms, d.cosine, d.entries) == (4.0, 5 / 4, 0.0, 2)
    assert metrics.difference(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])).max_abs == 0.0
    assert metrics.difference(np.array([np.nan, 1.0]), np.array([0.0, 1.0])).max_abs == np.inf
    assert metrics.difference(np.array([1.0]), np.array([np.inf])).max_abs == np.inf
    assert metrics.difference(np.zeros(0), np.zeros(0)).entries == 0


def test_distributions():
    p = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125]]))
    q = np.log(np.array([[0.25, 0.5, 0.125, 0.0625, 0.03125, 0.03125]])) + 7.0
    found = metrics.distributions(q, p)
    assert (
        found.kl_mean == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2)) and found.top1 == 0.0 and found.top5 >= 0.8
    )
    assert metrics.distributions(p, p).kl_max == 0.0


# ---------------------------------------------------------------------------------------- reading references
def test_the_variants_own_arrays_come_before_bare_ones(whole):
    _, stored, _ = whole
    arrays = {"ids": stored["ids"], "logits": stored["logits"] + 1, "fixed/logits": stored["logits"]}
    assert np.array_equal(read_reference(arrays)["logits"], stored["logits"])
    assert np.array_equal(read_reference(arrays, "hf")["logits"], stored["logits"] + 1)
    assert read_reference(arrays | {"fixed/odd": stored["ids"]}).unknown == ("fixed/odd",)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"ids": None}, "ids is missing"),
        ({"logits": np.zeros((2, 3, 4))}, "logits: found shape (2, 3, 4)"),
        ({"ids": np.zeros((2, 37))}, "ids: found float64"),
        ({"greedy": None}, "greedy is missing"),
        ({"pad_mask": None}, "pad_ids or pad_mask is missing"),
        ({"pad_mask": np.zeros((4, 37), int)}, "a row without a token"),
        ({"heldout_ids": np.zeros((1, 2), int)}, "heldout_ids and heldout_nats"),
    ],
)
def test_contradictory_references_are_refused(whole, change, says):
    _, stored, _ = whole
    arrays = {k: v for k, v in {**stored.arrays, **change}.items() if v is not None}
    with pytest.raises(ValueError, match="fixed") as error:
        read_reference(arrays)
    assert says in str(error.value)


def test_a_reference_of_another_model_is_refused_before_it_runs(whole):
    model, _, _ = whole
    with pytest.raises(ValueError, match="layer: found 10 at dimension 0, accepted 7"):
        check_fit(model, read_reference(reference("dense_g8_kv4")))


def test_unknown_variants_and_files(tmp_path):
    with pytest.raises(ValueError, match="accepted variants here: .*fixed"):
        read_reference(reference(DENSE), "plain")
    with pytest.raises(FileNotFoundError, match="no reference file"):
        read_reference(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="accepted an .npz"):
        read_reference(tmp_path / "bad.npz")


# ---------------------------------------------------------------------------------------- states in checkpoint order
def test_unpacking_undoes_cuts_and_repeats():
    layout = Layout((10,), 0, (Section("t", 4, 0, 4, "x"), Section("t", 2, 4, 2, "B"), Section("t", 4, 6, 2, "C")), 4)
    packed = np.array([0, 4, 6, 7, 1, 4, 6, 7, 2, 5, 8, 9, 3, 5, 8, 9])
    assert unpack(layout, packed, 0).tolist() == list(range(10))
    with pytest.raises(ValueError, match="found 8 entries"):
        unpack(layout, packed[:8], 0)


@pytest.mark.parametrize("name, tp", [("dense_g2_kv2", 4), ("dense_g1_kv1_nobias", 2)])
def test_states_do_not_depend_on_the_degree(name, tp, count_case):
    ids = np.random.default_rng(1).integers(0, 128, (2, 11), np.int32)
    one, many = (states(m, m(ids).cache, 11) for m in (loaded(name), loaded(name, tp)))
    assert set(one) == set(many) == {"conv", "ssm", "k", "v"}
    for key in one:
        assert one[key].shape == many[key].shape
        np.testing.assert_allclose(one[key], many[key], atol=2e-5)
    count_case()


# ---------------------------------------------------------------------------------------- runs of our own
def test_a_saved_run_is_a_reference(whole, tmp_path, count_case):
    model, stored, _ = whole
    first = record(model, {"ids": stored["ids"]}, new_tokens=4)
    path = tmp_path / "run.npz"
    save_run(path, first, {"dtype": "float32", "pattern": model.config.hybrid_override_pattern})
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    # Its own greedy choice, and the same tokens as PyTorch's.
    assert np.array_equal(first["greedy"], stored["greedy"][:, :4])
    c = compare(loaded(tp=2, fusion="all/gather"), path)
    assert c.ok and c.within_tolerance is True and c.greedy.matches == c.greedy.total == 2 * 4
    assert {"pad_logits", "topk_idx", "heldout_ids", "oracle/logits"} <= set(c.skipped) and "k" in c.arrays
    assert compare(path, path).max_abs_logit_error == 0.0  # two saved runs need no model
    other = dict(first) | {"ids": first["ids"] + 1}
    with pytest.raises(ValueError, match="ran other tokens"):
        compare(other, path)
    count_case()


def test_a_narrow_run_is_judged_by_a_given_tolerance_only(whole):
    _, stored, found = whole
    worse = found | {"logits": found["logits"] + 0.01}
    reference_ = dataclasses.replace(stored, report={"dtype": "bfloat16"}, others={})
    reference_.arrays.pop("oracle/logits", None)
    assert compare_arrays(worse, reference_, {"dtype": "bfloat16"}).within_tolerance is None
    assert compare_arrays(worse, reference_, {"dtype": "bfloat16"}).ok
    assert compare_arrays(worse, reference_, {"dtype": "bfloat16"}, tolerance=0.1).within_tolerance is True
    assert compare_arrays(worse, reference_, {"dtype": "bfloat16"}, tolerance=1e-3).within_tolerance is False


# ---------------------------------------------------------------------------------------- the program
def test_program_without_a_model_to_run(whole, tmp_path, capsys, count_case):
    """Two saved runs, so that this process needs no devices of its own."""
    _, stored, found = whole
    report = {"dtype": "float32", "pattern": "M-M*-M-", "mesh": {"tensor": 2}, "fused_boundaries": 7, "fusion": "all"}
    run, bad = tmp_path / "run.npz", tmp_path / "bad.npz"
    save_run(run, found, report)
    save_run(bad, found | {"logits": found["logits"] + 1e-3}, report)
    picture = tmp_path / "errors.png"
    assert cli.main(["compare", str(run), str(reference(DENSE)), "--json", "--plot", str(picture)]) == cli.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed["within_tolerance"] is True and printed["greedy_matches"] == printed["greedy_total"] == 192
    assert printed["tensor_parallel"] == 2 and printed["fused_boundaries"] == 7 and printed["devices"] == []
    assert printed["first_layer_beyond_tolerance"] is None and printed["max_abs_logit_error"] < 1e-4
    assert 0 < printed["relative_rms_logit_error"] < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert cli.main(["compare", str(bad), str(reference(DENSE))]) == cli.FAILED
    assert "NOT within tolerance" in capsys.readouterr().out
    assert cli.main(["compare", str(run), str(tmp_path / "none.npz")]) == cli.BAD_INPUT
    assert cli.main(["compare", "somewhere"]) == cli.BAD_INPUT
    count_case()
