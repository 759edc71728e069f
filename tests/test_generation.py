"""Generation: greedy against stored references, batches, seeds, stopping, streams, errors."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from nemotron_jax.generation import Generator, memory
from nemotron_jax.generation import generator as generator_module
from nemotron_jax.generation.decoding import Decoding, pieces
from nemotron_jax.generation.programs import write_program
from nemotron_jax.generation.sampling import Sampling, controls
from nemotron_jax.generation.stopping import eos_of
from tests import tiny
from tests.generation_cases import one_by_one, reference_prompts, tokenizer, trained

LENGTHS = (5, 1, 21, 12)


def prompts(seed=0, lengths=LENGTHS, vocab=96):
    return [tiny.tokens(seed + i, n, vocab=vocab).tolist() for i, n in enumerate(lengths)]


def tokens_of(generation):
    return [c.tokens for c in generation]


def expected_greedy(count=16, **overrides):
    model = tiny.model(**overrides)
    return [tuple(one_by_one(model, p, count)) for p in prompts()]


@pytest.fixture(scope="module")
def greedy():
    return expected_greedy()


# ---------------------------------------------------------------------------------------------------------- greedy
REFERENCE_GRID = [(1, 1, "none"), (4, 2, "all/gather")]
FULL_GRID = [
    (2, 1, "none"),
    (4, 1, "layers:.gp.gp.gp.g"),
    (8, 1, "none"),
    (8, 1, "all/psum"),
    (1, 2, "none"),
    (2, 4, "all"),
]


@pytest.mark.parametrize(
    ("tensor", "data", "fusion"), [*REFERENCE_GRID, *(pytest.param(*c, marks=pytest.mark.full) for c in FULL_GRID)]
)
def test_greedy_equals_pytorch(tensor, data, fusion, count_case):
    rows, expected = reference_prompts()
    generation = Generator(trained(tensor, data, fusion), max_new_tokens=32, eos=None).generate(rows)
    np.testing.assert_array_equal([c.tokens for c in generation], expected)
    assert {c.finish_reason for c in generation} == {"length"}
    count_case(len(rows))


@pytest.mark.parametrize(
    ("tensor", "data", "fusion"), [(2, 1, "all/psum"), (4, 2, "layers:g.p"), (8, 1, "all/gather"), (1, 4, "none")]
)
def test_greedy_on_every_mesh(tensor, data, fusion, greedy, count_case):
    model = tiny.model(tensor, data, fusion=fusion)
    generator = Generator(model, max_new_tokens=16, eos=None)
    assert tokens_of(generator.generate(prompts())) == greedy
    if data > 1:  # fewer rows than the data axis divides
        assert tokens_of(generator.generate(prompts()[:3])) == greedy[:3]
    count_case()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 8, 9])
def test_greedy_in_pieces(piece, greedy, count_case):
    generator = Generator(tiny.model(), max_new_tokens=16, eos=None, prefill_chunk=piece)
    assert tokens_of(generator.generate(prompts())) == greedy
    count_case()


@pytest.mark.parametrize("steps", [1, 5, 64])
def test_greedy_in_chunks(steps, greedy, count_case):
    generator = Generator(tiny.model(), max_new_tokens=16, eos=None, steps_per_call=steps)
    assert tokens_of(generator.generate(prompts())) == greedy
    count_case()


def test_pieces_cut_a_row_in_the_same_places_in_any_batch():
    def cuts(lengths, row, most):
        return [span for spans in pieces(lengths, most) if (span := spans[row])[1] > span[0]]

    for most in (1, 3, 8):
        for n in range(1, 20):
            alone = cuts([n], 0, most)
            assert cuts([17, n, 1], 1, most) == alone
            assert [t for start, stop in alone for t in range(start, stop)] == list(range(n))
            assert alone[-1][1] - alone[-1][0] == min(n, most)


def test_cache_grows_with_the_answer(greedy):
    """16 prompt tokens and 60 new ones pass 64 slots; a model without attention has no slots at all."""
    for pattern in ("M*-", "M-"):
        model = tiny.model(hybrid_override_pattern=pattern)
        row = prompts(lengths=(16,))[0]
        found = Generator(model, max_new_tokens=60, eos=None).generate(row)[0].tokens
        assert list(found) == one_by_one(model, row, 60)


def test_bfloat16_runs_and_reports_probabilities():
    model = tiny.model(4, fusion="all/gather", dtype="bfloat16")
    found = Generator(model, max_new_tokens=8, eos=None, temperature=0.8, logprobs=1).generate(prompts(), seed=3)
    for c in found:
        assert len(c.tokens) == 8 and all(np.isfinite(t.logprob) and t.logprob <= t.top[0][1] for t in c.logprobs)


# ------------------------------------------------------------------------------------------------------------ seeds
SAMPLED = dict(max_new_tokens=16, eos=None, temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.1)


def test_same_seed_same_tokens_at_every_degree_and_place(count_case):
    row = prompts()[0]
    alone = Generator(tiny.model(), **SAMPLED).generate(row, seed=11)[0].tokens
    others = prompts(50, (9, 2, 30, 4, 17, 1, 8))
    batch = [*others[:3], row, *others[3:]]
    seeds = [1, 2, 3, 11, 5, 6, 7, 8]
    for tensor, data, fusion in [(1, 1, "none"), (2, 1, "all/gather"), (4, 2, "none"), (8, 1, "all/psum")]:
        found = Generator(tiny.model(tensor, data, fusion=fusion), **SAMPLED).generate(batch, seed=seeds)
        assert found[3].tokens == alone
        assert found[3].seed == 11
        assert len({c.tokens for c in found}) == len(batch)
        count_case()


def test_one_seed_is_a_different_one_for_each_row():
    generator = Generator(tiny.model(), **SAMPLED)
    row = prompts()[0]
    found = generator.generate([row] * 8, seed=20)
    assert len(set(tokens_of(found))) == 8
    assert [c.seed for c in found] == list(range(20, 28))
    np.testing.assert_array_equal(tokens_of(generator.generate([row] * 8, seed=[27] * 8))[0], found[7].tokens)
    assert generator.generate(row, seed=-1)[0].tokens == generator.generate(row, seed=2**64 - 1)[0].tokens


def test_penalties_and_bias_reach_the_model():
    row = prompts()[3]
    plain = Generator(tiny.model(), max_new_tokens=16, eos=None).generate(row)[0].tokens
    banned = Generator(tiny.model(), max_new_tokens=16, eos=None, logit_bias={t: -np.inf for t in set(plain)})
    assert not set(banned.generate(row)[0].tokens) & set(plain)
    fresh = Generator(tiny.model(), max_new_tokens=16, eos=None, presence_penalty=1e6).generate(row)[0].tokens
    assert len(set(fresh)) == 16
    fresh = Generator(tiny.model(), max_new_tokens=16, eos=None, repetition_penalty=1e6).generate(row)[0].tokens
    seen = set(row)
    logits = None
    for token in fresh:  # a positive logit of a token already there is worth nothing
        assert token not in seen or logits is None
        seen.add(token)


def test_logprobs_are_those_of_the_model(count_case):
    generator = Generator(tiny.model(), max_new_tokens=6, eos=None, temperature=1.5, top_k=5, logprobs=3)
    row = prompts()[2]
    completion = generator.generate(row, seed=5)[0]
    logits = np.asarray(tiny.model()(np.array([[*row, *completion.tokens]])).logits)[0, len(row) - 1 : -1].astype(float)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, entry in enumerate(completion.logprobs):
        assert entry.token == completion.tokens[i]
        np.testing.assert_allclose(entry.logprob, expected[i, entry.token], atol=1e-4)
        best = np.argsort(-expected[i])[:3]
        assert [t for t, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([v for _, v in entry.top], expected[i, best], atol=1e-4)
    count_case()


# ---------------------------------------------------------------------------------------------------------- stopping
@pytest.mark.parametrize("form", ["int", "list", "tuple of one"])
def test_end_tokens(form, greedy, count_case):
    first, second = greedy[0][3], greedy[2][5]
    eos = {"int": first, "list": [first, second], "tuple of one": (second,)}[form]
    ends = {"int": {first}, "list": {first, second}, "tuple of one": {second}}[form]
    found = Generator(tiny.model(), max_new_tokens=16, eos=eos, steps_per_call=4).generate(prompts())
    for c, whole in zip(found, greedy, strict=True):
        n = next((i + 1 for i, t in enumerate(whole) if t in ends), None)
        assert c.tokens == whole[:n]
        assert c.finish_reason == ("length" if n is None else "eos")
    assert {c.finish_reason for c in found} >= {"eos"}
    count_case()


def test_end_tokens_of_the_checkpoint(tmp_path):
    config = tiny.config(eos_token_id=[3, 4])
    file = tmp_path / "generation_config.json"
    assert eos_of(config, tmp_path) == (3, 4)
    for said, expected in ((7, (7,)), ([7, 8], (7, 8)), (None, (3, 4)), ([], ())):
        file.write_text(json.dumps({"eos_token_id": said}))
        assert eos_of(config, tmp_path) == expected
    assert eos_of(tiny.config(eos_token_id=None), None) == ()
    for bad in (96, -1, "2", [1.5], True):
        file.write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(ValueError, match="eos_token_id"):
            eos_of(config, tmp_path)


def test_stop_strings_across_token_borders(count_case):
    model = trained(1)
    rows = ["And the woman said unto the serpent,", "In the beginning"]
    plain = Generator(model, max_new_tokens=32, eos=None).generate(rows)
    text = plain[0].text
    borders = np.cumsum([len(tokenizer().decode([t])) for t in plain[0].tokens])
    at = int(borders[6])
    stop = text[at - 2 : at + 2]  # begins in one token and ends in the next
    assert stop not in plain[1].text
    for stops in (stop, ["never there", stop], (stop[:1] + "zzz", stop)):
        found = Generator(model, max_new_tokens=32, eos=None, stop=stops).generate(rows)
        assert found[0].text == text[: text.index(stop)]
        assert found[0].finish_reason == "stop"
        assert (
            tokenizer()
            .decode(found[0].tokens)
            .endswith(tokenizer().decode(plain[0].tokens[len(found[0].tokens) - 1 :][:1]))
        )
        assert found[1].text == plain[1].text and found[1].finish_reason == "length"
        count_case()


def test_streams_join_to_the_text(count_case):
    """A random model writes bytes that are no UTF-8; a stream holds back what is not yet a character."""
    model = tiny.model(vocab_size=1024)
    generator = Generator(model, tokenizer=tokenizer(), max_new_tokens=48, eos=None, temperature=1.5, steps_per_call=5)
    rows = prompts(3, (4, 9, 1), vocab=1024)
    whole = generator.generate(rows, seed=2)
    texts, tokens, last = [""] * 3, [()] * 3, [None] * 3
    for piece in generator.stream(rows, seed=2):
        assert last[piece.row] is None
        texts[piece.row] += piece.text
        tokens[piece.row] += piece.tokens
        last[piece.row] = piece.completion
    assert texts == [c.text for c in whole] == [tokenizer().decode(c.tokens) for c in whole]
    assert tokens == tokens_of(whole)
    assert last == list(whole)
    assert any("\ufffd" in t for t in texts)
    count_case()


# ------------------------------------------------------------------------------------------------------------- errors
def test_answers_to_bad_settings():
    with pytest.raises(ValueError) as error:
        Generator(
            tiny.model(), max_new_tokens=-1, top_p=0.5, steps_per_call=0, prefill_chunk=0, logprobs=-1, stop=["x"],
            eos=96, max_positions=0,
        )  # fmt: skip
    for name in "max_new_tokens top_p steps_per_call prefill_chunk logprobs stop eos max_positions".split():
        assert name in str(error.value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Generator(tiny.model()).temperature = 1.0
    with pytest.raises(TypeError):
        Generator(tiny.model(), 5)


def test_answers_to_bad_prompts():
    model = tiny.model(max_position_embeddings=32)
    generator = Generator(model, max_new_tokens=4, eos=None)
    for bad, said in [
        ([], "prompts: found an empty list"),
        ([[]], "prompt 0: found no tokens"),
        ([[1], [96], [2.5]], "prompt 1: found token 96.*prompt 2: found 2.5"),
        ("text", "no tokenizer"),
        ([[{"role": "user", "content": "x"}]], "no tokenizer"),
        (None, "prompts: found none"),
        ([[1] * 33, [1]], "prompt 0: found 33 tokens, accepted 32"),
        (3.5, "prompts"),
    ]:
        with pytest.raises(ValueError, match=said):
            generator.generate(bad)
    for seed in ([1, 2], "x", [0.5]):
        with pytest.raises(ValueError, match="seed"):
            generator.generate([[1]], seed=seed)
    assert len(generator.generate([1] * 30)[0].tokens) == 2  # the last position comes before max_new_tokens
    assert generator.generate([1] * 32)[0].tokens == ()
    longer = Generator(model, max_new_tokens=4, eos=None, max_positions=64)
    assert len(longer.generate([1] * 40)[0].tokens) == 4


def test_zero_new_tokens_and_empty_text():
    generator = Generator(trained(1), max_new_tokens=0)
    c = generator.generate("In the")[0]
    assert (c.tokens, c.text, c.finish_reason) == ((), "", "length")
    assert Generator(trained(1), max_new_tokens=2).generate("")[0].prompt_tokens == (1,)  # starts from <s>
    assert generator.generate("\x00\udcff".encode("utf-8", "surrogateescape").decode("utf-8", "replace"))[0].text == ""


def test_a_batch_that_cannot_fit(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 40_000)
    generator = Generator(tiny.model(), max_new_tokens=4, eos=None)
    monkeypatch.setattr(generator_module, "empty", lambda *args: pytest.fail("memory was allocated"))
    with pytest.raises(ValueError, match=r"found 64 rows.*about \d+ rows at once"):
        generator.generate([[1]] * 64)


def test_an_exception_leaves_the_generator_usable(greedy, monkeypatch, count_case):
    generator = Generator(tiny.model(), max_new_tokens=16, eos=None, steps_per_call=4)
    chunk, calls = Decoding.chunk, []

    def fails(self):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("in the middle")
        return chunk(self)

    monkeypatch.setattr(Decoding, "chunk", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        generator.generate(prompts(9))
    monkeypatch.undo()
    stream = generator.stream(prompts(9))
    next(stream)
    stream.close()
    assert tokens_of(generator.generate(prompts())) == greedy
    count_case()


# ------------------------------------------------------------------------------------------------------ long and lean
class Compilations:
    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def _heard(self, event, duration, **kwargs):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        from jax._src import monitoring

        monitoring.unregister_event_duration_listener(self._heard)


@pytest.mark.parametrize(("tensor", "fusion"), [(1, "none"), (2, "all/gather")])
def test_2000_steps_keep_memory_and_programs(tensor, fusion, count_case):
    model = tiny.model(tensor, fusion=fusion)
    settings = dict(max_new_tokens=400, eos=None, temperature=0.9, top_p=0.8)
    generator = Generator(model, **settings)
    row = prompts()[1]
    generator.generate(row)  # warm
    before = sum(a.nbytes for a in jax.live_arrays())
    with Compilations() as compilations:
        for i in range(5):
            changed = dataclasses.replace(generator, temperature=1.0 + i / 10, top_p=0.7 + i / 20, eos=None)
            assert len(changed.generate(row, seed=i)[0].tokens) == 400
    assert compilations.count == 0
    assert sum(a.nbytes for a in jax.live_arrays()) <= before
    with Compilations() as compilations:  # the counter counts
        Generator(model, **{**settings, "steps_per_call": 3, "max_new_tokens": 3}).generate(row)
    assert compilations.count > 0
    count_case()


def test_a_step_takes_one_reduction_per_block_and_one_gather_for_the_token():
    model = tiny.model(4, fusion="none")
    program = write_program(model, 2, 64, 8)
    shapes = model.cache_shapes(2, 64).tree
    given = (
        shapes,
        jax.ShapeDtypeStruct((2, 96), np.float32),
        None,
        np.ones(2, np.int32),
        controls(Sampling(), np.zeros(2, np.uint64), (), 96),
    )
    text = program.lower(*given).as_text()
    assert text.count("stablehlo.all_reduce") == 1 + len(model.config.hybrid_override_pattern)  # embedding and blocks
    assert text.count("stablehlo.all_gather") == 1
    assert "all_to_all" not in text
