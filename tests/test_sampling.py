"""The sampler: its noise, its filters, its penalties, against exact distributions computed in NumPy float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import special, stats

from nemotron_jax import make_mesh
from nemotron_jax.generation.noise import gumbel, threefry
from nemotron_jax.generation.sampling import (
    GENERATED,
    IN_CONTEXT,
    Controls,
    Sampling,
    choose,
    controls,
    log_softmax_at,
    mark,
    top_log_probabilities,
)
from nemotron_jax.sharding import TENSOR, Axis

VOCAB, COLUMNS = 21, 24  # three columns of padding at every degree


def run(local, tensor, in_specs, out_specs, *args):
    mesh = make_mesh(tensor)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))(*args)


def draw(logits, sampling, *, seeds, tensor=1, used=None, positions=None):
    """One token per row through ``choose`` on a mesh."""
    axis, traits = Axis(TENSOR, tensor), sampling.traits
    vocab = TENSOR if tensor > 1 else None
    wide = P(None, vocab)
    padded = np.full((len(logits), COLUMNS), -np.inf, np.float32)
    padded[:, :VOCAB] = logits
    used_columns = None
    if traits.penalised:
        used_columns = np.zeros((len(logits), COLUMNS), np.uint8)
        if used is not None:
            used_columns[:, :VOCAB] = used
    positions = np.zeros(len(logits), np.int32) if positions is None else positions
    given = controls(sampling, np.asarray(seeds, np.uint64), (), COLUMNS)

    def local(logits, used, positions, given):
        return choose(logits, used, positions, given, traits, axis)

    specs = (wide, wide if traits.penalised else None, P(), Controls.specs(None, vocab, traits))
    return np.asarray(run(local, tensor, specs, P(), padded, used_columns, positions, given))


def exact(logits, sampling):
    """The distribution that ``sampling`` describes, written another way: sorted lists and float64."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = list(np.argsort(-p, kind="stable"))
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass, nucleus, total = 0.0, [], p[order].sum()
    for i in order:
        if nucleus and mass / total >= sampling.top_p:
            break
        nucleus.append(i)
        mass += p[i]
    kept = [i for i in nucleus if p[i] >= sampling.min_p * p.max()]
    q = np.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


# ------------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the published known answers of Threefry-2x32, 20 rounds
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    found = threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(int(x) for x in found) == expected


def test_noise_is_standard_gumbel_and_independent_of_the_slice():
    seed = np.array([[0, 5], [3, 5]], np.uint32)
    position = np.array([7, 7], np.int32)
    whole = np.asarray(gumbel(seed, position, jnp.arange(40000)))
    part = np.asarray(gumbel(seed[1:], position[1:], jnp.arange(20000, 20010)))
    np.testing.assert_array_equal(part[0], whole[1, 20000:20010])
    assert np.isfinite(whole).all()
    assert not np.array_equal(whole[0], whole[1])
    for row in whole:
        assert stats.kstest(row, stats.gumbel_r.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(whole)[0, 1]) < 0.02
    other = np.asarray(gumbel(seed, position + 1, jnp.arange(40000)))
    assert abs(np.corrcoef(whole[0], other[0])[0, 1]) < 0.02


