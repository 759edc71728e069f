"""Speculative writing gives the tokens of plain writing, whatever the head guesses."""

import json

import numpy as np
import pytest

import nemotron_jax
from nemotron_jax import NemotronH, NemotronHConfig, make_mesh
from nemotron_jax.generation import Generator
from nemotron_jax.random_weights import random_reader
from nemotron_jax.weights.huggingface import Checkpoint
from tests import tiny
from tests.conftest import TINY
from tests.generation_cases import DATA, tokenizer

SHAPE = dict(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-")
LIVELY = dict(temperature=6.0)  # nearly all noise, which model and head share: most guesses stand, and not all


def model(tensor=1, data=1, fusion="none", **changes):
    shape = {**SHAPE, "hybrid_override_pattern": "M*-", **changes}
    key = (tensor, data, fusion, tuple(sorted(shape.items())))
    if key not in _MODELS:
        _MODELS[key] = NemotronH(tiny.config(**shape), mesh=make_mesh(tensor, data), fusion=fusion, mtp=True, rngs=0)
    return _MODELS[key]


_MODELS: dict = {}


def prompts(vocab=96, lengths=(5, 1, 21)):
    return [tiny.tokens(i, n, vocab=vocab).tolist() for i, n in enumerate(lengths)]


def tokens_of(generation):
    return [c.tokens for c in generation]


def both(m, guesses, rows=None, **settings):
    """(plain, speculative) generations with the same settings."""
    settings = {"max_new_tokens": 24, "eos": None, "steps_per_call": 8, **settings}
    rows = prompts() if rows is None else rows
    plain = Generator(m, **settings).generate(rows, seed=5)
    return plain, Generator(m, **settings, speculative_tokens=guesses).generate(rows, seed=5)


CASES = [
    # tensor, data, plan, guesses, sampling, shape
    (1, 1, "none", 1, dict(), {}),
    (1, 1, "none", 3, LIVELY, {}),
    (4, 1, "all/gather", 2, LIVELY, {}),
    (2, 2, "none", 2, dict(temperature=1.0, top_p=0.9), {}),
    (1, 1, "none", 2, dict(**LIVELY, repetition_penalty=1.5, presence_penalty=3.0), {}),
    (1, 1, "none", 2, LIVELY, dict(mtp_hybrid_override_pattern="M*")),  # a head with a recurrent state
    (2, 1, "all/psum", 2, LIVELY, dict(hybrid_override_pattern="M-")),  # a model without slots, a head with some
]


@pytest.mark.parametrize(("tensor", "data", "fusion", "guesses", "sampling", "shape"), CASES)
def test_same_tokens_as_plain_writing(tensor, data, fusion, guesses, sampling, shape, count_case):
    plain, quick = both(model(tensor, data, fusion, **shape), guesses, **sampling)
    assert tokens_of(quick) == tokens_of(plain)
    assert quick.proposed > 0 and 0 <= quick.accepted <= quick.proposed
    if sampling.get("temperature") == 6.0 and "presence_penalty" not in sampling:
        assert 0.3 * quick.proposed < quick.accepted < quick.proposed  # some of each were tried
    count_case()


def test_a_round_may_keep_every_guess():
    plain, quick = both(model(), 3, logit_bias={7: 1e6})
    assert tokens_of(quick) == tokens_of(plain) == [(7,) * 24] * 3
    assert quick.proposed == quick.accepted == 3 * 6 * 3  # 24 tokens are 6 rounds of 4 in each of 3 rows


def test_end_tokens_limits_and_logprobs(count_case):
    plain, _ = both(model(), 2, **LIVELY)
    ends = [plain[0].tokens[4], plain[2].tokens[11]]
    for settings in (dict(eos=ends), dict(max_new_tokens=5), dict(eos=ends[1], logprobs=2, max_new_tokens=17)):
        plain, quick = both(model(), 2, **LIVELY, **settings)
        assert tokens_of(quick) == tokens_of(plain)
        assert [c.finish_reason for c in quick] == [c.finish_reason for c in plain]
        if "logprobs" in settings:
            for a, b in zip(plain, quick, strict=True):
                np.testing.assert_allclose([t.logprob for t in b.logprobs], [t.logprob for t in a.logprobs], atol=1e-4)
                assert [t.token for t in b.logprobs] == list(b.tokens)
                assert [[i for i, _ in t.top] for t in b.logprobs] == [[i for i, _ in t.top] for t in a.logprobs]
        count_case()


def test_states_come_out_right(count_case):
    """Behind a speculative answer, and into one, also where a stop string cut it."""
    m = model(vocab_size=1024)
    settings = dict(tokenizer=tokenizer(), eos=None, max_new_tokens=12, **LIVELY)
    plain, quick = Generator(m, **settings), Generator(m, **settings, speculative_tokens=2)
    rows = prompts(1024)
    whole = Generator(m, **{**settings, "max_new_tokens": 24}).generate(rows, seed=3)
    first = quick.generate(rows, seed=3, keep_state=True)
    for second in (plain, quick):
        onward = second.generate(None, seed=3, state=first.state)
        assert [a.tokens + b.tokens for a, b in zip(first, onward, strict=True)] == tokens_of(whole)
        count_case()
    stop = tokenizer().decode(whole[0].tokens[:8])[-2:]
    cut = Generator(m, **settings, speculative_tokens=2, stop=stop).generate(rows, seed=3, keep_state=True)
    n = len(cut[0].tokens)
    assert cut[0].finish_reason == "stop" and n <= 8
    onward = plain.generate(None, seed=3, state=cut.state)
    assert onward[0].tokens == whole[0].tokens[n : n + 12]
    count_case()


def test_refused_without_a_head():
    with pytest.raises(ValueError, match="speculative_tokens.*mtp=True"):
        Generator(tiny.model(), speculative_tokens=2)


@pytest.mark.full
def test_stored_reference(count_case):
    """A checkpoint with a head: greedy tokens of PyTorch."""
    m = nemotron_jax.load(TINY / "moe_latent_mtp" / "hf", dtype="float32", mtp=True, progress=False)
    with np.load(TINY / "moe_latent_mtp" / "ref.npz") as r:
        ids, expected = r["ids"], r["fixed/greedy"]
    found = Generator(m, eos=None, max_new_tokens=expected.shape[1], speculative_tokens=2).generate(ids)
    np.testing.assert_array_equal(tokens_of(found), expected)
    count_case()


@pytest.mark.full
@pytest.mark.parametrize("sampling", [dict(), LIVELY], ids=["greedy", "lively"])
def test_a_thousand_tokens_of_the_trained_model(sampling, count_case):
    """The trained mixture-of-experts model with a random head."""
    source = DATA / "models" / "tiny-nemotron-3"
    raw = json.loads((source / "config.json").read_text())
    config = NemotronHConfig.from_dict({**raw, "num_nextn_predict_layers": 1})
    stored, random = Checkpoint(source), random_reader(0)

    def reader(tensor, *place):
        return (random if tensor.startswith("mtp.") else stored)(tensor, *place)

    m = NemotronH(config, dtype="float32", mtp=True, reader=reader)
    plain, quick = both(m, 2, [[1, 41, 280]], max_new_tokens=1000, steps_per_call=32, **sampling)
    assert tokens_of(quick) == tokens_of(plain)
    print(f"acceptance {quick.accepted / quick.proposed:.3f}")
    count_case()
