"""Several processes run one command: same results as one process, printed once; a lost one ends the others by name."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nemotron_jax import make_mesh, processes
from nemotron_jax.generation import Generator
from nemotron_jax.parity import read_reference, record
from nemotron_jax.weights import load
from tests.conftest import TINY
from tests.generation_cases import trained

ROOT = Path(__file__).parent.parent
LAUNCHER = ROOT / "scripts" / "launch_local.py"
PROMPTS = ["In the beginning", "And God said,", "Moses"]
WITHIN = 30.0  # seconds in which a lost process must have ended the others


def environment(**more) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NEMOTRON_JAX_", "SLURM_", "OMPI_"))}
    return env | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "OMP_NUM_THREADS": "1",
        "NEMOTRON_JAX_COMPILATION_CACHE": "off",
    } | {k: str(v) for k, v in more.items()}  # fmt: skip


def program(*arguments) -> list[str]:
    return [sys.executable, "-m", "nemotron_jax", *map(str, arguments)]


def launch(count: int, *arguments, **env) -> subprocess.CompletedProcess:
    """Through the launcher."""
    command = [sys.executable, str(LAUNCHER), "-n", str(count), "--limit", "240", "--", *program(*arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**env), timeout=300)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """Processes without a launcher: each stands for one on a machine of its own."""

    def __init__(self, count: int, *arguments, port: int | None = None, own=None, detect: bool = False, **env):
        common = environment(**env)
        told = {
            "NEMOTRON_JAX_COORDINATOR": f"127.0.0.1:{port or free_port()}",
            "NEMOTRON_JAX_NUM_PROCESSES": str(count),
        }
        self.processes = []
        for i in range(count):
            mine = {} if detect else told | {"NEMOTRON_JAX_PROCESS_ID": str(i)}
            mine |= own(i) if own else {}
            self.processes.append(
                subprocess.Popen(
                    program(*arguments), env=common | mine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        self.started = ""

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for p in self.processes:
            with contextlib.suppress(ProcessLookupError):
                p.kill()
        for p in self.processes:
            p.wait()
            p.stdout.close()
            p.stderr.close()

    def wait_for_text(self, length: int) -> None:
        """Until process 0 has printed so much: all are in the middle of their work."""
        while len(self.started) < length:
            read = self.processes[0].stdout.read(1)
            assert read, self.processes[0].stderr.read()
            self.started += read

    def results(self, but: int | None = None) -> dict[int, tuple[int, str, str, float]]:
        """(status, stdout, stderr, seconds until the end) of each but one."""
        found, begun = {}, time.monotonic()
        for i, p in enumerate(self.processes):
            if i != but:
                out, err = p.communicate(timeout=200)
                found[i] = p.returncode, out, err, time.monotonic() - begun
        return found


# ------------------------------------------------------------------------------------------------- what is asked for
def options(**given) -> argparse.Namespace:
    names = ("coordinator", "num_processes", "process_id", "local_devices")
    return argparse.Namespace(**{name: given.get(name) for name in names})


def test_settings_from_options_and_environment():
    read = processes.settings
    assert read(options(), {}) is None
    asked = options(coordinator="a:1", num_processes="3", process_id="2", local_devices="0,1")
    assert read(asked, {}) == processes.Settings("a:1", 3, 2, (0, 1))
    env = {
        "NEMOTRON_JAX_COORDINATOR": "b:2",
        "NEMOTRON_JAX_NUM_PROCESSES": "2",
        "NEMOTRON_JAX_PROCESS_ID": "1",
        "NEMOTRON_JAX_SILENCE_SECONDS": "7.5",
    }
    assert read(options(), env) == processes.Settings("b:2", 2, 1, None, silence=7.5)
    assert read(options(coordinator="c:3"), env).coordinator == "c:3"  # an option goes first
    assert read(options(), env | {"NEMOTRON_JAX_NUM_PROCESSES": "1", "NEMOTRON_JAX_PROCESS_ID": "0"}) is None


def test_clusters_are_detected():
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert processes.settings(options(), slurm | {"SLURM_NTASKS": "2"}) == processes.Settings(index=0)
    assert processes.settings(options(), slurm | {"SLURM_NTASKS": "1"}) is None
    del slurm["SLURM_STEP_NODELIST"]  # a batch script or an allocation, not a step of it
    assert processes.settings(options(), slurm | {"SLURM_NTASKS": "2"}) is None
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert processes.settings(options(), mpi) == processes.Settings(index=1)
    assert processes.settings(options(), mpi | {"NEMOTRON_JAX_CLUSTER": "off"}) is None
    pods = {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}  # may be independent: only when asked
    assert processes.settings(options(), pods) is None
    assert processes.settings(options(), pods | {"NEMOTRON_JAX_CLUSTER": "on"}) == processes.Settings()
    with pytest.raises(ValueError, match="found 'no', accepted 'auto', 'on', 'off'"):
        processes.settings(options(), {"NEMOTRON_JAX_CLUSTER": "no"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"coordinator": "a:1"}, r"found --coordinator without NEMOTRON_JAX_NUM_PROCESSES, NEMOTRON_JAX_PROCESS_ID"),
        ({"num_processes": "2", "process_id": "0"}, "without NEMOTRON_JAX_COORDINATOR"),
        ({"coordinator": "a:1", "num_processes": "2", "process_id": "2"}, "accepted 0 to N - 1"),
        ({"coordinator": "a", "num_processes": "x", "process_id": "-1"}, "(?s)num-processes.*process-id.*HOST:PORT"),
        ({"local_devices": "0,b"}, "local-devices: found 'b'"),
    ],
)
def test_bad_settings_are_named_all_at_once(given, said):
    with pytest.raises(ValueError, match=said):
        processes.settings(options(**given), {})


def test_mesh_over_processes():
    shape = processes.mesh_shape
    assert shape(1, 1, 16, ["a"] * 8 + ["b"] * 8) == (8, 2)  # tensor inside a machine, data across
    assert shape(1, 1, 4, ["a", "a"]) == (4, 1)
    assert shape(2, 1, 16, ["a", "b"]) == (2, 8)
    assert shape(16, 1, 16, ["a", "b"]) == (16, 1)
    assert shape(2, 2, 4, ["a", "b"]) == (2, 2)
    for tensor, data in ((3, 1), (2, 4), (8, 1)):
        with pytest.raises(ValueError, match="found 4 devices in 2 processes"):
            shape(tensor, data, 4, ["a", "b"])


def test_alone_nothing_is_waited_for():
    assert not processes.active() and processes.count() == 1 and processes.first()
    assert processes.gather({"a": 1}) == [{"a": 1}] and processes.from_first(lambda: 3) == 3
    processes.agree("x", 1)
    np.testing.assert_array_equal(processes.host({"a": np.arange(3)})["a"], np.arange(3))


# ------------------------------------------------------------------------------------------------- the same results
def check_generate(count: int, tensor: int, data: int) -> None:
    asked = ("--prompt", *PROMPTS, "--max-new-tokens", 12, "--temperature", 0.8, "--seed", 5, "--logprobs", 2)
    done = launch(
        count, "generate", *asked, "--dtype", "float32", "--fusion", "all/gather", "--json",
        "--tensor-parallel", tensor, "--data-parallel", data,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one object: printed once, and nothing of gloo's among it
    alone = Generator(trained(1), max_new_tokens=12, temperature=0.8, logprobs=2).generate(PROMPTS, seed=5)
    assert [o["tokens"] for o in found["outputs"]] == [list(c.tokens) for c in alone]
    assert [o["text"] for o in found["outputs"]] == [c.text for c in alone]
    for o, c in zip(found["outputs"], alone, strict=True):
        np.testing.assert_allclose([t["logprob"] for t in o["logprobs"]], [t.logprob for t in c.logprobs], atol=2e-5)
    assert len(found["devices"]) == tensor * data and found["fused_boundaries"] == 11
    assert done.stderr.count(f"{count} processes of") == 1 and "peers' memory" in done.stderr


def test_generate_in_two_processes(count_case):
    check_generate(2, tensor=2, data=2)
    count_case(len(PROMPTS))


@pytest.mark.full
def test_generate_in_four_processes(count_case):
    check_generate(4, tensor=8, data=1)
    check_generate(4, tensor=2, data=4)
    count_case(2 * len(PROMPTS))


def check_compare(count: int, tensor: int, data: int, tmp_path: Path) -> int:
    folder = TINY / "dense_g8_kv4"
    with np.load(folder / "ref.npz") as file:
        kept = {
            k: file[k] for k in file.files if k.rpartition("/")[2] in ("ids", "logits", "layer", "conv", "ssm", "k")
        }
        kept |= {k: file[f"fixed/{k}"][:, :3] for k in ("greedy", "greedy_logits", "greedy_margin")}
    reference = tmp_path / "reference.npz"
    np.savez(reference, **kept)
    saved = tmp_path / f"run-{count}.npz"
    done = launch(
        count, "compare", folder / "hf", reference, "--save", saved, "--json",
        "--tensor-parallel", tensor, "--data-parallel", data,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["within_tolerance"] and found["greedy_matches"] == found["greedy_total"] == 6
    assert found["max_abs_logit_error"] < 1e-4 and found["first_layer_beyond_tolerance"] is None
    assert {"logits", "layer", "conv", "ssm", "k", "greedy_logits"} <= set(found["arrays"])
    several = read_reference(saved).arrays
    model = load(folder / "hf", mesh=make_mesh(1), dtype="float32")
    alone = record(model, read_reference(reference).arrays, set(kept) | {"logits", "layer", "conv", "ssm", "k"})
    for name in ("logits", "layer", "conv", "ssm", "k", "greedy_logits"):
        assert several[name].shape == alone[name].shape
        np.testing.assert_allclose(several[name], alone[name], atol=3e-5, err_msg=name)
    return 6


def test_compare_in_two_processes(tmp_path, count_case):
    """Tensor parallel across the processes: every array has parts on devices of both."""
    count_case(check_compare(2, 4, 1, tmp_path))


@pytest.mark.full
def test_compare_in_four_processes(tmp_path, count_case):
    count_case(check_compare(4, 4, 2, tmp_path))


@pytest.mark.full
def test_score_and_files(tmp_path, count_case):
    """Files are written by process 0 alone, and go on in as many processes as they like."""
    text = tmp_path / "t.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 4)
    asked = (
        "score",
        ROOT / "nemotron_jax/models/tiny-nemotron-h",
        text,
        "--window",
        16,
        "--dtype",
        "float32",
        "--json",
    )
    several = json.loads(launch(2, *asked, "--tensor-parallel", 2, "--data-parallel", 2).stdout)
    one = json.loads(subprocess.run(program(*asked), capture_output=True, text=True, env=environment()).stdout)
    assert several["tokens"] == one["tokens"] and abs(several["nats_per_token"] - one["nats_per_token"]) < 1e-5
    prompts, answers = tmp_path / "p.txt", tmp_path / "a.jsonl"
    prompts.write_text("".join(p + "\n" for p in PROMPTS))
    asked = ("generate", "--prompt-file", prompts, "--output", answers, "--batch-size", 2, "--max-new-tokens", 5)
    assert launch(2, *asked, "--tensor-parallel", 2).returncode == 0
    whole = answers.read_text()
    assert len(whole.splitlines()) == 3
    answers.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"cut')  # a run that was killed
    done = launch(2, *asked, "--tensor-parallel", 2)
    assert done.returncode == 0 and "2 answers are there already" in done.stderr
    assert answers.read_text() == whole
    count_case(2)


@pytest.mark.full
def test_cold_and_warm_compilation_caches_agree(tmp_path, count_case):
    """One process compiles while the other one takes everything from its cache."""
    asked = ("generate", "--prompt", *PROMPTS, "--max-new-tokens", 8, "--dtype", "float32", "--json")
    asked += ("--tensor-parallel", 4)
    folders = {}

    def own(i: int) -> dict[str, str]:
        return {"NEMOTRON_JAX_COMPILATION_CACHE": str(folders[i]), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    found = []
    for state in ("cold", "warm"):
        folders = {0: tmp_path / "zero", 1: tmp_path / state}
        with Group(2, *asked, own=own) as group:
            results = group.results()
        assert [r[0] for r in results.values()] == [0, 0], results[0][2]
        found.append(json.loads(results[0][1])["outputs"])
    assert len(list((tmp_path / "zero").iterdir())) > 2  # there was something to take
    assert found[0] == found[1]
    count_case()


@pytest.mark.full
def test_slurm_is_found(count_case):
    """The variables of a SLURM step on this machine are all that two tasks need."""

    def own(i: int) -> dict[str, str]:
        step = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
        return step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "JAX_COORDINATOR_PORT": str(port)}

    port = free_port()
    asked = ("generate", "--prompt", PROMPTS[0], "--max-new-tokens", 4, "--dtype", "float32", "--json")
    with Group(2, *asked, own=own, detect=True) as group:
        results = group.results()
    assert [r[0] for r in results.values()] == [0, 0], results[0][2]
    found = json.loads(results[0][1])
    assert found["tensor_parallel"] == 2  # the devices of the machine
    assert found["outputs"][0]["tokens"] == list(Generator(trained(1), max_new_tokens=4).generate(PROMPTS[0])[0].tokens)
    count_case()


@pytest.mark.full
def test_other_commands(tmp_path, count_case):
    """convert runs once; an experiment's results are kept by process 0, and a second call finds them all done."""
    model = ROOT / "nemotron_jax/models/tiny-nemotron-h"
    done = launch(2, "convert", model, tmp_path / "orbax", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["tensors"] > 10, done.stderr
    done = launch(2, "generate", tmp_path / "orbax", "--prompt", "x", "--max-new-tokens", 3, "--tensor-parallel", 2)
    assert done.returncode == 0, done.stderr
    done = launch(2, "inspect", "tiny-nemotron-h", "--tensor-parallel", 2, "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)["boundaries"]) == 11, done.stderr
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'model = "tiny-nemotron-h"\ndtype = "float32"\n[[run]]\nmesh = [{tensor = 2}, {data = 2}]\n'
        'plan = ["none", "all/gather"]\nwhat = ["decode"]\nbatch = [2]\ntokens = [16]\nsteps = [2, 4]\nrepeats = 1\n'
    )
    for _ in range(2):
        done = launch(2, "experiment", spec, "--out", tmp_path / "out", "--json")
        assert done.returncode == 0, done.stderr
        runs = json.loads(done.stdout)["runs"]
        assert [r["status"] for r in runs] == ["done"] * 4 and all(r["keeps_promise"] for r in runs)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["runs"] == runs
    count_case(7)


# ------------------------------------------------------------------------------------------------- faults
ENDLESS = ("generate", "--prompt", "In the beginning", "--ignore-eos", "--max-new-tokens", 4000, "--stream")


def check_loss(count: int, victim: int, how: signal.Signals) -> None:
    with Group(count, *ENDLESS, "--tensor-parallel", count) as group:
        group.wait_for_text(60)
        lost = group.processes[victim]
        lost.send_signal(how)
        results = group.results(but=victim)
        for i, (status, _, err, seconds) in results.items():
            assert seconds < WITHIN, f"process {i} ended after {seconds:.0f} s: {err}"
            assert status not in (0, 1, 2), err
            named = [line for line in err.splitlines() if line.startswith("nemotron-jax: process")]
            if (victim, how) == (0, signal.SIGKILL):  # JAX itself aborts at once; what happened is said nevertheless
                assert any(f"process {i}" in n and "since process 0 is gone" in n for n in named), err
            else:
                assert status == processes.LOST, err
                assert any(f"process {victim} (host" in n and f"pid {lost.pid}" in n and "lost" in n for n in named), (
                    err
                )


def test_a_killed_process_ends_the_others(count_case):
    check_loss(2, victim=1, how=signal.SIGKILL)
    count_case()


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "victim", "how"),
    [
        (2, 1, signal.SIGSTOP),
        (2, 0, signal.SIGSTOP),
        (2, 0, signal.SIGKILL),
        (4, 2, signal.SIGKILL),
        (4, 2, signal.SIGSTOP),
    ],
)
def test_a_lost_process_ends_the_others(count, victim, how, count_case):
    check_loss(count, victim, how)
    count_case()


