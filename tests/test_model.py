"""The network: pieces, padding, caches, degrees and plans all give what one device gives in one forward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, ShardingRules, make_mesh
from nemotron_jax.cache import AttentionCache
from tests import tiny

T = 21  # two chunks of 8 and a remainder


def prompt(seed=0, batch=2, length=T):
    return tiny.tokens(seed, batch, length)


# ------------------------------------------------------------------------------------------ degrees, meshes, plans
GRID = [
    # tensor, data, plan
    (2, 1, "none"),
    (4, 1, "all/gather"),
    (8, 1, "all/psum"),
    (8, 1, "layers:.gp"),
    (2, 2, "all/gather"),
    (4, 2, "layers:g.p"),
    (1, 2, "all"),
]


@pytest.mark.parametrize(("tensor", "data", "plan"), GRID)
def test_equals_one_device(tensor, data, plan, count_case):
    ids = prompt()
    expected = tiny.model()(ids, hidden_states=True)
    found = tiny.model(tensor, data, fusion=plan)(ids, hidden_states=True)
    tiny.close(found.logits, expected.logits)
    tiny.close(found.hidden_states.layers, expected.hidden_states.layers)
    tiny.close(found.hidden_states.mixers, expected.hidden_states.mixers)
    tiny.close(found.hidden_states.final, expected.hidden_states.final)
    count_case()


@pytest.mark.parametrize(
    "shape", [dict(n_groups=2), dict(n_groups=1, num_key_value_heads=1), dict(num_key_value_heads=8)]
)
@pytest.mark.parametrize("tensor", [4, 8])
def test_more_ranks_than_groups_or_kv_heads(shape, tensor, count_case):
    ids = prompt(2)
    tiny.close(tiny.model(tensor, fusion="all/psum", **shape)(ids).logits, tiny.model(**shape)(ids).logits)
    count_case()


def test_statistics_of_a_norm_group_do_not_depend_on_the_degree(count_case):
    """One head a thousand times larger: a group cut in the wrong place would show at once."""
    ids = prompt(3)
    outs = []
    for tensor in (1, 2, 4, 8):
        m = NemotronH(tiny.config(hybrid_override_pattern="M", n_groups=2), mesh=make_mesh(tensor), rngs=3)
        path = ("layers", 0, "mixer", "D")
        d = np.asarray(m.parameter(*path)).copy()
        d[5] *= 1000
        m.replace_weights({path: jnp.asarray(d)})
        outs.append(m(ids).logits)
    for other in outs[1:]:
        tiny.close(other, outs[0])
    count_case()


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_vocabulary_that_no_degree_divides(tensor, count_case):
    shape = dict(vocab_size=103, tie_word_embeddings=True, hybrid_override_pattern="-")
    ids = np.array([[102, 0, 101, 51]], np.int32)
    found = tiny.model(tensor, **shape)(ids)
    assert found.logits.shape == (1, 4, 103)
    tiny.close(found.logits, tiny.model(**shape)(ids).logits)
    count_case()


def test_impossible_degrees_name_the_dimension_and_what_works():
    with pytest.raises(ValueError, match=r"mamba_num_heads = 12.*num_attention_heads = 6.*\[1, 2\]"):
        tiny.model(8, mamba_num_heads=12, n_groups=4, num_attention_heads=6, num_key_value_heads=2)
    # dimensions of absent block kinds do not count
    assert (
        tiny.model(8, hybrid_override_pattern="-", num_attention_heads=6, mamba_num_heads=12, n_groups=4).axis.size == 8
    )


def test_rules_that_replicate_a_kind(count_case):
    ids = prompt(4)
    rules = ShardingRules(q_heads=None, kv_heads=None)
    m = tiny.model(4, fusion="all/gather", rules=rules)
    assert m.plan(2, T).letters == "g.g"
    tiny.close(m(ids).logits, tiny.model()(ids).logits)
    tiny.close(tiny.model(4, rules=ShardingRules(vocab=None))(ids).logits, tiny.model()(ids).logits)
    count_case()


@pytest.mark.parametrize("plan", ["none", "all/gather", "all/psum", "kinds:M/gather"])
def test_zeroed_blocks_leave_the_embedding_exactly(plan, count_case):
    """A residual that is counted once per rank, or an embedding that is summed twice, would show in every bit."""
    m = NemotronH(tiny.config(), mesh=make_mesh(4), fusion=plan, rngs=0)
    zero = {p.path: jnp.zeros_like(m.parameter(*p.path)) for p in m.parameters if p.path[-1] in ("out", "down")}
    m.replace_weights(zero)
    hidden = m(prompt(5), hidden_states=True).hidden_states
    for layer in hidden.layers:
        assert np.array_equal(layer, hidden.embed)
    count_case()


def test_forced_positions_do_not_matter(count_case):
    """No rotary embedding: rope settings of a config change nothing."""
    ids = prompt(6)
    a = tiny.model(rope_theta=10000.0, hybrid_override_pattern="*")(ids).logits
    b = tiny.model(rope_theta=500000.0, partial_rotary_factor=0.5, hybrid_override_pattern="*")(ids).logits
    assert np.array_equal(a, b)
    count_case()


# ------------------------------------------------------------------------------------------ pieces and padding
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 8, 9, T // 2, T - 1])
def test_two_pieces(tensor, cut, count_case):
    m, ids = tiny.model(tensor, fusion="all/gather"), prompt(7)
    expected = m(ids)
    first = m(ids[:, :cut])
    second = m(ids[:, cut:], cache=first.cache)
    tiny.close(jnp.concatenate([first.logits, second.logits], 1), expected.logits)
    assert_same_state(second.cache, expected.cache)
    count_case()


def assert_same_state(found, expected, tolerance=2e-5):
    tiny.close(found.length, expected.length, 0)
    for a, b in zip(found.layers, expected.layers, strict=True):
        if isinstance(a, AttentionCache):
            slots = min(a.k.shape[1], b.k.shape[1])
            filled = (np.arange(slots) < np.asarray(expected.length)[:, None])[..., None, None]
            tiny.close(np.where(filled, a.k[:, :slots], 0), np.where(filled, b.k[:, :slots], 0), tolerance)
            tiny.close(np.where(filled, a.v[:, :slots], 0), np.where(filled, b.v[:, :slots], 0), tolerance)
        elif a is not None:
            tiny.close(a.conv, b.conv, tolerance)
            tiny.close(a.ssm, b.ssm, tolerance)


def test_token_by_token(count_case):
    m, ids = tiny.model(2, fusion="all/gather"), prompt(8)
    expected, cache, logits = m(ids), m.new_cache(2, T), []
    for t in range(T):
        out = m(ids[:, t : t + 1], cache=cache)
        cache = out.cache
        logits.append(out.logits)
    tiny.close(jnp.concatenate(logits, 1), expected.logits)
    assert_same_state(cache, expected.cache)
    count_case()


def test_pieces_on_the_chunk_grid(count_case):
    m, ids = tiny.model(hybrid_override_pattern="MM"), prompt(9, length=24)
    whole, first = m(ids), m(ids[:, :16])
    second = m(ids[:, 16:], cache=first.cache)
    tiny.close(whole.logits[:, 16:], second.logits, 5e-6)
    count_case()


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("pad_id", [2, 17])
def test_padded_rows_equal_single_runs(tensor, side, pad_id, count_case):
    shape = dict(use_bias=True, mlp_bias=True)
    m, ids = tiny.model(tensor, fusion="all/gather", **shape), prompt(10, batch=4)
    lengths, mask = (T, 9, 1, 14), np.zeros((4, T), bool)
    rng = np.random.default_rng(1)
    for row, n in enumerate(lengths):
        places = dict(left=slice(T - n, T), right=slice(0, n), holes=np.sort(rng.permutation(T)[:n]))[side]
        mask[row, places] = True
    padded = np.where(mask, ids, pad_id)
    out = m(padded, mask=mask, hidden_states=True)
    last = m(padded, mask=mask, last_only=True)
    assert np.isfinite(out.logits).all()
    for row in range(4):
        real = ids[row][mask[row]][None]
        alone = m(real, hidden_states=True)
        tiny.close(out.logits[row][mask[row]], alone.logits[0])
        tiny.close(last.logits[row, 0], alone.logits[0, -1])
        tiny.close(out.hidden_states.layers[:, row][:, mask[row]], alone.hidden_states.layers[:, 0])
        assert_same_state(rows_of(out.cache, [row]), alone.cache)
    count_case()


def rows_of(cache, rows):
    return jax.tree.map(lambda x: x[np.asarray(rows)], dataclasses.replace(cache, longest=None))


def test_large_biases_do_not_leak_from_left_pads(count_case):
    m = NemotronH(tiny.config(hybrid_override_pattern="M", use_bias=True), rngs=4)
    m.replace_weights(
        {
            ("layers", 0, "mixer", n): jnp.full_like(m.parameter("layers", 0, "mixer", n), 9.0)
            for n in ("conv_bias", "dt_bias")
        }
    )
    ids, mask = np.full((2, 12), 5, np.int32), np.zeros((2, 12), bool)
    mask[1, 11] = True
    out = m(ids, mask=mask)
    state, alone = out.cache.layers[0], m(ids[:1, :1])
    assert not np.any(state.ssm[0]) and not np.any(state.conv[0])  # nothing but pads: exactly the empty state
    assert_same_state(rows_of(out.cache, [1]), alone.cache, 1e-6 * float(np.max(np.abs(state.ssm))))
    tiny.close(out.logits[1, 11], alone.logits[0, 0])
    count_case()


def test_rows_new_continuing_one_token_or_none_in_one_batch(count_case):
    m = tiny.model(2, fusion="all/gather")
    history = prompt(11, batch=4, length=10)
    seen = np.array([0, 10, 4, 7])  # tokens behind each row
    before = m(history, mask=np.arange(10) < seen[:, None]).cache
    new, fresh = prompt(12, batch=4, length=7), np.array([7, 1, 0, 3])
    out = m(new, cache=before, mask=np.arange(7) < fresh[:, None])
    for row in range(4):
        text = np.concatenate([history[row, : seen[row]], new[row, : fresh[row]]])[None]
        alone = m(text)
        tiny.close(out.logits[row, : fresh[row]], alone.logits[0, seen[row] :])
        assert_same_state(rows_of(out.cache, [row]), alone.cache)
    count_case()


def test_zero_tokens(count_case):
    m = tiny.model(2)
    start = m(prompt(13))
    out = m(np.zeros((2, 0), np.int32), cache=start.cache)
    assert out.logits.shape == (2, 0, 96)
    assert_same_state(out.cache, start.cache, 0)
    count_case()


@pytest.mark.parametrize("tensor", [1, 4])
def test_nan_in_unused_slots_never_leaks(tensor, count_case):
    m, ids = tiny.model(tensor, fusion="all/gather"), prompt(14)
    cache = m.new_cache(2, 40)
    poisoned = dataclasses.replace(
        cache,
        layers=tuple(
            jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), c) if isinstance(c, AttentionCache) else c
            for c in cache.layers
        ),
    )
    first = m(ids[:, :9], cache=poisoned)
    second = m(ids[:, 9:10], cache=first.cache)
    expected = m(ids[:, :10])
    tiny.close(first.logits, expected.logits[:, :9])
    tiny.close(second.logits, expected.logits[:, 9:])
    count_case()


@pytest.mark.parametrize("kernel", [2, 3, 6])
def test_other_convolution_widths(kernel, count_case):
    m, ids = tiny.model(2, conv_kernel=kernel, hybrid_override_pattern="MM"), prompt(15)
    expected, cache, logits = m(ids), None, []
    for a, b in ((0, 1), (1, 3), (3, 4), (4, T)):
        out = m(ids[:, a:b], cache=cache)
        cache = out.cache
        logits.append(out.logits)
    tiny.close(jnp.concatenate(logits, 1), expected.logits)
    count_case()


def test_cache_grows_and_reports_its_bytes(count_case):
    m, ids = tiny.model(2), prompt(16, length=80)
    out = m(ids[:, :60])
    assert out.cache.capacity == 64
    out = m(ids[:, 60:], cache=out.cache)
    assert out.cache.capacity == 128 and out.cache.longest == 80
    tiny.close(out.logits, m(ids).logits[:, 60:])
    real = {"kv": 0, "conv": 0, "ssm": 0}
    for layer in out.cache.layers:
        for name, x in vars(layer).items() if layer is not None else ():
            real["kv" if name in "kv" else name] += x.nbytes
    assert m.cache_shapes(2, 128).bytes_by_kind() == real
    count_case()


def test_fifty_layers_read_their_own_state(count_case):
    """Layer i reads layer i's state: give every layer a state of its own and change one."""
    m = tiny.model(hybrid_override_pattern="M" * 12)
    first = m(prompt(17))
    step = prompt(18, length=1)
    base = m(step, cache=first.cache, hidden_states=True).hidden_states.layers
    for i in (0, 5, 11):
        layers = list(first.cache.layers)
        layers[i] = dataclasses.replace(layers[i], ssm=layers[i].ssm + 1.0)
        found = m(
            step, cache=dataclasses.replace(first.cache, layers=tuple(layers)), hidden_states=True
        ).hidden_states.layers
        changed = [bool(np.any(found[j] != base[j])) for j in range(12)]
        assert changed == [j >= i for j in range(12)]
    count_case()


