"""Mixture-of-experts blocks: router, grouped products, both ways to cut experts, and PyTorch's outputs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nemotron_jax
from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, make_mesh
from nemotron_jax.config import PRESETS
from nemotron_jax.layers import experts
from nemotron_jax.layers.experts import (
    BLOCKS_AT_ONCE,
    GATHER_CHOICES_PER_EXPERT,
    IMPLEMENTATIONS,
    ROOM_FOR_ALL,
    choose,
    expert_sum,
    room_per_expert,
    rows_read,
)
from nemotron_jax.layers.router import MAX_COMPARISONS, describe, largest, route
from nemotron_jax.shapes import checkpoint_shapes
from tests import tiny
from tests.conftest import DATA, TINY

T = 13

SLICES = ShardingRules()
WHOLE = ShardingRules.from_dict({"experts": "tensor"})
RULES = {"slices": SLICES, "whole": WHOLE}


# ------------------------------------------------------------------------------------------ PyTorch
def references(case):
    folder = TINY / case
    if folder.exists():
        return folder / "hf", folder / "ref.npz"
    folder = DATA / "models" / case
    return folder, folder / "reference.npz"


def letters(case, alternating):
    """A mixed plan: of neighbouring boundaries, one or two are deferred."""
    config = NemotronHConfig.from_json(references(case)[0])
    return "layers:" + "".join(itertools.islice(itertools.cycle(alternating), config.num_hidden_layers))


CASES = {
    "moe_nano": (1, 2, 4, 8),
    "moe_latent_super": (1, 2, 4, 8),
    "moe_latent_mtp": (1, 2, 4),
    "tiny-nemotron-3": (1, 2, 4, 8),
}
GRID = [
    (case, tp, plan, rule)
    for case in CASES
    for tp in CASES[case]
    for plan in ("none", "all", "mixed")
    for rule in RULES
]
DEFAULT = {
    ("moe_nano", 1, "none", "slices"),
    ("moe_nano", 8, "all", "whole"),
    ("moe_latent_super", 2, "mixed", "whole"),
    ("moe_latent_mtp", 4, "none", "slices"),
    ("tiny-nemotron-3", 4, "all", "slices"),
}
assert set(GRID) >= DEFAULT


@pytest.mark.parametrize(
    ("case", "tp", "plan", "rule"), [pytest.param(*c, marks=[] if c in DEFAULT else [pytest.mark.full]) for c in GRID]
)
def test_equals_pytorch(case, tp, plan, rule, count_case):
    """Every array that PyTorch left: layers, states, logits, padded rows, chosen experts, greedy tokens."""
    folder, reference = references(case)
    spec = letters(case, "pg.") if plan == "mixed" else plan
    model = nemotron_jax.load(
        folder, mesh=make_mesh(tp), rules=RULES[rule], fusion=spec, dtype="float32", progress=False
    )
    result = nemotron_jax.compare(model, reference)
    assert result.ok, result.problems
    assert result.within_tolerance and result.greedy.matches == result.greedy.total
    assert {"layer", "final", "logits", "full_logits", "greedy_logits", "pad_logits", "pad_greedy_logits"} <= set(
        result.arrays
    )
    if tp > 1 and plan != "none":
        assert result.run["fused_boundaries"] >= model.config.num_hidden_layers // 2
    assert result.experts.tokens == model.config.hybrid_override_pattern.count("E") * np.load(reference)["ids"].size
    assert not result.experts.flips and result.experts.weights.max_abs < 2e-5
    if case == "tiny-nemotron-3":
        ours, stored = result.heldout
        assert abs(ours - stored) < 5e-5 and round(ours, 4) == 2.2980
    count_case()


def test_gap_to_the_first_expert_left_out_equals_pytorch(count_case):
    folder, reference = references("moe_latent_super")
    stored = np.load(reference)
    out = nemotron_jax.load(folder, dtype="float32", progress=False)(stored["ids"], hidden_states=True)
    tiny.close(
        np.asarray(out.hidden_states.experts[2]).reshape(stored["fixed/topk_gap"].shape), stored["fixed/topk_gap"]
    )
    count_case()


@pytest.mark.parametrize(("tp", "plan", "rule"), [(1, "none", "slices"), (4, "all", "whole")])
def test_bfloat16_where_the_chosen_experts_agree(tp, plan, rule, count_case):
    """DESIGN's rule for bfloat16, over the tokens for which we and both PyTorch variants chose alike in every block."""
    folder, reference = references("bf16_moe_latent")
    r = np.load(reference)
    model = nemotron_jax.load(folder, mesh=make_mesh(tp), rules=RULES[rule], fusion=plan, progress=False)
    assert model.dtype == jnp.bfloat16
    out = model(r["ids"], hidden_states=True)
    chosen = np.asarray(out.hidden_states.experts[0]).reshape(r["fixed/topk_idx"].shape)
    same = [(chosen == r[f"{v}/topk_idx"]).all((0, 2)).reshape(r["ids"].shape) for v in ("fixed", "kernel")]
    same = same[0] & same[1]
    assert same.mean() > 0.5
    oracle = r["oracle/logits"][:, : same.shape[1]][same]

    def error(logits):
        return np.sqrt(np.sum((np.asarray(logits, np.float64)[same] - oracle) ** 2) / np.sum(oracle**2))

    assert error(out.logits) <= 1.05 * max(error(r["fixed/logits"]), error(r["kernel/logits"]))
    count_case()