# --------------------------------------------------------------------------------------------------- distributions
FILTERS = [
    dict(),
    dict(temperature=0.6),
    dict(temperature=1.7),
    dict(top_k=1),
    dict(top_k=4),
    dict(top_p=0.7),
    dict(top_p=0.05),
    dict(min_p=0.2),
    dict(top_k=8, top_p=0.8),
    dict(temperature=1.4, top_k=12, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_distribution(options, count_case):
    sampling = Sampling(**{"temperature": 1.0, **options})
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    draws = 40000
    found = draw(np.tile(logits, (draws, 1)), sampling, seeds=np.arange(draws))
    counts = np.bincount(found, minlength=VOCAB)
    expected = exact(logits, sampling)
    assert not counts[expected == 0].any(), "a filtered token was drawn"
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-3
    count_case()


@pytest.mark.parametrize("options", [dict(), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.3)], ids=str)
def test_same_tokens_at_every_degree(options, count_case):
    sampling = Sampling(**{"temperature": 0.9, "presence_penalty": 0.3, "logit_bias": {2: 1.0}, **options})
    logits = np.random.default_rng(4).normal(0, 2, (64, VOCAB)).astype(np.float32)
    used = np.random.default_rng(5).integers(0, 4, (64, VOCAB)).astype(np.uint8)
    rest = dict(seeds=np.arange(64) * 7919, used=used, positions=np.arange(64, dtype=np.int32))
    expected = draw(logits, sampling, **rest)
    for tensor in (2, 4, 8):
        np.testing.assert_array_equal(draw(logits, sampling, tensor=tensor, **rest), expected)
        count_case()
    assert len(set(expected.tolist())) > 5
    shuffled = np.random.default_rng(6).permutation(64)
    rest = {name: value[shuffled] for name, value in rest.items()}
    np.testing.assert_array_equal(draw(logits[shuffled], sampling, **rest), expected[shuffled])


def test_padding_columns_are_never_drawn():
    flat = np.full((4000, VOCAB), -50.0, np.float32)  # equal probabilities, far below what a zero would have
    found = draw(flat, Sampling(temperature=50.0), seeds=np.arange(4000), tensor=8)
    assert set(found.tolist()) == set(range(VOCAB))


def test_equal_logits_at_the_border_stay_together():
    logits = np.array([[3.0, 2.0, 2.0, 2.0, *[0.0] * (VOCAB - 4)]] * 2000, np.float32)
    assert set(draw(logits, Sampling(temperature=1.0, top_k=2), seeds=np.arange(2000)).tolist()) == {0, 1, 2, 3}


# ------------------------------------------------------------------------------------------- greedy, bias, penalties
@pytest.mark.parametrize("tensor", [1, 4])
def test_greedy_with_bias_and_penalties(tensor, count_case):
    logits = np.random.default_rng(8).normal(0, 2, (50, VOCAB)).astype(np.float32)
    used = np.random.default_rng(9).integers(0, 4, (50, VOCAB)).astype(np.uint8)
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.7, logit_bias={0: 2.5, 5: -math.inf, 20: -1.0})
    expected = logits.astype(np.float64)
    expected[:, 0] += 2.5
    expected[:, 5] = -np.inf
    expected[:, 20] -= 1.0
    seen = (used & IN_CONTEXT) != 0
    expected[seen] = np.where(expected[seen] > 0, expected[seen] / 1.3, expected[seen] * 1.3)
    expected[(used & GENERATED) != 0] -= 0.7
    found = draw(logits, sampling, seeds=np.zeros(50), used=used, tensor=tensor)
    np.testing.assert_array_equal(found, expected.argmax(-1))
    plain = draw(logits, Sampling(), seeds=np.zeros(50), tensor=tensor)
    np.testing.assert_array_equal(plain, logits.argmax(-1))
    assert (plain != found).any()
    count_case()


def test_mark():
    used = np.zeros((3, COLUMNS), np.uint8)
    used[0, 4] = IN_CONTEXT
    token, alive = np.array([4, 23, 7], np.int32), np.array([True, True, False])
    axis = Axis(TENSOR, 4)
    wide = P(None, TENSOR)
    found = np.asarray(run(lambda u, t, a: mark(u, t, a, axis), 4, (wide, P(), P()), wide, used, token, alive))
    expected = np.zeros_like(used)
    expected[0, 4] = expected[1, 23] = IN_CONTEXT | GENERATED
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_log_probabilities(tensor, count_case):
    logits = np.random.default_rng(10).normal(0, 30, (6, COLUMNS)).astype(np.float32)
    logits[:, VOCAB:] = -np.inf
    token = np.array([0, 3, 20, 11, 7, 7], np.int32)
    axis, wide = Axis(TENSOR, tensor), P(None, TENSOR if tensor > 1 else None)

    def local(logits, token):
        chosen, norm = log_softmax_at(logits, token, axis)
        return chosen, *top_log_probabilities(logits, norm, 5, axis)

    chosen, ids, values = (np.asarray(a) for a in run(local, tensor, (wide, P()), (P(), P(), P()), logits, token))
    all_of_them = special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(chosen, all_of_them[np.arange(6), token], rtol=1e-5, atol=1e-5)
    order = np.argsort(-all_of_them, axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(all_of_them, order, -1), rtol=1e-5, atol=1e-5)
    count_case()


# ------------------------------------------------------------------------------------------------------- bad values
def test_every_fault_is_said_at_once():
    bad = Sampling(
        temperature=-1, top_k=-2, top_p=0, min_p=2, repetition_penalty=0, presence_penalty=math.nan,
        logit_bias={99: 1.0, 3: math.inf},
    )  # fmt: skip
    text = "; ".join(bad.faults(VOCAB))
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "99", "token 3"):
        assert name in text
    assert Sampling().faults(VOCAB) == []
    assert "bans every token" in Sampling(logit_bias=dict.fromkeys(range(VOCAB), -math.inf)).faults(VOCAB)[0]
    assert "greedy" in Sampling(top_p=0.5).faults(VOCAB)[0]