def test_residual_in_float32(count_case):
    ids = prompt(19)
    m = tiny.model(2, fusion="all/gather", residual_in_fp32=True, dtype="bfloat16")
    out = m(ids, hidden_states=True)
    assert out.hidden_states.layers.dtype == jnp.float32
    exact = tiny.model(dtype="float32")(ids).logits
    kept, rounded = (
        np.abs(np.asarray(o.logits) - exact).mean()
        for o in (out, tiny.model(2, fusion="all/gather", dtype="bfloat16")(ids))
    )
    assert kept < rounded
    count_case()


def test_bad_calls_say_what_is_wrong():
    m = tiny.model()
    for call, named in (
        (lambda: m(np.array([[96]])), "96"),
        (lambda: m(np.array([[-1]])), "-1"),
        (lambda: m(np.array([[0.5]])), "float64"),
        (lambda: m(np.array([1, 2])), r"\[batch, tokens\]"),
        (lambda: m(np.array([[1, 2]]), mask=np.ones((1, 3))), "mask"),
        (lambda: m(np.array([[1, 2]]), cache=m.new_cache(3, 8)), "3 rows"),
        (lambda: tiny.model(1, 2)(np.array([[1, 2]])), "data axis"),
        (lambda: NemotronH(tiny.config())(np.array([[1]])), "abstract"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_parameters_are_no_constants():
    text = tiny.model(2).forward_program(2, T, masked=False, capacity=64).lower(
        jnp.zeros((2, T), jnp.int32), None, tiny.model(2).cache_shapes(2, 64).tree
    ).as_text()  # fmt: skip
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line and "dense_resource" in line]
    assert not constants, constants[:3]