# ------------------------------------------------------------------------------------------ degrees, meshes, plans
MESHES = [
    (2, 1, "none", "slices", tiny.EXPERTS),
    (8, 1, "all/psum", "slices", tiny.LATENT_EXPERTS),
    (8, 1, "all/gather", "whole", tiny.EXPERTS),
    (2, 2, "kinds:E/gather", "whole", tiny.LATENT_EXPERTS),
    (4, 2, "layers:g..p", "slices", tiny.EXPERTS),
    (1, 2, "all", "whole", tiny.LATENT_EXPERTS),
]


@pytest.mark.parametrize(("tensor", "data", "plan", "rule", "sizes"), MESHES)
def test_equals_one_device(tensor, data, plan, rule, sizes, count_case):
    shape = dict(sizes, hybrid_override_pattern="ME*E")
    ids = tiny.tokens(0, 2, T)
    expected = tiny.model(**shape)(ids, hidden_states=True)
    found = tiny.model(tensor, data, fusion=plan, rules=RULES[rule], **shape)(ids, hidden_states=True)
    tiny.close(found.logits, expected.logits)
    for name in ("layers", "mixers", "final"):
        tiny.close(getattr(found.hidden_states, name), getattr(expected.hidden_states, name))
    assert np.array_equal(found.hidden_states.experts[0], expected.hidden_states.experts[0])
    tiny.close(found.hidden_states.experts[1], expected.hidden_states.experts[1])
    count_case()


@pytest.mark.parametrize("zero", ["experts", "shared_experts"])
@pytest.mark.parametrize(
    "rules",
    [
        SLICES,
        pytest.param(WHOLE, marks=pytest.mark.full),
        pytest.param(ShardingRules(mlp=None), marks=pytest.mark.full),
        ShardingRules.from_dict({"experts": "tensor", "mlp": None}),
        ShardingRules(expert_mlp=None),
    ],
    ids=["slices", "whole", "slices, shared whole", "whole, shared whole", "shared alone cut"],
)
def test_neither_part_is_counted_twice(zero, rules, count_case):
    """One part's weights zero: the other alone is the output, at every degree and whatever is whole on every rank."""
    ids = tiny.tokens(1, 2, 5)
    outputs = {}
    for tensor in (1, 2, 4):
        model = NemotronH(
            tiny.config(**tiny.LATENT_EXPERTS, hybrid_override_pattern="E"), mesh=make_mesh(tensor), rules=rules, rngs=1
        )
        path = ("layers", 0, "mixer", "down") if zero == "experts" else ("layers", 0, "mixer", "shared", "down")
        model.replace_weights({path: jnp.zeros_like(model.parameter(*path))})
        outputs[tensor] = np.asarray(model(ids, hidden_states=True).hidden_states.mixers[0])
    assert np.abs(outputs[1]).max() > 0.1
    tiny.close(outputs[2], outputs[1])
    tiny.close(outputs[4], outputs[1])
    count_case(2)


