"""The commands generate, chat and score, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_jax import cli
from nemotron_jax.generation import Generator
from nemotron_jax.generation.prompt_files import read_prompts
from tests.generation_cases import trained

ROOT = Path(__file__).parent.parent


@pytest.fixture
def program(monkeypatch, capsys):
    """``main`` in this process, on the devices that are there; returns (status, stdout, stderr)."""
    monkeypatch.setattr(cli, "setup_devices", lambda count: None)
    monkeypatch.setattr("nemotron_jax.load", lambda model, *, mesh, fusion, **_: _loaded(mesh, fusion))

    def run(*argv):
        status = cli.main(list(map(str, argv)))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def _loaded(mesh, fusion):
    return trained(mesh.shape["tensor"], mesh.shape["data"], "none" if fusion == "auto" else fusion)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)


PROMPT = "And the woman said unto the serpent,"


def test_a_process_of_its_own():
    """Device set-up, loading and text in one; 2 virtual devices."""
    command = [sys.executable, "-m", "nemotron_jax", "generate", "--prompt", PROMPT, "--max-new-tokens", "8"]
    command += ["--tensor-parallel", "2", "--fusion", "all/gather", "--dtype", "float32", "--json"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NEMOTRON_JAX_COMPILATION_CACHE": "off",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = Generator(trained(1), max_new_tokens=8).generate(PROMPT)[0]
    assert found["outputs"] == [
        {"prompt": PROMPT, "text": expected.text, "tokens": list(expected.tokens), "finish_reason": "length"}
    ]
    assert (found["tensor_parallel"], found["fusion"], found["fused_boundaries"]) == (2, "all/gather", 11)
    assert len(found["devices"]) == 2 and all("cpu" in d for d in found["devices"])
    assert "2 virtual CPU devices" in done.stderr


def test_json_and_text(program):
    prompts = [PROMPT, "In the beginning"]
    status, out, _ = program("generate", "--prompt", *prompts, "--max-new-tokens", 8, "--logprobs", 1, "--json")
    outputs = json.loads(out)["outputs"]
    assert status == 0 and [o["prompt"] for o in outputs] == prompts
    assert all(len(o["logprobs"]) == 8 for o in outputs)
    status, out, _ = program("generate", "--prompt", prompts[0], "--prompt", prompts[1], "--max-new-tokens", 8)
    assert status == 0 and out == "".join(p + o["text"] + "\n" for p, o in zip(prompts, outputs, strict=True))
    status, out, err = program("generate", "--prompt", PROMPT, "--max-new-tokens", 8, "--stream")
    assert status == 0 and out == PROMPT + outputs[0]["text"] + "\n"
    status, out, err = program("generate", "--prompt", PROMPT, "--max-new-tokens", 8, "--stream", "--json")
    assert json.loads(out)["outputs"][0]["text"] == outputs[0]["text"] and outputs[0]["text"] in err


def test_a_plan_that_cannot_run_is_told(program):
    """Here no kernel can reach its peers' memory: what runs instead, and why, is on stderr and in the object."""
    options = ("--prompt", PROMPT, "--max-new-tokens", 2, "--tensor-parallel", 2)
    status, out, err = program("generate", *options, "--fusion", "kinds:M/flags", "--json")
    found = json.loads(out)
    pattern = trained(1).config.hybrid_override_pattern
    assert status == 0 and found["plan"] == "".join("p" if kind == "M" else "." for kind in pattern)
    assert len(found["fallbacks"]) == 1 and "flags cannot run here: it needs GPUs" in found["fallbacks"][0]
    assert f"nemotron-jax: fusion plan 'kinds:M/flags': {found['fallbacks'][0]}\n" in err
    status, out, err = program("generate", *options, "--fusion", "all/gather", "--json")
    assert json.loads(out)["fallbacks"] == [] and "fusion plan" not in err


FILE_OPTIONS = ("--max-new-tokens", 6, "--temperature", 0.9, "--seed", 4, "--batch-size", 2)


