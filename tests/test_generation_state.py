"""The state as an object: prefixes, forks, joins, snapshots, other meshes; conversations that only append."""

import numpy as np
import pytest

from nemotron_jax.generation import Conversation, Generator, State
from nemotron_jax.generation import generator as generator_module
from nemotron_jax.generation.moving import canonical
from tests import tiny
from tests.generation_cases import one_by_one, tokenizer

SETTINGS = dict(max_new_tokens=8, eos=None)


def prompt(seed=0, length=11, vocab=96):
    return tiny.tokens(seed, length, vocab=vocab).tolist()


def tokens_of(generation):
    return [c.tokens for c in generation]


def generator(**changes):
    return Generator(tiny.model(), **{**SETTINGS, **changes})


def test_a_prefix_is_read_once_and_continued(count_case):
    prefix, tails = prompt(1, 13), [prompt(2, 3), prompt(3, 1), prompt(4, 9)]
    state = generator().read(prefix)
    assert state.lengths == (13,) and state.tokens == (tuple(prefix),)
    found = generator().generate(tails, state=state.fork(3))
    assert [list(c.tokens) for c in found] == [one_by_one(tiny.model(), prefix + t, 8) for t in tails]
    again = generator().generate(tails, state=state.fork(3))  # the state is a value
    assert tokens_of(again) == tokens_of(found)
    count_case()


def test_going_on_equals_not_having_stopped(count_case):
    rows = [prompt(5, 4), prompt(6, 10)]
    sampled = dict(temperature=1.0, top_k=20)
    whole = generator(max_new_tokens=16, **sampled).generate(rows, seed=9)
    first = generator(**sampled).generate(rows, seed=9, keep_state=True)
    second = generator(**sampled).generate(None, seed=9, state=first.state, keep_state=True)
    assert [a.tokens + b.tokens for a, b in zip(first, second, strict=True)] == tokens_of(whole)
    assert second.state.tokens == tuple(tuple(r) + c.tokens for r, c in zip(rows, whole, strict=True))
    count_case()


def test_end_tokens_are_part_of_the_state():
    row = prompt(7, 6)
    plain = generator().generate(row)[0].tokens
    ended = generator(eos=plain[3]).generate([row, prompt(8, 2)], keep_state=True)
    assert ended.state.tokens[0] == (*row, *plain[:4])
    assert list(generator().generate([[], []], state=ended.state)[0].tokens) == one_by_one(
        tiny.model(), [*row, *plain[:4]], 8
    )


def test_select_and_join(count_case):
    a = generator().read([prompt(1, 5), prompt(2, 70)])
    b = generator().read(prompt(3, 8))
    joined = State.join([a, b]).select([2, 0, 1, 2])
    expected = [prompt(3, 8), prompt(1, 5), prompt(2, 70), prompt(3, 8)]
    assert joined.tokens == tuple(map(tuple, expected))
    found = generator().generate(None, state=joined)
    assert [list(c.tokens) for c in found] == [one_by_one(tiny.model(), p, 8) for p in expected]
    for bad in ([3], [-1], []):
        with pytest.raises(ValueError, match="rows"):
            a.select(bad)
    with pytest.raises(ValueError, match="different models"):
        State.join([a, Generator(tiny.model(seed=1), **SETTINGS).read([1])])
    count_case()


def test_truncation_needs_a_snapshot(count_case):
    row = prompt(4, 9)
    state = generator().read(row)
    with pytest.raises(ValueError, match="cannot be shortened"):
        state.truncate(5)
    marked = state.snapshot()
    there = generator().generate(None, state=marked, keep_state=True)
    later = generator().generate([prompt(6, 3)], state=there.state, keep_state=True).state
    for wrong in (8, 10, later.lengths[0] - 1):
        with pytest.raises(ValueError, match=r"accepted those of a snapshot \(\[\(9,\)\]\)"):
            later.truncate(wrong)
    back = later.truncate(9)
    assert back.tokens == (tuple(row),)
    assert tokens_of(generator().generate(None, state=back)) == tokens_of(there)
    assert later.truncate(later.lengths) is later
    count_case()