@pytest.mark.parametrize("rule", RULES)
def test_one_reduction_per_block(rule):
    """No second one for the latent width or the shared expert, and no other collective."""
    shape = dict(tiny.LATENT_EXPERTS, hybrid_override_pattern="EE")
    model = tiny.model(4, fusion="none", rules=RULES[rule], **shape)
    program = model.forward_program(2, 3, masked=False, capacity=0)
    text = program.lower(*_abstract(model, 2, 3)).compile().as_text()
    found = re.findall(r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    assert found == ["all-reduce"] * 3  # the embedding and two blocks


def _abstract(model, batch, tokens):
    return jax.ShapeDtypeStruct((batch, tokens), jnp.int32), None, model.cache_shapes(batch, 0).tree


def test_impossible_degrees_are_named():
    shape = dict(tiny.EXPERTS, hybrid_override_pattern="E", moe_intermediate_size=20, n_routed_experts=12)
    with pytest.raises(ValueError, match=r"moe_intermediate_size = 20 is not a multiple of 8.*\[1, 2, 4\]"):
        tiny.model(8, **shape)
    with pytest.raises(ValueError, match=r"n_routed_experts = 12 is not a multiple of 8.*\[1, 2, 3, 4, 6, 12\]"):
        tiny.model(8, rules=WHOLE, **shape)


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_decode_reads_no_expert_that_no_token_chose(tensor, rule, count_case):
    """Experts that are not chosen hold NaN, which would pass through any product."""
    shape = dict(tiny.LATENT_EXPERTS, hybrid_override_pattern="E")
    model = NemotronH(tiny.config(**shape), mesh=make_mesh(tensor), rules=RULES[rule], fusion="none", rngs=2)
    ids = tiny.tokens(2, 1, 1)
    assert choose(1, 3, 16 // tensor) == "gather"
    expected = model(ids, hidden_states=True)
    chosen = np.asarray(expected.hidden_states.experts[0]).ravel()
    poisoned = {}
    for leaf in ("up", "down"):
        values = np.asarray(model.parameter("layers", 0, "mixer", leaf)).copy()
        values[np.setdiff1d(np.arange(16), chosen)] = np.nan
        poisoned["layers", 0, "mixer", leaf] = jnp.asarray(values)
    model.replace_weights(poisoned)
    found = model(ids).logits
    assert np.array_equal(found, expected.logits)
    count_case()


def test_a_rank_without_a_tokens_experts_reads_one_row(count_case):
    """Where an expert is here the rows are its own; other ranks' choices all name one and the same."""
    chosen = np.array([[3, 5, 5], [5, 5, 5], [0, 1, 5]])  # 5: another rank's
    rows = np.asarray(rows_read(jnp.asarray(chosen), 5, 7))
    for (token, choice), expert in np.ndenumerate(chosen):
        assert rows[token, choice].tolist() == ([0] * 7 if expert == 5 else list(range(7 * expert, 7 * expert + 7)))
    assert choose(1, 6, 16, elsewhere=True) == "gather_rows" and choose(1, 6, 16) == "gather"
    count_case()


@pytest.mark.parametrize("rule, form", [("whole", "gather_rows"), ("slices", "gather")])
def test_which_form_a_rank_takes(rule, form, monkeypatch):
    taken = []
    for name in IMPLEMENTATIONS:
        monkeypatch.setitem(
            experts.IMPLEMENTATIONS, name, lambda *a, name=name: taken.append(name) or experts.dense(*a)
        )
    model = NemotronH(
        tiny.config(**tiny.LATENT_EXPERTS, hybrid_override_pattern="E"), mesh=make_mesh(4), rules=RULES[rule], rngs=2
    )
    model(tiny.tokens(2, 1, 1))
    assert set(taken) == {form}


@pytest.mark.parametrize("elsewhere, forms", [(False, [(16, 12, 8), (16, 8, 12)]), (True, [(192, 8), (128, 12)])])
def test_decode_gathers_only_what_was_chosen(elsewhere, forms):
    """Of the experts' matrices the program takes the chosen ones; no product has all of them as an operand."""
    jaxpr = jax.make_jaxpr(lambda *a: expert_sum(*a, elsewhere=elsewhere))(
        *(jnp.zeros(s, jnp.float32) for s in ((2, 8), (16, 12, 8), (16, 8, 12))),
        jnp.zeros((2, 3), jnp.int32),
        jnp.zeros((2, 3)),
    )
    users = [
        e.primitive.name
        for e in _equations(jaxpr.jaxpr)
        for v in e.invars
        if getattr(v.aval, "shape", ()) in ((16, 12, 8), (16, 8, 12), *forms)
    ]
    assert set(users) <= {"gather", "reshape", "pjit", "jit"} and users.count("gather") == 2, users


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)


# ------------------------------------------------------------------------------------------ router
def numpy_route(logits, bias, k, groups=1, kept=1, normalise=True, scale=1.0):
    """float64, one token at a time."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    result = []
    for score in scores:
        choice = score + bias
        if groups > 1:
            grouped = np.sort(choice.reshape(groups, -1), -1)[:, -2:].sum(-1)
            best = sorted(range(groups), key=lambda g: (-grouped[g], g))[:kept]
            choice = np.where(np.isin(np.arange(len(choice)) // (len(choice) // groups), best), choice, -np.inf)
        chosen = sorted(sorted(range(len(choice)), key=lambda e: (-choice[e], e))[:k])
        weights = score[chosen]
        result.append((chosen, weights / (weights.sum() + 1e-20) * scale if normalise else weights * scale))
    return np.array([c for c, _ in result]), np.array([w for _, w in result])


@pytest.mark.parametrize(
    "settings",
    [
        dict(k=6),
        dict(k=16),
        dict(k=6, normalise=False, scale=2.5),
        dict(k=6, groups=4, kept=2, scale=5.0),
        dict(k=3, groups=8, kept=2),
        dict(k=1, groups=2, kept=1),
    ],
)
def test_route_equals_numpy(settings, count_case):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(50, 16)).astype(np.float32)
    bias = rng.normal(size=16).astype(np.float32)
    ours = dict(settings, kept_groups=settings.get("kept", 1))
    ours.pop("kept", None)
    chosen, weights, gap = describe(*route(jnp.asarray(logits), jnp.asarray(bias), **ours))
    expected = numpy_route(logits, bias, **settings)
    assert np.array_equal(chosen, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=2e-6)
    assert np.all(np.asarray(gap) > 0) and np.all(np.isinf(np.asarray(gap)) == (settings["k"] == 16))
    count_case()


def test_groups_left_out_stay_out_where_all_scores_are_negative(count_case):
    """A rule that puts 0 in the place of a group's scores would choose the expert that was shut out."""
    rng = np.random.default_rng(4)
    logits, bias = rng.normal(size=(40, 12)).astype(np.float32), np.full(12, -3.0, np.float32)
    chosen, weights, _ = describe(*route(jnp.asarray(logits), jnp.asarray(bias), k=4, groups=3, kept_groups=1))
    assert len(np.unique(np.asarray(chosen) // 4, axis=1)[0]) == 1
    expected = numpy_route(logits, bias, 4, 3, 1)
    assert np.array_equal(chosen, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=2e-6)
    count_case()


def test_a_large_bias_chooses_and_weights_come_from_the_raw_score(count_case):
    """sigmoid(-18) = 1.5e-8 beside a bias of 12: (score - bias) would be 0."""
    chosen, weights, _ = route(jnp.full((1, 8), -18.0), jnp.full((8,), 12.0), k=3, scale=2.5)
    assert np.isfinite(weights).all() and abs(float(weights.sum()) - 2.5) < 1e-5
    _, raw, _ = route(jnp.full((1, 8), -18.0), jnp.full((8,), 12.0), k=3, normalise=False)
    np.testing.assert_allclose(raw, 1 / (1 + np.exp(18.0)), rtol=1e-5)
    count_case()


def test_equal_scores_go_to_the_lower_index(count_case):
    logits = jnp.asarray([[0.0] * 8, [1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 2, 0, 0, 0, 2]], jnp.float32)
    chosen, _, gap = describe(*route(logits, jnp.zeros(8), k=3))
    assert chosen.tolist() == [[0, 1, 2], [0, 2, 4], [0, 3, 7]]
    assert gap.tolist() == [0.0, 0.0, 0.0]
    count_case()


@pytest.mark.parametrize("experts, k, tokens", [(128, 6, 1), (128, 6, 64), (512, 22, 3), (512, 22, 5), (8, 8, 2)])
def test_comparing_each_with_each_is_top_k(experts, k, tokens, count_case):
    """Few tokens are compared, many sorted; ties, infinities and NaN go the same way."""
    rng = np.random.default_rng(experts + tokens)
    choice = rng.integers(-9, 9, (tokens, experts)).astype(np.float32) / 4
    choice[0, 1], choice[-1, 2], choice[-1, 4] = np.nan, np.inf, -np.inf
    scores = rng.random((tokens, experts)).astype(np.float32)
    chosen, weights = jax.jit(largest, static_argnums=2)(choice, scores, k)
    expected = np.asarray(lax.top_k(jnp.asarray(choice), k)[1])
    assert np.array_equal(chosen, expected)
    assert np.array_equal(weights, np.take_along_axis(scores, expected, -1))
    assert (tokens * experts**2 > MAX_COMPARISONS) == ((experts, tokens) == (512, 5))
    count_case()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_near_64_that_differ_by_a_hundredth_still_choose(dtype, count_case):
    """In bfloat16 they would all be 64. A model keeps them in float32 whatever its own dtype."""
    model = NemotronH(tiny.config(**tiny.EXPERTS, hybrid_override_pattern="E", dtype=dtype), rngs=3)
    router = ("layers", 0, "mixer", "router")
    order = np.random.default_rng(5).permutation(16)
    model.replace_weights(
        {
            (*router, "bias"): jnp.asarray(64 + 0.01 * order, jnp.float32),
            (*router, "weight"): jnp.zeros_like(model.parameter(*router, "weight")),
        }
    )
    assert model.parameter(*router, "weight").dtype == model.parameter(*router, "bias").dtype == jnp.float32
    chosen = model(tiny.tokens(6, 1, 4), hidden_states=True).hidden_states.experts[0]
    assert np.array_equal(chosen, np.broadcast_to(np.sort(np.argsort(order)[-3:]), (1, 1, 4, 3)))
    count_case()


# ------------------------------------------------------------------------------------------ products
def numpy_experts(x, up, down, chosen, weights):
    total = np.zeros(x.shape, np.float64)
    x, up, down = (a.astype(np.float64) for a in (x, up, down))
    for token, choice in np.ndindex(chosen.shape):
        e = chosen[token, choice]
        if 0 <= e < len(up):
            total[token] += weights[token, choice] * (down[e] @ np.maximum(up[e] @ x[token], 0) ** 2)
    return total


def operands(seed, tokens, k, experts, width, inner):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, inner)).astype(np.float32)
    up = (rng.normal(size=(experts, width, inner)) / inner**0.5).astype(np.float32)
    down = (rng.normal(size=(experts, inner, width)) / width**0.5).astype(np.float32)
    chosen = np.argsort(rng.random((tokens, experts)), -1)[:, :k].astype(np.int32)
    return x, up, down, chosen, rng.random((tokens, k)).astype(np.float32)


def spread(chosen, experts):
    return chosen


def all_on_one(chosen, experts):
    """As far as a choice without repetition can: expert 2 for every token, the rest here or there."""
    rest = np.where(chosen[:, 1:] == 2, chosen[:, :1], chosen[:, 1:])
    return np.concatenate([np.full_like(chosen[:, :1], 2), rest], 1)


def mostly_elsewhere(chosen, experts):
    """Another rank's experts stand below and above; some tokens have none here, and experts 1 to 3 no token."""
    return np.where(np.isin(chosen, (1, 2, 3)), experts + chosen, chosen - 2 * (chosen % 3 == 0))


@pytest.mark.parametrize("choice", [spread, all_on_one, mostly_elsewhere])
@pytest.mark.parametrize("tokens", [1, 5, 183])
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "auto"])
def test_products_equal_numpy(implementation, tokens, choice, count_case):
    x, up, down, chosen, weights = operands(7, tokens, 3, 8, 23, 12)
    chosen = choice(chosen, 8)
    found = jax.jit(expert_sum, static_argnames="implementation")(
        x, up, down, chosen, weights, implementation=implementation
    )
    tiny.close(found, numpy_experts(x, up, down, chosen, weights), 1e-5)
    count_case()


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "auto"])
def test_where_no_choice_is_another_ranks(implementation, count_case):
    """The same sums without looking for such choices."""
    x, up, down, chosen, weights = operands(10, 5, 3, 8, 23, 12)
    run = jax.jit(expert_sum, static_argnames=("implementation", "elsewhere"))
    named = "gather" if implementation == "auto" else implementation
    wanted = run(x, up, down, chosen, weights, implementation=named)
    found = run(x, up, down, chosen, weights, implementation=implementation, elsewhere=False)
    tiny.close(found, wanted, 1e-6)
    count_case()