def test_a_killed_run_goes_on(program, tmp_path, monkeypatch, count_case):
    lines = [
        {"prompt": PROMPT, "id": "a"},
        {"tokens": [1, 41, 280]},
        {"prompt": "And God said,", "seed": 77},
        {"prompt": PROMPT},
        {"prompt": "In the beginning"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    status, out, _ = program("generate", "--prompt-file", file, *FILE_OPTIONS, "--json")
    expected = json.loads(out)["outputs"]
    assert status == 0 and expected[0]["id"] == "a" and expected[1]["prompt"] == [1, 41, 280]
    assert expected[0]["tokens"] != expected[3]["tokens"]  # each prompt has its own seed

    generate, calls = Generator.generate, []

    def killed(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    answers = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "generate", killed)
        assert program("generate", "--prompt-file", file, "--output", answers, *FILE_OPTIONS)[0] == 130
    assert len(answers.read_text().splitlines()) == 2
    with answers.open("a") as handle:
        handle.write('{"prompt": "cut of')  # killed while writing
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "generate", lambda self, *a, **k: (calls.append(1), generate(self, *a, **k))[1])
        status, out, err = program("generate", "--prompt-file", file, "--output", answers, *FILE_OPTIONS, "--json")
    assert status == 0 and len(calls) == 2 and "2 answers are there already" in err
    assert json.loads(out)["outputs"] == expected
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [{k: v for k, v in w.items() if k != "settings"} for w in written] == expected

    before = answers.read_bytes()
    for changed in (("--seed", 5), ("--max-new-tokens", 7)):
        status, _, err = program("generate", "--prompt-file", file, "--output", answers, *FILE_OPTIONS, *changed)
        assert status == 2 and "settings that this run does not have" in err
    file.write_text("\n".join(json.dumps(line) for line in lines[1:]))
    status, _, err = program("generate", "--prompt-file", file, "--output", answers, *FILE_OPTIONS)
    assert status == 2 and "a prompt that this run does not have" in err
    assert answers.read_bytes() == before
    count_case()


def test_prompt_files(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("one\n\n  two \r\nthree\u2028same line\n")
    assert [p.prompt for p in read_prompts(file)] == ["one", "  two ", "three\u2028same line"]
    for content, said in [(b"\n\n", "found no prompt"), (b"\xff\xfe", "not UTF-8")]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_prompts(file)
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"text": "b"}\n[1]\nnope\n{"prompt": "a", "tokens": [1]}\n{"prompt": "a", "seed": "x"}\n'
    )
    with pytest.raises(ValueError, match=r"line 2.*line 3.*line 4: not JSON.*line 5.*line 6: seed"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "one of --prompt TEXT and --prompt-file"),
        (("--prompt", "x", "--prompt-file", "y"), "one of --prompt TEXT and --prompt-file"),
        (("--prompt", "x", "y", "--stream", "--logprobs", 2), "--stream.*--logprobs"),
        (("--prompt", "x", "y", "--stream"), "--stream"),
        (("--prompt", "x", "--eos", 2, "--ignore-eos", "--logit-bias", "3"), "--eos and --ignore-eos.*--logit-bias"),
        (("--prompt", "x", "--top-k", 4), "greedy takes no filter"),
        (("--prompt", "x", "--speculative-tokens", 2), "no multi-token-prediction layers"),
        (("--prompt", "x", "--temperature", -1, "--max-new-tokens", -2), "temperature.*max_new_tokens"),
        (("--prompt", "x", "--prompt", "y" * 9000), "prompt 1: found 9000 tokens, accepted 4096"),
        (("--prompt-file", "does/not/exist"), "does/not/exist"),
    ],
)
def test_bad_options(program, options, said):
    import re

    status, out, err = program(
        "generate", *options, *(() if "--max-new-tokens" in options else ("--max-new-tokens", 8))
    )
    assert status == 2 and out == "" and re.search(said, err)


def test_chat(program, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("And God said,\nAnd Moses\n\nnot read\n"))
    status, out, err = program("chat", "--max-new-tokens", 8, "--json")
    turns = json.loads(out)["outputs"]
    assert status == 0 and [t["prompt"] for t in turns] == ["And God said,", "And Moses"]
    assert "no chat template" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("And God said,\nAnd Moses\n"))
    assert program("chat", "--max-new-tokens", 8)[1] == "".join(t["text"] + "\n" for t in turns)
    status, _, err = program("chat", "--system", "x")
    assert status == 2 and "no chat template" in err


def test_score(program, tmp_path):
    text = "In the beginning God created the heaven and the earth.\n" * 3
    file = tmp_path / "t.txt"
    file.write_text(text)
    status, out, _ = program("score", "MODEL", file, "--window", 16, "--json")
    found = json.loads(out)
    assert status == 0 and found["tokens"] == sum(d["tokens"] for d in found["documents"]) > 32
    assert found["nats_per_token"] * found["tokens"] == pytest.approx(found["documents"][0]["nats"])
    assert found["bits_per_byte"] == pytest.approx(found["documents"][0]["nats"] / 0.6931471805599453 / len(text))
    ids = trained(1).tokenizer.encode(text)
    lines = tmp_path / "t.jsonl"
    lines.write_text(f'{{"tokens": {ids}}}\n{{"text": "x"}}\n')
    status, out, _ = program("score", "MODEL", lines, "--window", 16, "--json")
    both = json.loads(out)
    assert both["nats_per_token"] == pytest.approx(found["nats_per_token"]) and both["documents"][1]["tokens"] == 0
    lines.write_text('{"text": "fine"}\nnope\n{"txt": 1}\n')
    status, _, err = program("score", "MODEL", lines)
    assert status == 2 and "line 2" in err and "line 3" in err
    file.write_text("")
    assert program("score", "MODEL", file)[0] == 2