@pytest.mark.parametrize(
    "shape",
    [dict(), dict(n_groups=2, num_key_value_heads=1, hybrid_override_pattern="M*", vocab_size=93)],
    ids=["cut", "repeated"],
)
def test_moving_between_meshes(shape, count_case):
    """Groups and KV heads that repeat at one degree and are cut at another, conv sections, padded columns."""
    here = tiny.model(**shape)
    rows = [prompt(1, 7, 93), prompt(2, 12, 93), prompt(3, 1, 93)]
    state = Generator(here, **SETTINGS).read(rows)
    expected = tokens_of(Generator(here, **SETTINGS).generate(None, state=state))
    start = canonical(here, state.cache, state.logits, 3)
    for tensor, data in ((8, 1), (4, 2), (2, 1), (1, 1)):
        model = tiny.model(tensor, data, fusion="all/gather", **shape)
        state = state.to(model)
        found = canonical(model, state.cache, state.logits, 3)
        for layer, same in zip(found["layers"], start["layers"], strict=True):
            for a, b in zip(layer or (), same or (), strict=True):
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(found["logits"], start["logits"])
        assert tokens_of(Generator(model, **SETTINGS).generate(None, state=state)) == expected
        count_case()
    with pytest.raises(ValueError, match="another config"):
        state.to(tiny.model(hybrid_override_pattern="M-"))
    with pytest.raises(ValueError, match="another model or mesh"):
        Generator(tiny.model(2), **SETTINGS).generate(None, state=state)


def test_a_stop_string_takes_the_state_back(count_case):
    """The host finds a stop string after the device has gone past it; the state must not have."""
    model = tiny.model(vocab_size=1024)
    base = dict(tokenizer=tokenizer(), eos=None, max_new_tokens=24)
    rows = [prompt(1, 5, 1024), prompt(2, 9, 1024)]
    plain = Generator(model, **base).generate(rows)
    n = 9
    stop = tokenizer().decode(plain[0].tokens[: n + 1])[-3:]
    found = Generator(model, **base, stop=stop).generate(rows, keep_state=True)
    taken = found[0].tokens
    assert found[0].finish_reason == "stop" and taken == plain[0].tokens[: len(taken)] and len(taken) < 24
    assert found[1].tokens == plain[1].tokens  # the other row noticed nothing
    assert found.state.tokens == tuple(tuple(r) + c.tokens for r, c in zip(rows, found, strict=True))
    onward = Generator(model, **base).generate(None, state=found.state)
    assert onward[0].tokens[: 24 - len(taken)] == plain[0].tokens[len(taken) :]
    count_case()


TEMPLATE = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}[{{ m.role }}]{{ m.content }}</s>"
    "{% else %}[{{ m.role }}]{{ m.content | trim }}</s>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class WithTemplate:
    """The shipped tokenizer with a chat template."""

    def __init__(self, template):
        self._inner, self.chat_template = tokenizer(), template

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def render(self, messages, **options):
        inner, before = self._inner, self._inner.chat_template
        inner.chat_template = self.chat_template
        try:
            return inner.render(messages, **options)
        finally:
            inner.chat_template = before


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "plain"])
def test_a_conversation_only_appends(template, monkeypatch, count_case):
    model = tiny.model(vocab_size=1024)
    chat = Generator(model, tokenizer=WithTemplate(template), eos=2, max_new_tokens=6)
    read, amounts = generator_module.read, []

    def counted(model, cache, logits, rows, most, draft):
        amounts.append(sum(map(len, rows)))
        return read(model, cache, logits, rows, most, draft)

    monkeypatch.setattr(generator_module, "read", counted)
    conversation = Conversation(chat, system="Be brief." if template else None)
    answers = []
    for turn in range(4):
        *_, last = conversation.say("What is it?", seed=turn)
        answers.append(last.completion)
    encode = tokenizer().encode
    assert len(set(amounts[1:])) == 1  # a later turn reads its own words, not the history
    if template:
        expected = encode("[system]Be brief.</s>\n[user]What is it?</s>\n[assistant]")
        assert amounts[0] == len(expected)
        for answer in answers[:-1]:
            between = encode("</s>\n[user]What is it?</s>\n[assistant]")
            expected += [*answer.tokens, *(between[1:] if answer.finish_reason == "eos" else between)]
        expected += answers[-1].tokens
    else:
        expected = [t for answer in answers for t in (*encode("What is it?"), *answer.tokens)]
    assert conversation.state.tokens == (tuple(expected),)
    count_case()


def test_the_end_token_of_an_answer_is_not_read_twice():
    model = tiny.model(vocab_size=1024)
    settings = dict(tokenizer=WithTemplate(TEMPLATE), max_new_tokens=6)
    chat = Generator(model, eos=2, logit_bias={2: 1e4}, **settings)
    conversation = Conversation(chat)
    for turn in range(2):
        *_, last = conversation.say("Go on", seed=turn)
        assert last.completion.tokens == (2,)
    question = tokenizer().encode("[user]Go on</s>\n[assistant]")
    newline = tokenizer().encode("\n[user]Go on</s>\n[assistant]")
    assert conversation.state.tokens[0] == (*question, 2, *newline, 2)


def test_conversations_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="no tokenizer"):
        Conversation(Generator(tiny.model(), **SETTINGS))
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(Generator(tiny.model(vocab_size=1024), tokenizer=tokenizer()), system="x")