def test_blocks_that_are_left_over(count_case):
    """More than one batch of them, some of it without need: one expert has nearly all choices, far above its room."""
    x, up, down, chosen, weights = operands(11, 300, 1, 64, 9, 12)
    chosen = np.where(np.arange(300)[:, None] % 20, 5, chosen)
    assert 285 - room_per_expert(300, 1, 64) > BLOCKS_AT_ONCE * 8
    found = jax.jit(expert_sum, static_argnames="implementation")(x, up, down, chosen, weights, implementation="blocks")
    tiny.close(found, numpy_experts(x, up, down, chosen, weights), 1e-5)
    count_case()


def test_blocks_copies_no_matrix_but_for_what_is_left_over():
    """The whole stacks are operands of a product, and are taken apart only inside the loop that may not run."""
    matrices = ((16, 12, 8), (16, 8, 12))

    def users(tokens):
        shapes = ((tokens, 8), *matrices)
        jaxpr = jax.make_jaxpr(lambda *a: expert_sum(*a, "blocks"))(
            *(jnp.zeros(s, jnp.float32) for s in shapes), jnp.zeros((tokens, 3), jnp.int32), jnp.zeros((tokens, 3))
        )
        return [e.primitive.name for e in jaxpr.eqns for v in e.invars if getattr(v.aval, "shape", ()) in matrices]

    assert users(ROOM_FOR_ALL + 1) == ["dot_general", "dot_general", "while", "while"]
    assert users(ROOM_FOR_ALL) == ["dot_general", "dot_general"]


