"""The lists of jobs that measure.py runs: commands, how long they should take on H200, and what to read first.

Seconds are wall-clock: start of Python and of the GPU, weights, compilation, timed loops. They decide what still fits
into the time that is left; a measured run's summary.md has the real ones, which belong here.
"""

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "8b": "nemotron-h-8b",
    "9b": "nemotron-nano-9b-v2",
    "12b": "nemotron-nano-12b-v2",
    "47b": "nemotron-h-47b",
    "nano3": "nemotron-3-nano-30b-a3b",
    "super": "nemotron-3-super-120b-a12b",
}
# In a dry run. All of them can be cut over eight devices.
SMALL = {name: "tests/data/tiny/dense_g8_kv4/hf" for name in MODELS} | {
    "nano3": "tests/data/tiny/moe_nano/hf",
    "super": "tests/data/tiny/moe_latent_super/hf",
}
# No autotuning: small models compile faster, and no rank waits for what another one has found out.
QUICK_COMPILE = {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_shard_autotuning=false"}
# XLA has its own all-reduce kernel for small messages; with none allowed they go through NCCL.
NCCL_PSUM = {"XLA_FLAGS": "--xla_gpu_experimental_use_collective_kernels="}
COUNTS = (2, 4, 8)  # GPUs of the lists for several
DRY_BENCH = "--context 16 --steps 2 4 --repeats 1 --batch 1 --dtype float32"
DRY_KERNELS = "--batch 1 --tokens 16 --steps 8 16 --repeats 1 --dtype float32"
DRY_PREFILL = "--tokens 16 --repeats 1 --dtype float32"
# NVLink multicast can put the GPUs of a shared host out of service: it stays off in every job.
ALWAYS = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run of a list was given; see measure.py's options."""

    out: Path
    dry: bool = False
    cache: Path | None = None
    nccl: Path | None = None
    mamba_ssm: Path | None = None

    def result(self, job: "Job") -> Path:
        return self.out / f"{job.name}.json"

    def words(self, job: "Job") -> Mapping[str, str]:
        """What stands in braces in a job's command."""
        nccl = "" if self.nccl is None else f"--nccl {shlex.quote(str(self.nccl))} "

        def launch(devices: str) -> str:
            where = f"-n {devices.count(',') + 1}" if self.dry else f"--devices {devices} {nccl}"
            return f"{{python}} scripts/launch_local.py {where} --limit {job.limit - 10:g}"

        words = {
            **(SMALL if self.dry else MODELS),
            "json": shlex.quote(str(self.result(job))),
            "folder": shlex.quote(str(self.out / job.name)),
            "experiment": shlex.quote(str(self._experiment())),
            "mamba_ssm": "" if self.mamba_ssm is None else f"--mamba-ssm {shlex.quote(str(self.mamba_ssm))}",
            "nccl": nccl,
            "shared_gpu": "--cpu" if self.dry else nccl,
            "two_ranks": launch("0,0"),
            "four_ranks": launch("0,0,0,0"),
            **{f"{n}_gpus": launch(",".join(map(str, range(n)))) for n in COUNTS},
        }
        return {key: value.replace("{python}", sys.executable) for key, value in words.items()} | {
            "python": shlex.quote(sys.executable)
        }

    def _experiment(self) -> Path:
        if not self.dry:
            return ROOT / "examples" / "one_gpu.toml"
        path = self.out / "experiment.toml"
        path.write_text(
            f'model = "{ROOT / SMALL["8b"]}"\ndtype = "float32"\nsteps = [2, 4]\nrepeats = 1\ntokens = 16\n'
        )
        return path


@dataclasses.dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
      name: of its log and its result, too.
      about: what it tells, in a few words.
      seconds: how long it should take; it is not started when less is left.
      limit: seconds after which it is ended.
      command: words in braces are filled in by Setting.words.
      dry: arguments put behind it in a dry run, where the last of two equal options counts.
      env: environment variables.
      stdout: its standard output is the result; otherwise it writes {json} itself, or has only a log.
      needs_nccl: skipped where an older NCCL is installed and none was given.
      devices: of one process, in a dry run.
    """

    name: str
    about: str
    seconds: float
    limit: float
    command: str
    dry: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stdout: bool = False
    needs_nccl: bool = False
    devices: int = 2

    def arguments(self, setting: Setting) -> list[str]:
        text = self.command + (f" {self.dry}" if setting.dry else "")
        return shlex.split(text.format_map(setting.words(self)))

    def environment(self, setting: Setting) -> dict[str, str]:
        env = {**os.environ, **ALWAYS, "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        env["NEMOTRON_JAX_COMPILATION_CACHE"] = "off" if setting.cache is None else str(setting.cache)
        if setting.cache is not None:
            env["JAX_COMPILATION_CACHE_DIR"] = str(setting.cache)
            env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
        if setting.dry:  # flags of the GPU are unknown to the CPU's compiler only as such, so they are tried too
            env["JAX_PLATFORMS"] = "cpu"
            env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = (
                "1"  # of the CPU's code generator: nearly all of the time is compiling
            )
            env["JAX_NUM_CPU_DEVICES"] = (
                "1" if "launch_local" in " ".join(self.arguments(setting)) else str(self.devices)
            )
        return env | dict(self.env)

    def missing(self, setting: Setting) -> str:
        """Why it cannot run here; empty where it can."""
        if self.needs_nccl and not setting.dry and setting.nccl is None and installed_nccl() < (2, 29):
            return "needs NCCL 2.29 or newer: give its library with --nccl"
        return ""


def installed_nccl() -> tuple[int, ...]:
    import importlib.metadata

    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return (0,)


def bench(
    name: str,
    about: str,
    seconds: float,
    arguments: str,
    dry: str = DRY_BENCH,
    env: Mapping[str, str] | None = None,
    ceilings: bool = False,
) -> Job:
    """`nemotron-jax bench`; ``ceilings``: with the rates of a copy and a matrix product on this machine."""
    # the largest model leaves less than JAX's usual quarter of the memory free
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    command = f"{{python}} -m nemotron_jax bench {arguments} --out {{json}}"
    command += "" if ceilings else " --no-ceilings"
    return Job(name, about, seconds, 1.8 * seconds, command, dry, memory | dict(env or {}))


DRY_PROFILE = "--context 16 --steps 2 --tokens 16 --dtype float32"
FIVE = "--steps 16 80 --repeats 5"
BEFORE_MATVEC = "mamba_step,rms_norm,decode_attention"  # what else "auto" is in a decode step
WHOLE = "{python} tests/gpu/model_checks.py --out {json}"
CALLS = "scripts/bench_allreduce_rms_norm.py --out {json}"
DRY_CALLS = "--variants none,psum,gather --loops 2,4 --repetitions 1 --tokens 1 --hidden 192"


def checks(name: str, about: str, program: str, seconds: int, parts: int = 1, dry: str = "--small") -> list[Job]:
    """All checks of a program in so many jobs of so many seconds, and no times."""
    return [
        Job(
            f"{name}_checks_{i}" if parts > 1 else f"{name}_checks",
            f"{about} against plain forms" + (f", part {i} of {parts}" if parts > 1 else ""),
            seconds + 10,
            seconds + 60,
            f"{{python}} -m tests.gpu.{program} --part {i}/{parts} --seconds {seconds} --out {{json}}",
            dry,
        )
        for i in range(1, parts + 1)
    ]


def times(name: str, about: str, program: str, seconds: int, dry: str = "--small") -> Job:
    """The times of such a program, and no checks."""
    command = f"{{python}} -m tests.gpu.{program} --times --seconds {seconds} --out {{json}}"
    return Job(f"{name}_times", f"times of {about}", seconds + 10, seconds + 60, command, dry)


ONE_GPU = [
    times("kernel", "kernels of a decode step", "decode_kernel_checks", 100, "--help"),
    *checks("route", "a router behind its matrix product", "route_checks", 45, 2),
    times("route", "a router behind its matrix product", "route_checks", 50),
    *checks("kernel", "kernels of a decode step", "decode_kernel_checks", 60, dry="--help"),
    bench("decode_9b", "Nano-9B-v2, batch 1", 55, f"decode {{9b}} --kernels none auto {FIVE}"),
    bench(
        "decode_8b_batches", "8B, batch 8 to 128", 160, f"decode {{8b}} --kernels none auto --batch 8 16 32 128 {FIVE}"
    ),
    Job(
        "experts", "Nano-3's routed experts, every implementation", 60, 100,
        "{python} scripts/bench_experts.py --shapes nano --tokens 16,64,8,512,1,8192 --seconds 50 --out {json}",
        "--shapes tiny --tokens 1 --ceiling 256",
    ),
    *checks("scan", "the chunk scan's kernel", "prefill_kernel_checks", 60, 5),
    *checks("attention", "prefill attention's kernel in five forms", "prefill_attention_checks", 60, 5),
    bench("decode_47b", "47B, batch 1", 80, f"decode {{47b}} --kernels none auto {FIVE}"),
    Job(
        "peers_8b", "transformers and mamba_ssm at the 8B's shapes, same machine", 100, 170,
        "{python} scripts/bench_peers.py decode prefill step scan --model 8b {mamba_ssm} --out {json}",
        "--device cpu --dry-run",
    ),
    bench("decode_12b", "Nano-12B-v2, batch 1", 55, f"decode {{12b}} --kernels none auto {FIVE}"),
    bench(
        "decode_8b", "8B, batch 1, kernels off and on", 95,
        f"decode {{8b}} --kernels none {BEFORE_MATVEC} auto --repeats 8", ceilings=True,
    ),
    bench(
        "prefill_8b", "8B, 8k and 32k", 80, "prefill {8b} --kernels none auto --tokens 8192 32768 --repeats 3",
        DRY_PREFILL,
    ),
    Job(
        "references", "every float32 reference case on this GPU, at 1e-4", 70, 160,
        f"{WHOLE} --models all --plans none --tensor-parallel 1 --threads 6 --watchdog 150",
        "--models dense_tied --threads 2", QUICK_COMPILE,
    ),
    bench(
        "kernels_8b", "the 8B's operations one by one", 75,
        "kernels {8b} --batch 1 32 --steps 64 512 --tokens 8192", DRY_KERNELS,
    ),
    bench("decode_nano3", "Nano-3 30B-A3B, batch 1", 80, f"decode {{nano3}} --kernels none auto {FIVE}"),
    bench(
        "prefill_nano3", "Nano-3, 8k", 70, "prefill {nano3} --kernels none auto --tokens 8192 --repeats 5", DRY_PREFILL
    ),
    *checks("matvec", "the products of a decode step", "matvec_checks", 140, 2, "--help"),
    times("matvec", "the products of a decode step in several tilings", "matvec_checks", 140, "--help"),
    times("attention", "prefill attention's kernel in five forms", "prefill_attention_checks", 100),
    times("scan", "the chunk scan's kernel at five models' shapes", "prefill_kernel_checks", 100),
    *checks("around_scan", "convolution and gated norm of a prefill", "mamba_prefill_checks", 60, 2),
    times("around_scan", "convolution and gated norm of a prefill", "mamba_prefill_checks", 60),
    *checks("grouped", "the experts' matrix product", "grouped_matmul_checks", 40, dry="--help"),
    Job(
        "profile_decode_8b", "every kernel of the 8B's decode step, by time", 40, 80,
        "{python} scripts/kernel_times.py decode {8b} --kernels none auto --out {json}", DRY_PROFILE,
    ),
    Job(
        "profile_prefill_8b", "every kernel of the 8B's prefill, by time", 20, 60,
        "{python} scripts/kernel_times.py prefill {8b} --kernels auto --out {json}", DRY_PROFILE,
    ),
    Job(
        "profile_nano3", "every kernel of Nano-3's decode step, by time", 50, 90,
        "{python} scripts/kernel_times.py decode {nano3} --kernels auto --out {json}", DRY_PROFILE,
    ),
    bench(
        "kernels_nano3", "Nano-3's operations", 80,
        "kernels {nano3} --batch 1 8 64 --steps 64 512 --tokens 8192", DRY_KERNELS,
    ),
    Job(
        "segments_8b", "pieces that the decode step is cut into, kernels off and on", 15, 60,
        "{python} scripts/graph_segments.py {8b} --kernels none auto --out {json}",
    ),
    Job(
        "selftest", "the program's own check of the device", 25, 60, "{python} -m nemotron_jax selftest --json",
        "--repeats 2", stdout=True,
    ),
    Job(
        "pytest_gpu", "a part of the tests that need one GPU", 60, 120,
        "{python} -m pytest -q -p no:cacheprovider --gpu --thin 4 tests/gpu "
        "--ignore tests/gpu/test_allreduce_rms_norm.py", "--collect-only",
    ),
    Job(
        "experiment", "a sharding experiment on the GPU", 60, 110,
        "{python} -m nemotron_jax experiment {experiment} --out {folder} --json", stdout=True,
    ),
    Job(
        "peers_nano3", "transformers at Nano-3's shapes", 100, 160,
        "{python} scripts/bench_peers.py decode prefill --model nano3 {mamba_ssm} --out {json}",
        "--device cpu --dry-run",
    ),
]  # fmt: skip

# `gather` is plain JAX and `flags` keeps no state where there are several processes.
SHARED = "--plans none all/one_shot all/two_shot auto"
RANKS = [
    Job(
        "ranks2_calls_8192", "two ranks: microseconds per call of the longest rows", 45, 90,
        f"{{two_ranks}} --join -- {CALLS} --tokens 1,8,64,512,2048 --hidden 8192 --max-blocks 66 --watchdog 75 "
        "--variants none,psum,gather,one_shot,two_shot", DRY_CALLS, needs_nccl=True,
    ),
    Job(
        "ranks2_models", "two ranks on one GPU: whole models, every plan = stored = unfused", 75, 160,
        f"{{two_ranks}} -- {WHOLE} --quick {SHARED} --watchdog 145 "
        "--models moe_latent_mtp tiny-nemotron-h tiny-nemotron-3 moe_nano moe_latent_super",
        "--models dense_tied --plans none all/gather", QUICK_COMPILE, needs_nccl=True,
    ),
    Job(
        "ranks2_kernels", "two ranks: the all-reduce kernels for real", 45, 80,
        "{two_ranks} --join -- tests/gpu/allreduce_checks.py --max-blocks 66 --quick --tokens 1,133 --hidden 3136 "
        "--watchdog 65", "--implementations gather --tokens 1 --hidden 192 --match values", needs_nccl=True,
    ),
    Job(
        "ranks4_models", "four ranks on one GPU: whole models", 150, 240,
        f"{{four_ranks}} -- {WHOLE} --quick {SHARED} --watchdog 225 "
        "--models moe_latent_mtp tiny-nemotron-h tiny-nemotron-3 moe_nano moe_latent_super",
        "--models dense_tied --plans all/gather", QUICK_COMPILE, needs_nccl=True,
    ),
    Job(
        "shared_gpu", "the program itself: selftest, text, a killed process", 145, 240,
        "{python} tests/gpu/shared_gpu.py {shared_gpu} --limit 60 --ranks 2,4 --plans auto --only selftest "
        "--only tiny --only killed", "--limit 150", needs_nccl=True,
    ),
    Job(
        "ranks4_kernels", "four ranks: the all-reduce kernels for real", 45, 80,
        "{four_ranks} --join -- tests/gpu/allreduce_checks.py --max-blocks 33 --quick --tokens 1,133 --hidden 3136 "
        "--watchdog 65", "--implementations gather --tokens 1 --hidden 192 --match values", needs_nccl=True,
    ),
    Job(
        "ranks2_calls", "two ranks: microseconds per call", 40, 80,
        f"{{two_ranks}} --join -- {CALLS} --tokens 1,64 --hidden 4096 --max-blocks 66 --watchdog 65 "
        "--variants none,psum,gather,one_shot,one_shot-exit,one_shot-exit-entry,two_shot", DRY_CALLS,
        needs_nccl=True,
    ),
]  # fmt: skip


def several_gpus(count: int) -> list[Job]:
    """What is measured on so many GPUs, the most valuable first."""
    cut = f"--tensor-parallel {count}"
    plans = "--plans none all/one_shot all/flags auto"
    processes = f"{{{count}_gpus}}"
    whole_dry = "--models dense_g8_kv4 --plans none all/gather"
    kernels_dry = "--implementations gather --tokens 1 --hidden 192 --match values"
    calls = f"{{python}} {CALLS} --per-iteration 8"
    jobs = [
        Job(
            "selftest", "devices, links, every all-reduce against float64", 30, 70,
            "{python} -m nemotron_jax selftest --json", "--repeats 2", stdout=True,
        ),
        bench("decode_8b", "8B, batch 1, every plan", 95, f"decode {{8b}} {cut} {plans} --repeats 8", ceilings=True),
        Job(
            "calls", "microseconds per call, and what a call of one_shot is made of", 105, 140,
            f"{calls} --tokens 1,8,64,512,4096 --hidden 4096 --watchdog 130 "
            "--variants none,norm,psum,gather,one_shot,one_shot-exit,one_shot-exit-entry,two_shot,flags", DRY_CALLS,
        ),
        Job(
            "kernels", "every all-reduce kernel for real, one process for all GPUs", 70, 120,
            "{python} tests/gpu/allreduce_checks.py --quick --tokens 1,133 --hidden 3136 --watchdog 110", kernels_dry,
        ),
        Job(
            "models", "one process: both trained models, every plan = stored = unfused", 45, 140,
            f"{WHOLE} --quick --plans none all/one_shot all/two_shot all/flags --watchdog 130 "
            "--models tiny-nemotron-h tiny-nemotron-3 moe_nano moe_latent_super", whole_dry, QUICK_COMPILE,
        ),
        bench("decode_8b_nccl", "8B, psum through NCCL", 155, f"decode {{8b}} {cut} --plans none --batch 1 8 64 {FIVE}",
              env=NCCL_PSUM),
        Job(
            "calls_nccl", "microseconds per call of psum through NCCL", 25, 80,
            f"{calls} --tokens 1,8,64,512,4096 --hidden 4096 --watchdog 70 --variants none,psum --label psum_nccl",
            DRY_CALLS, NCCL_PSUM,
        ),
        bench("decode_nano3", "Nano-3, batch 1", 105, f"decode {{nano3}} {cut} --plans none auto {FIVE}"),
        bench("decode_9b", "Nano-9B-v2, batch 1", 95, f"decode {{9b}} {cut} --plans none auto {FIVE}"),
        bench("decode_47b", "47B, batch 1", 200,
              f"decode {{47b}} {cut} --skip-plain --kernels auto --plans none auto {FIVE}"),
        Job(
            "calls_rows", "microseconds per call at the other row lengths", 60, 110,
            f"{calls} --tokens 1,64,512,4096 --hidden 2688,8192 --watchdog 100 "
            "--variants none,norm,psum,gather,one_shot,two_shot,flags", DRY_CALLS,
        ),
        bench("decode_8b_batches", "8B, batch 8 and 64", 155, f"decode {{8b}} {cut} {plans} --batch 8 64 {FIVE}"),
        bench("prefill_8b", "8B, 8k", 60, f"prefill {{8b}} {cut} --plans none all/one_shot auto --repeats 5",
              DRY_PREFILL),
        Job(
            "kernels_processes", "the all-reduce kernels, one process per GPU", 50, 120,
            f"{processes} --join -- tests/gpu/allreduce_checks.py --quick --tokens 1,133 --hidden 3136 --watchdog 105",
            kernels_dry, needs_nccl=True,
        ),
        Job(
            "models_processes", "one process per GPU: both trained models", 45, 140,
            f"{processes} -- {WHOLE} --quick {SHARED} --watchdog 125 --models tiny-nemotron-h tiny-nemotron-3",
            whole_dry, QUICK_COMPILE, needs_nccl=True,
        ),
        Job(
            "segments_8b", "pieces that a fused decode step is cut into", 45, 90,
            f"{{python}} scripts/graph_segments.py {{8b}} {cut} --plans none all/one_shot all/flags --out {{json}}",
        ),
        Job(
            "pytest_gpu", "a part of the tests that need several GPUs", 60, 120,
            "{python} -m pytest -q -p no:cacheprovider --gpu --thin 40 tests/gpu/test_allreduce_rms_norm.py",
            "--collect-only",
        ),
    ]  # fmt: skip
    if count > 2:  # two H200 have room for its 241 GB of weights and little else
        jobs.append(
            bench(
                "decode_super",
                "Super 120B-A12B, batch 1",
                200,
                f"decode {{super}} {cut} --skip-plain --kernels auto --plans none auto {FIVE}",
            )
        )
    else:  # those that have not been measured since what they time changed
        first = ("selftest", "calls_rows", "decode_9b", "decode_8b", "decode_47b", "decode_nano3", "decode_8b_nccl")
        jobs.sort(key=lambda job: first.index(job.name) if job.name in first else len(first))
    return [dataclasses.replace(job, devices=count) for job in jobs]


LISTS: dict[str, list[Job]] = {
    "one-gpu": ONE_GPU,
    "ranks": RANKS,
    **{f"{name}-gpus": several_gpus(n) for name, n in zip(("two", "four", "eight"), COUNTS, strict=True)},
}


def key_figure(result: Path, log: Path) -> str:
    """The figure to read first: of a result that has rows of times or checks, else the log's last line."""
    try:
        found = json.loads(result.read_text())
    except (OSError, ValueError):
        found = {}
    if "key" in found:
        return str(found["key"])
    rows = [row for row in found.get("rows", []) if "ms" in row]
    if rows and "operation" in rows[0]:
        times = [f"{r['operation']} {r['implementation']} {r['ms'] * 1e3:.1f} us" for r in rows if r["ms"] is not None]
        return f"{len(times)} of {len(rows)} timed: " + ", ".join(times)
    if rows:
        return ", ".join(_timed(row, rows) for row in rows)
    rows = [row for row in found.get("rows", []) if isinstance(row.get("us"), float)]
    if rows:
        names = ("shape", "tokens", "implementation")
        return ", ".join(" ".join(str(row[n]) for n in names if n in row) + f" {row['us']:.1f} us" for row in rows)
    if "checks" in found:
        bad = [c["name"] for c in found["checks"] if c["ok"] is False]
        return f"{len(found['checks']) - len(bad)} checks passed" + (f", FAILED {', '.join(bad)}" if bad else "")
    runs = found.get("runs")
    if isinstance(runs, list):
        return f"{sum(run['status'] == 'done' for run in runs)} of {len(runs)} runs done"
    lines = log.read_text(errors="replace").splitlines()[-400:] if log.is_file() else []
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
    return lines[-1] if lines else ""


def _timed(row: Mapping, rows: list[Mapping]) -> str:
    """One row's time behind whatever tells it from the others."""
    names = [n for n in ("batch", "context", "tokens", "plan", "kernels") if len({str(r.get(n)) for r in rows}) > 1]
    label = " ".join(f"{n[0]}{row[n]}" if isinstance(row[n], int) else str(row[n]) for n in names if n in row)
    return f"{label} {'wrong' if row['ms'] is None else format(row['ms'], '.3f')}".strip() + " ms"
