"""Tokenizer, chat template, streams of text, stop strings."""

import json

import pytest

from nemotron_jax.generation.stopping import RowText
from nemotron_jax.generation.text import TextStream, Tokenizer
from nemotron_jax.weights.loading import default_model
from tests.generation_cases import tokenizer

TEXTS = [
    "In the beginning",
    "naïve café",
    "漢字かな",
    "😀👩‍👩‍👧 mixed ünï",
    "tab\tnew\nline  spaces ",
    "\x00\x7f",
    "\ufffd kept",
]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters(text):
    ids = tokenizer().encode(text)
    for grain in (1, 2, 5):
        stream = TextStream(tokenizer())
        found = [stream.push(ids[i : i + grain]) for i in range(0, len(ids), grain)]
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in found)
        assert "".join(found) + stream.finish() == text == tokenizer().decode(ids)


def test_stream_of_bytes_that_never_become_a_character():
    ids = tokenizer().encode("漢")[:2] + tokenizer().encode("a") + tokenizer().encode("😀")[:1]
    stream = TextStream(tokenizer())
    found = "".join(stream.push([t]) for t in ids) + stream.finish()
    assert found == tokenizer().decode(ids) and "a" in found and found.endswith("\ufffd")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("the quick brown fox", ["ck br"], "the qui"),
        ("the quick brown fox", ["fox", "brown"], "the quick "),
        ("aaab", ["aab"], "a"),
        ("no such thing", ["thingy"], None),
        ("ends with a begin", ["beginning"], None),
        ("漢字かな", ["字か"], "漢"),
        ("begin", ["b"], ""),
    ],
)
def test_stop_strings(text, stops, expected):
    row, given = RowText(tokenizer(), stops), ""
    ids = tokenizer().encode(text)
    n = 0
    for token in ids:
        n += 1
        piece, taken = row.push([token])
        assert taken == 1
        given += piece
        assert not any(s in given for s in stops)
        if row.stopped:
            break
    given += row.finish()
    assert given == (text if expected is None else expected)
    assert row.stopped == (expected is not None)
    if expected is not None:  # at the first token that completes it
        assert any(s in tokenizer().decode(ids[:n]) for s in stops)
        assert not any(s in tokenizer().decode(ids[: n - 1]) for s in stops)
    whole = RowText(tokenizer(), stops)
    assert whole.push(ids)[1] == n


def folder_with(tmp_path, config, template=None):
    (tmp_path / "tokenizer.json").write_bytes((default_model() / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    return Tokenizer(tmp_path)


MESSAGES = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "b"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def test_templates_wherever_they_are(tmp_path):
    expected = "<s><user>hé<assistant>b:"
    bos = {"bos_token": {"content": "<s>"}}
    assert folder_with(tmp_path, {**bos, "chat_template": TEMPLATE}).render(MESSAGES) == expected
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert folder_with(tmp_path, {**bos, "chat_template": named}).render(MESSAGES) == expected
    with_file = folder_with(tmp_path, {"bos_token": "<s>", "chat_template": "no"}, TEMPLATE)
    assert with_file.render(MESSAGES, add_generation_prompt=False) == expected[:-1]


def test_template_refusals(tmp_path):
    refusing = folder_with(tmp_path, {"chat_template": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.render(MESSAGES)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer().render(MESSAGES)
    with pytest.raises(ValueError, match="message 1"):
        refusing.render([MESSAGES[0], {"role": "user"}])
    reaching = folder_with(tmp_path, {"chat_template": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(ValueError, match="unsafe"):  # a template of a stranger reaches nothing
        reaching.render(MESSAGES)


def test_first_token_where_the_checkpoint_asks_for_it(tmp_path):
    plain = tokenizer().encode("God said")
    assert folder_with(tmp_path, {"bos_token": "<s>", "add_bos_token": True}).encode("God said") == [1, *plain]
    assert folder_with(tmp_path, {"bos_token": "<s>", "add_bos_token": True}).encode("<s>God said") == [1, *plain]
    assert folder_with(tmp_path, {"bos_token": "<s>"}).encode("God said") == plain


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