@pytest.mark.parametrize("width", [232, 464, 672, 928])
@pytest.mark.parametrize("implementation", ["gather", "blocks", "grouped", "ragged"])
def test_local_widths_of_the_released_models(implementation, width, count_case):
    """Widths that no tile of 64 divides, left when a released model's experts are cut in 4 or 8."""
    x, up, down, chosen, weights = operands(8, 21, 2, 4, width, 36)
    found = jax.jit(expert_sum, static_argnames="implementation")(
        x, up, down, chosen, weights, implementation=implementation
    )
    tiny.close(found, numpy_experts(x, up, down, chosen, weights), 2e-5)
    count_case()


@pytest.mark.parametrize("implementation", ["gather", "gather_rows", "blocks", "grouped", "ragged"])
def test_products_round_alike(implementation, count_case):
    """bfloat16: within one rounding of the result of the plain form, which rounds at the same places."""
    x, up, down, chosen, weights = operands(9, 40, 3, 8, 32, 16)
    args = (*(jnp.asarray(a, jnp.bfloat16) for a in (x, up, down)), chosen, weights)
    expected = np.asarray(expert_sum(*args, "dense"), np.float32)
    found = np.asarray(expert_sum(*args, implementation), np.float32)
    assert found.dtype == np.float32 and np.abs(expected).max() > 0.5
    assert np.all(np.abs(found - expected) <= 2.0**-7 * np.maximum(np.abs(expected), 0.25))
    assert np.mean(found != expected) < 0.05
    count_case()