@pytest.mark.full
def test_a_process_that_falls_behind_is_named(tmp_path, count_case):
    """It lives, but never comes to what the other one waits for."""
    script = tmp_path / "behind.py"
    script.write_text(
        "import time\n"
        "from nemotron_jax import processes\n"
        "processes.join(processes.settings())\n"
        "if processes.index() == 1: time.sleep(100)\n"
        "processes.gather(1)\n"
    )
    port, begun = free_port(), time.monotonic()
    told = {"NEMOTRON_JAX_COORDINATOR": f"127.0.0.1:{port}", "NEMOTRON_JAX_NUM_PROCESSES": 2}
    both = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(**told, NEMOTRON_JAX_PROCESS_ID=i, NEMOTRON_JAX_STALL_SECONDS=4),
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    errors = [p.communicate(timeout=60)[1] for p in both]
    assert [p.returncode for p in both] == [processes.LOST] * 2 and time.monotonic() - begun < 40
    who = f"process 1 (host {socket.gethostname()}, pid {both[1].pid}) is lost: for"
    assert all(who in err and "it has not come to step" in err for err in errors), errors
    count_case()


def test_a_fault_of_one_process_is_told_by_all(tmp_path, count_case):
    """A file that only one machine lacks: status 2 everywhere, and the process is named."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "prompts.txt").write_text("And God said,\n")
    folders = ["here", "there"]
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r} + '/' + {folders!r}[int(os.environ['NEMOTRON_JAX_PROCESS_ID'])])"
    )
    code += "; from nemotron_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    script = tmp_path / "run.py"
    script.write_text(code)
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(script), "generate", "--prompt-file", "prompts.txt"],
            env=environment(
                NEMOTRON_JAX_COORDINATOR=f"127.0.0.1:{port}", NEMOTRON_JAX_NUM_PROCESSES=2, NEMOTRON_JAX_PROCESS_ID=i
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    for i, process in enumerate(started):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and out == "", (i, err)
        assert "process 1 (host" in err and "No such file" in err and "Traceback" not in err, (i, err)
    count_case()


@pytest.mark.full
def test_faults_of_all_and_differences_between_them(count_case):
    with Group(2, "generate", "--prompt", "x", "--top-k", 4) as group:
        results = group.results()
    assert [r[0] for r in results.values()] == [2, 2]
    assert "greedy takes no filter" in results[0][2] and "greedy" not in results[1][2]  # said once
    with Group(2, "generate", "--prompt", "x", own=lambda i: {"JAX_NUM_CPU_DEVICES": "1"}) as group:
        assert [r[0] for r in group.results().values()] == [0, 0]
    port = free_port()
    both = []
    for i in (0, 1):
        env = environment(NEMOTRON_JAX_COORDINATOR=f"127.0.0.1:{port}", NEMOTRON_JAX_NUM_PROCESSES=2)
        command = program("generate", "--prompt", "x", "--max-new-tokens", 4 + i, "--process-id", i)
        both.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    errors = [p.communicate(timeout=60)[1] for p in both]
    assert [p.returncode for p in both] == [2, 2]
    assert 'command: process 0 has {"max_new_tokens": "4"}; process 1 has {"max_new_tokens": "5"}' in errors[0]
    count_case(3)


@pytest.mark.full
def test_a_crashed_run_starts_again_on_the_same_port(count_case):
    port = free_port()
    for _ in range(2):
        with Group(2, *ENDLESS, "--tensor-parallel", 2, port=port) as group:
            group.wait_for_text(40)
    with Group(2, "generate", "--prompt", "x", "--max-new-tokens", 3, port=port) as group:
        assert [r[0] for r in group.results().values()] == [0, 0]
    count_case()
