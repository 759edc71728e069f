"""The runner of measurements: limits, failures, what is left running, and going on where it was stopped."""

import json
import lzma
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path

import pytest

from tests.scripts.elf import shared_library

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import graph_segments  # noqa: E402
import measure_jobs  # noqa: E402

# Ends neither on being asked to nor with its group: it has left for a session of its own, below a process that ended.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
print("waiting", flush=True)
time.sleep(300)
"""

# A grandchild that nobody waits for is gone for whoever looks, and no zombie.
ORPHAN = """
import os, subprocess, sys, time
pid = int(subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], stdout=subprocess.PIPE, text=True).stdout)
limit = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.05)
    if time.monotonic() > limit:
        sys.exit("it is still there")
print("gone")
"""


def driver(tmp_path, jobs, *arguments):
    """A command line that runs these jobs, (name, seconds, limit, command), as the list `some`."""
    made = ", ".join(
        f"Job({name!r}, 'about', {seconds}, {limit}, {command!r})" for name, seconds, limit, command in jobs
    )
    code = f"import sys, measure; from measure_jobs import Job; measure.LISTS['some'] = [{made}]; "
    code += "measure.GRACE = measure.RESERVE = 1.0; "
    code += f"sys.argv = ['measure', 'some', '--out', {str(tmp_path / 'out')!r}, *{[*arguments]!r}]; "
    return [sys.executable, "-c", code + "sys.exit(measure.main())"]


def finished(command):
    env = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def run(tmp_path, jobs, *arguments):
    return finished(driver(tmp_path, jobs, *arguments)), summary(tmp_path)


def summary(tmp_path):
    file = tmp_path / "out" / "summary.json"
    return {e["name"]: e for e in json.loads(file.read_text())["some"]} if file.exists() else {}


def python(code, *arguments):
    escaped = textwrap.dedent(code).replace("{", "{{").replace("}", "}}")
    return shlex.join(["{python}", "-c", escaped, *map(str, arguments)])


def gone(pid):
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


def test_limits_failures_and_what_is_left(tmp_path):
    grandchild = tmp_path / "pid"
    jobs = [
        ("good", 1, 20, python("import json, sys; json.dump({'key': '4.2 ms'}, open(sys.argv[1], 'w'))") + " {json}"),
        ("bad", 1, 20, python("import sys; print('what went wrong'); sys.exit(3)")),
        ("stuck", 1, 1.5, python(STUBBORN, grandchild)),
        ("missing", 1, 20, "/nowhere/program"),
        ("orphans", 1, 20, python(ORPHAN)),
        ("long", 900, 1000, python("print('never')")),
        ("last", 1, 20, python("print('after all of them')")),
    ]
    done, entries = run(tmp_path, jobs, "--seconds", "50", "--pack", str(tmp_path / "all.tar.gz"))
    assert done.returncode == 1, done.stderr
    assert [e["status"] for e in entries.values()] == ["ok", "failed", "limit", "failed", "ok", "skipped", "ok"]
    assert entries["good"]["key"] == "4.2 ms" and entries["last"]["key"] == "after all of them"
    assert entries["bad"]["key"] == "status 3; what went wrong"
    assert 1.5 <= entries["stuck"]["seconds"] < 15
    assert "ended after" in (tmp_path / "out" / "stuck.log").read_text()
    assert gone(int(grandchild.read_text())), "a process of a job outlived it"
    assert "900" in entries["long"]["key"] and entries["orphans"]["key"] == "gone"
    table = (tmp_path / "out" / "summary.md").read_text()
    assert "| stuck | limit |" in table and "| last | ok |" in table and table.strip() in done.stdout
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        packed = set(tar.getnames())
    assert {"out/summary.md", "out/summary.json", "out/machine.json", "out/good.json", "out/last.log"} <= packed
    assert json.loads((tmp_path / "out" / "machine.json").read_text())["versions"]["jax"]


def test_it_goes_on_where_it_was_stopped(tmp_path):
    ran = tmp_path / "ran"
    count = "open(sys.argv[1], 'a').write(sys.argv[2])"
    jobs = [
        ("first", 1, 20, python(f"import sys; {count}", ran, 1)),
        ("slow", 1, 30, python(f"import sys, time; {count}; time.sleep(30 * (sys.argv[3] == '-'))", ran, 2, "-")),
        ("third", 1, 20, python(f"import sys; {count}", ran, 3)),
    ]  # fmt: skip
    process = subprocess.Popen(
        driver(tmp_path, jobs, "--seconds", "50"), env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    limit = time.monotonic() + 30
    while not ran.exists() or ran.read_text() != "12":
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "| slow | running |" in process.communicate(timeout=30)[0]
    jobs[1] = ("slow", 1, 30, jobs[1][3].replace("2 -", "2 now"))
    done, entries = run(tmp_path, jobs, "--seconds", "50")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran.read_text() == "1232", "what ended ran again, or what was cut off did not come last"
    assert {e["status"] for e in entries.values()} == {"ok"}
    run(tmp_path, jobs, "--seconds", "50", "--again", "--only", "third")
    assert ran.read_text() == "12323"


def test_a_job_that_the_end_cuts_short_runs_again(tmp_path):
    jobs = [("cut", 1, 100, python("import time; time.sleep(60)"))]
    done, entries = run(tmp_path, jobs, "--seconds", "3")
    assert entries["cut"]["status"] == "cut" and entries["cut"]["seconds"] < 10, done.stdout


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--only", "nothing"], "--only: found nothing, accepted first"),
        (["--nccl", "/nowhere/libnccl.so.2"], "--nccl: found no /nowhere/libnccl.so.2"),
    ],
)
def test_bad_input(tmp_path, arguments, part):
    done, _ = run(tmp_path, [("first", 1, 20, "true")], *arguments)
    assert done.returncode == 2 and part in done.stderr


LIBRARY = shared_library("ncclGetVersion")
PACKED = lzma.compress(LIBRARY)


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("lib.so", b"", "of 0 bytes"),
        ("lib.so", LIBRARY[:-1], "cut off"),
        ("lib.xz", b"", "broken"),
        ("lib.xz", PACKED[:-1], "broken"),
        ("lib.xz", LIBRARY, "broken"),
        ("lib.xz", lzma.compress(LIBRARY[:-1]), "cut off"),
    ],
)
def test_a_library_that_cannot_be_used(tmp_path, name, content, part):
    library = tmp_path / name
    library.write_bytes(content)
    done, entries = run(tmp_path, [("first", 1, 20, "true")], "--nccl", str(library))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("measure: --nccl: found ") and part in line and not entries
    if part == "broken":  # so the next run, with a whole one, does not take what is left of this one
        assert not (tmp_path / "out" / "libnccl.so.2").exists()


def test_a_packed_library(tmp_path):
    library = tmp_path / "lib.xz"
    library.write_bytes(PACKED)
    done, entries = run(tmp_path, [("first", 1, 20, "true")], "--nccl", str(library))
    assert done.returncode == 0 and entries["first"]["status"] == "ok", done.stderr
    assert (tmp_path / "out" / "libnccl.so.2").read_bytes() == LIBRARY


@pytest.mark.parametrize("what", ["out", "summary", "pack"])
def test_results_that_cannot_be_written(tmp_path, what):
    file = tmp_path / {"out": "out", "summary": "out/summary.json", "pack": "file"}[what]
    file.parent.mkdir(exist_ok=True)
    file.write_text("{")
    ran = tmp_path / "ran"
    arguments = ["--pack", str(file / "x")] if what == "pack" else []
    done = finished(driver(tmp_path, [("first", 1, 20, f"touch {ran}")], *arguments))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("measure: ") and str(file) in line and not ran.exists()


def test_a_job_that_cannot_be_killed_is_given_up(tmp_path):
    """As where a driver holds a process: killing it is left out here."""
    command = driver(tmp_path, [("held", 1, 1, "sleep 600"), ("next", 1, 20, "true")], "--seconds", "50")
    command[-1] = f"import measure, os; measure.GONE = 1.0; os.kill = os.killpg = lambda *_: None; {command[-1]}"
    done = finished(command)
    assert done.returncode == 1, done.stderr
    assert {name: e["status"] for name, e in summary(tmp_path).items()} == {"held": "limit", "next": "ok"}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", list(measure_jobs.LISTS))
def test_every_job_in_its_smallest_form(tmp_path, name):
    command = [sys.executable, str(SCRIPTS / "measure.py"), name, "--dry-run", "--out", str(tmp_path)]
    command += ["--seconds", "3000", "--compilation-cache", str(tmp_path / "compiled")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3100)
    entries = json.loads((tmp_path / "summary.json").read_text())[name]
    assert done.returncode == 0 and {e["status"] for e in entries} == {"ok"}, done.stdout
    assert [e["name"] for e in entries] == [job.name for job in measure_jobs.LISTS[name]]


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", list(measure_jobs.LISTS))
def test_every_command_can_be_written_down(tmp_path, name, dry):
    setting = measure_jobs.Setting(tmp_path, dry=dry, cache=tmp_path / "cache", nccl=tmp_path / "lib nccl.so")
    jobs = measure_jobs.LISTS[name]
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = job.arguments(setting)
        assert not [word for word in words if "{" in word], words
        files = [word for word in words if word.startswith(("scripts/", "tests/")) and word.endswith(".py")]
        assert all((measure_jobs.ROOT / file).is_file() for file in files), files
        assert job.limit > job.seconds
        environment = job.environment(setting)
        assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["JAX_COMPILATION_CACHE_DIR"]
        assert environment["JAX_PLATFORMS"] == "cpu" or not dry


def test_key_figures(tmp_path):
    result, log = tmp_path / "x.json", tmp_path / "x.log"
    log.write_text("$ command\nfirst\nlast line\n\n")
    assert measure_jobs.key_figure(result, log) == "last line"
    rows = [
        {"ms": 1.5, "batch": 1, "plan": "none", "kernels": "none"},
        {"ms": None, "batch": 1, "plan": "auto", "kernels": "none"},
    ]
    result.write_text(json.dumps({"rows": rows}))
    assert measure_jobs.key_figure(result, log) == "none 1.500 ms, auto wrong ms"
    result.write_text(json.dumps({"rows": [{"shape": "nano", "tokens": 8, "implementation": "blocks", "us": 7.0}]}))
    assert measure_jobs.key_figure(result, log) == "nano 8 blocks 7.0 us"
    result.write_text(json.dumps({"rows": [{"us": {"mosaic_gpu": 7.0}}]}))  # a table of its own: the log says it
    assert measure_jobs.key_figure(result, log) == "last line"
    result.write_text(json.dumps({"checks": [{"name": "a", "ok": True}, {"name": "b", "ok": False}]}))
    assert measure_jobs.key_figure(result, log) == "1 checks passed, FAILED b"


THUNKS = """\
000: kCommandBuffer [source       | next=006 (1)]
    001: kCopy         [source | sink] kCopy
006: kWhile         [prev=000 (1) | sink        ]
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=019 (1)]
        008: kCopy         [source       | next=009 (1)] kCopy
        009: kCustomKernel [prev=008 (1) | sink        ] input_reduce_fusion_2 grid: [1, 1, 1]
    019: kCustomCall    [prev=000 (1) | next=020 (1)] kCustomCall
    020: kCustomKernel  [prev=019 (1) | next=021 (1)] gemm_fusion_dot_25 grid: [2048, 1, 1]
021: kCopy [prev=006 (1) | sink] kCopy
"""


def test_segments_of_a_loop():
    body = graph_segments.loop_body(THUNKS)
    assert [(piece.kind, piece.inside) for piece in body] == [
        ("CommandBuffer", 2), ("CustomCall", 0), ("CustomKernel", 0)
    ]  # fmt: skip
    assert graph_segments.segments(body) == 3
    assert graph_segments.summary(body) == (
        "1 CommandBuffer of 2 thunks, 1 CustomCall, 1 CustomKernel (gemm_fusion_dot_25)"
    )
    with pytest.raises(ValueError, match="no loop"):
        graph_segments.loop_body("000: kCopy [source | sink] kCopy\n")
