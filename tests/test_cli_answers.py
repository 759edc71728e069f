"""Bad options get one answer that names what was found and what is accepted, before anything is made."""

import errno
import os

import jax.numpy as jnp
import pytest

from nemotron_jax import NemotronH, cli, make_mesh
from nemotron_jax.generation import Generator
from nemotron_jax.generation.prompt_files import Answers, FilePrompt
from nemotron_jax.weights.loading import default_model
from tests import tiny


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["inspect", "--context", "999999999999"], "found 999999999999, accepted 1 to"),
        (["generate", "--prompt", "a", "--tensor-parallel", "0"], "found 0, accepted 1 to"),
        (["generate", "--prompt", "a", "--tensor-parallel", "1000000"], "accepted at most 256 virtual CPU devices"),
        (["compare", "reference.npz", "--variant", "zzz"], "invalid choice: 'zzz'"),
        (["compare", "reference.npz", "--tolerance", "nan"], "found nan, accepted a number of 0 or more"),
        (["compare", "reference.npz", "--tolerance", "-1"], "found -1, accepted a number of 0 or more"),
        (["bench", "decode", "--steps", "5", "2"], "found 5 2, accepted two numbers"),
        (["bench", "decode", "--tokens", "8"], "--tokens: found it with decode"),
        (["bench", "prefill", "--context", "8"], "--context: found it with prefill"),
        (["bench", "decode", "--steps", "4", "6"], "found 4 6, accepted two numbers"),
    ],
)
def test_bad_numbers(command, named, capsys):
    assert named in answer(command, capsys)


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["chat"]])
@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--max-new-tokens", "-5"], "max_new_tokens: found -5"),
        (["--temperature", "-1"], "temperature: found -1.0"),
        (["--speculative-tokens", "2"], "no multi-token-prediction layers"),
        (["--eos", "99999"], "eos: found"),
    ],
)
def test_settings_are_refused_before_weights_are_read(command, option, named, capsys, monkeypatch):
    monkeypatch.setattr("nemotron_jax.cli.build_mesh", lambda args: make_mesh(1))  # all tests share the devices
    monkeypatch.setattr("nemotron_jax.load", lambda *_, **__: pytest.fail("weights were read"))
    assert named in answer([*command, *option], capsys)


def answer(command: list[str], capsys) -> str:
    """The one line that a command is refused with."""
    try:
        status = cli.main(command)
    except SystemExit as stop:  # argparse answers by itself
        status = stop.code
    out, err = capsys.readouterr()
    assert status == cli.BAD_INPUT and out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "generate --bogus",
            "nemotron-jax generate: error: unrecognized arguments: --bogus; see nemotron-jax generate",
        ),
        (
            "chat --top-k many",
            "nemotron-jax chat: error: argument --top-k: invalid int value: 'many'; see nemotron-jax",
        ),
        (
            "score",
            "nemotron-jax score: error: the following arguments are required: MODEL, FILE; see nemotron-jax score",
        ),
        ("", "nemotron-jax: error: the following arguments are required: COMMAND; see nemotron-jax --help"),
        ("speak", "nemotron-jax: error: argument COMMAND: invalid choice: 'speak'"),
    ],
)
def test_wrong_options_get_one_line(command, line, capsys):
    assert answer(command.split(), capsys).startswith(line)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "generate --prompt-file none",
            "none: No such file or directory; accepted: a text file with one prompt a line",
        ),
        ("generate --prompt-file folder", "folder: Is a directory; accepted: a text file with one prompt a line"),
        ("generate --prompt-file file --output folder", "folder: found a folder; accepted: a file for the answers"),
        ("generate --prompt-file file --output none/x", "none/x: found no folder"),
        ("generate nemotron-h-8b --prompt x", "nemotron-h-8b is a preset: shapes without weights, for inspect, bench"),
        ("generate nemotron-h-8b --prompt x", "or a hub id with these shapes: nvidia/Nemotron-H-8B-Base-8K,"),
        ("generate none --prompt x", "none: no such folder, and no hub id (OWNER/NAME)"),
        ("score none none", "none: No such file or directory; accepted: a text file, or .jsonl with one document"),
        ("score none folder", "folder: Is a directory; accepted: a text file, or .jsonl with one document"),
        ("compare --save none/x.npz", "none/x.npz: found no folder"),
        ("experiment spec.toml --out file", "file: File exists; accepted: a folder for the results"),
        ("convert none file/x", "none: no such folder, and no hub id"),
    ],
)
def test_files_are_named(command, said, tmp_path, monkeypatch, capsys):
    """With what was expected there, before anything is loaded, and without a number of the system's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "build_mesh", lambda args: make_mesh(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("In the beginning")
    (tmp_path / "spec.toml").write_text('model = "tiny-nemotron-h"')
    line = answer(command.split(), capsys)
    assert line.startswith(f"nemotron-jax {command.split()[0]}: ") and said in line and "Errno" not in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "spec.toml"]


def test_a_target_below_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    line = answer(["convert", str(default_model()), str(tmp_path / "file" / "x")], capsys)
    assert line.endswith(f"{tmp_path}/file is a file; accepted: a folder to write to")


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    """Where the system's error names no file."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answers = Answers(tmp_path / "answers.jsonl", "x", [FilePrompt("a")])
    with pytest.raises(OSError, match=r"answers.jsonl: No space left on device; accepted: a file for the answers"):
        answers.add([{"prompt": "a"}])
    answers.__exit__()


def test_logits_that_are_no_numbers_are_no_answer():
    """Damaged weights must not look like an empty text."""
    model = NemotronH(tiny.config(hybrid_override_pattern="M-"), rngs=0)
    path = ("layers", 0, "mixer", "in_proj")
    model.replace_weights({path: jnp.full_like(model.parameter(*path), jnp.nan)})
    with pytest.raises(FloatingPointError, match=r"NaN.* rows \[0\]"):
        Generator(model, max_new_tokens=4).generate([[1, 2, 3]])