def test_no_token_at_all():
    x, up, down, chosen, weights = operands(10, 0, 3, 8, 23, 12)
    for implementation in (*IMPLEMENTATIONS, "auto"):
        assert expert_sum(jnp.asarray(x), up, down, chosen, weights, implementation).shape == (0, 12)
    assert choose(1, 6, 128) == "gather" and choose(GATHER_CHOICES_PER_EXPERT * 128 // 6 + 1, 6, 128) == "blocks"


# ------------------------------------------------------------------------------------------ released models
@pytest.mark.parametrize("preset", PRESETS)
def test_released_models_are_described_tensor_by_tensor(preset, count_case):
    """Built without memory at every degree; what they would read is what such a checkpoint holds, name by name."""
    config = NemotronHConfig.preset(preset)
    for tensor in (1, 2, 4, 8):
        model = NemotronH(config, mesh=make_mesh(tensor), mtp=bool(config.num_mtp_layers))
        names = [pair for p in model.parameters for pair in p.layout.tensors()]
        assert len(dict(names)) == len(names)
        assert dict(names) == checkpoint_shapes(config, prefix="")
    assert len(names) == PRESETS[preset].tensors
    count_case()


def test_per_layer_sizes_reach_the_blocks():
    """Puzzle: width, choices and MTP sizes differ from block to block."""
    config = NemotronHConfig.preset("nemotron-labs-3-puzzle-75b-a9b")
    model = NemotronH(config, mtp=True)
    widths = {p.path: p.layout.shape[1] for p in model.parameters if p.path[-2:] == ("mixer", "up")}
    experts = [i for i, kind in enumerate(config.hybrid_override_pattern) if kind == "E"]
    assert [widths["layers", i, "mixer", "up"] for i in experts] == [
        config.layer(i).moe_intermediate_size for i in experts
    ]
    assert len(set(widths.values())) > 1
    assert widths["mtp", 0, "layers", 1, "mixer", "up"] == 2688
