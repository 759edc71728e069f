"""Several processes that run the same command: how they find each other, agree, read results, and end together.

Every process runs the same program on its own devices (``jax.distributed``); process 0 alone prints and writes files.
A process that dies, stops or falls behind would leave the others waiting for ever, so each of them runs a watchdog on
threads of its own: it says once a second, through JAX's coordination service, that it lives and how far it is, and ends
this process with an error that names the one that was lost. docs/processes.md has the use of it.
"""

import argparse
import atexit
import builtins
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn

import jax

from nemotron_jax import files, interrupts

logger = logging.getLogger("nemotron_jax")

LOST = 3  # exit status where another process was lost
TICK = 1.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one after which a process counts as lost
SUSPICIOUS = 6.0  # the same, once a collective has failed
STALL = 600.0  # seconds that a living process may be behind a step that this one waits in
PARTING = 3.0  # seconds that process 0, which the others talk through, stays for them to hear why it ends
JAX_HEARTBEAT = 90  # seconds: JAX's own check, which cannot name a process of ours, comes after ours
PREFIX = "nemotron_jax/"

_COORDINATOR, _COUNT, _INDEX = "NEMOTRON_JAX_COORDINATOR", "NEMOTRON_JAX_NUM_PROCESSES", "NEMOTRON_JAX_PROCESS_ID"
_DEVICES, _CLUSTER = "NEMOTRON_JAX_LOCAL_DEVICES", "NEMOTRON_JAX_CLUSTER"
_SILENCE, _STALL, _START = "NEMOTRON_JAX_SILENCE_SECONDS", "NEMOTRON_JAX_STALL_SECONDS", "NEMOTRON_JAX_START_SECONDS"
# What JAX's cluster detection needs (first: which process this is), and how many processes there are. Kubernetes is
# left out: the pods of a job often have nothing to do with each other, so there it must be asked for.
_CLUSTERS = (
    (("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"), "SLURM_NTASKS"),
    (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_SIZE"),
)
# Errors of a collective that say no more than that somebody else is gone.
_CONSEQUENCE = re.compile(r"gloo|nccl|connection (reset|closed|refused)|socket|unavailable|aborted|deadline", re.I)
_OF_XLA = re.compile(r"[A-Z_]+: ")  # what its errors begin with; some are ValueErrors


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one process joins the others.

    Attributes:
      coordinator: HOST:PORT where process 0 listens; None: JAX's cluster detection finds it.
      count: how many processes; None with detection.
      index: which one this is; None where only JAX's detection will know.
      local_devices: numbers of the GPUs that this process takes; None: all that it sees (one each under SLURM and MPI).
      silence, stall, start: seconds, see the module's constants; ``start`` is how long to wait for the others at first.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: tuple[int, ...] | None = None
    silence: float = SILENCE
    stall: float = STALL
    start: float = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command; each has an environment variable, which it goes before."""
    group = parser.add_argument_group(
        "several processes", "found by themselves under SLURM and Open MPI; see docs/processes.md"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help=f"where process 0 listens ({_COORDINATOR})")
    group.add_argument("--num-processes", metavar="N", help=f"how many there are ({_COUNT})")
    group.add_argument("--process-id", metavar="I", help=f"which one this is, 0 to N - 1 ({_INDEX})")
    group.add_argument("--local-devices", metavar="I,...", help=f"GPUs that this process takes ({_DEVICES})")


def settings(args: argparse.Namespace | None = None, environment: Mapping[str, str] = os.environ) -> Settings | None:
    """What the options and the environment ask for; None where there is one process.

    Raises:
      ValueError: naming every value that is missing or wrong.
    """

    def given(option: str, variable: str) -> tuple[str, str | None]:
        value = getattr(args, option, None)
        return (f"--{option.replace('_', '-')}", value) if value else (variable, environment.get(variable) or None)

    faults: list[str] = []

    def number(name: str, text: str | None, kind: type = int) -> Any:
        try:
            value = None if text is None else kind(text)
        except ValueError:
            value = -1
        if value is not None and value < 0:
            faults.append(f"{name}: found {text!r}, accepted a number of at least 0")
        return value

    coordinator_name, coordinator = given("coordinator", _COORDINATOR)
    (count_name, count_text), (index_name, index_text) = given("num_processes", _COUNT), given("process_id", _INDEX)
    devices_name, devices_text = given("local_devices", _DEVICES)
    explicit = {coordinator_name: coordinator, count_name: count_text, index_name: index_text}
    count, index = number(count_name, count_text), number(index_name, index_text)
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        faults.append(f"{coordinator_name}: found {coordinator!r}, accepted HOST:PORT")
    devices = tuple(number(devices_name, part) for part in devices_text.split(",")) if devices_text else None
    seconds = {
        field: value
        for field, variable in (("silence", _SILENCE), ("stall", _STALL), ("start", _START))
        if (value := number(variable, environment.get(variable) or None, float)) is not None
    }
    if any(explicit.values()) and not faults:
        if missing := [name for name, value in explicit.items() if not value]:
            faults.append(f"found {', '.join(n for n, v in explicit.items() if v)} without {', '.join(missing)}")
        elif count < 1 or not index < count:
            faults.append(f"{index_name} {index} of {count_name} {count}: accepted 0 to N - 1 of N processes")
    if faults:
        raise ValueError("processes: " + "; ".join(faults))
    if count is not None:
        return Settings(coordinator, count, index, devices, **seconds) if count > 1 else None
    wanted = environment.get(_CLUSTER) or "auto"
    if wanted not in ("auto", "on", "off"):
        raise ValueError(f"processes: {_CLUSTER}: found {wanted!r}, accepted 'auto', 'on', 'off'")
    here = next(
        (n for n, many in _CLUSTERS if all(v in environment for v in n) and int(environment.get(many, 1)) > 1), ()
    )
    if wanted == "on" or (wanted == "auto" and here):
        return Settings(index=int(environment[here[0]]) if here else None, local_devices=devices, **seconds)
    return None


# ------------------------------------------------------------------------------------------------- joining and leaving
_watch: "_Watch | None" = None
_counters: dict[str, int] = {}


def join(how: Settings | None) -> None:
    """Find the other processes, before anything of JAX has started; does nothing for one process.

    From here on output of all but process 0 is dropped, and this process ends when another one is lost.

    Raises:
      RuntimeError: if they do not come together in time.
    """
    global _watch
    if how is None or _watch is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    options: dict[str, Any] = {"heartbeat_timeout_seconds": max(JAX_HEARTBEAT, int(3 * how.silence))}
    options |= {"initialization_timeout": int(how.start), "shutdown_timeout_seconds": int(how.silence) + 10}
    if how.local_devices is not None:
        options["local_device_ids"] = list(how.local_devices)
    if how.coordinator is not None:
        options |= {"coordinator_address": how.coordinator, "num_processes": how.count, "process_id": how.index}
        options["cluster_detection_method"] = "deactivate"
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        raise ValueError(f"processes: JAX finds no cluster here ({error}); say where the processes are") from error
    from jax._src import distributed  # the store that comes with it has no public name

    state = distributed.global_state
    if state.num_processes == 1:
        return
    # With jax 0.12.1 a collective on CPUs waits for ever if its program was traced behind different lines of Python in
    # two processes, as it is where one leads and the others follow; so programs do not say where they come from.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    undertaker = _Undertaker(state.process_id, state.coordinator_address) if state.process_id else None
    _quiet_output(state.process_id)
    _watch = _Watch(state.client, state.process_id, state.num_processes, how, undertaker)
    sys.excepthook = _uncaught
    atexit.register(leave)
    agree("versions", _versions())


def leave() -> None:
    """Wait for the other processes to come here too, and part from them."""
    global _watch
    if _watch is None:
        return
    sys.stdout.flush()
    _watch.finish()
    _watch = None
    jax.distributed.shutdown()


def fail(error: BaseException, status: int, text: str | None = None) -> NoReturn:
    """End this process, and with it the others, because of an error here. They say whose error it was.

    An error that all processes make is printed by process 0 alone; one that only says that a peer is gone gives way to
    the watchdog's, which knows which.
    """
    assert _watch is not None
    text = text or f"{error}"
    cause: BaseException | None = error
    while cause is not None:
        if (isinstance(cause, RuntimeError) or _OF_XLA.match(str(cause))) and _CONSEQUENCE.search(str(cause)):
            _watch.suspect()
        cause = cause.__cause__
    _watch.fail(text, status)


def active() -> bool:
    """Whether this process has joined others."""
    return _watch is not None


def share_a_gpu() -> bool:
    """Whether several processes run on one GPU; there NCCL has hung on messages above 64 KiB."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def count() -> int:
    """How many processes there are. Starts nothing of JAX."""
    return 1 if _watch is None else _watch.count


def index() -> int:
    """Which one this is; 0 where there is one."""
    return 0 if _watch is None else _watch.index


def first() -> bool:
    """Whether this is the process that prints and writes files."""
    return index() == 0


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if isinstance(error, KeyboardInterrupt):
        fail(error, 130, "interrupted")
    fail(error, 1, "".join(traceback.format_exception(error)))


def _quiet_output(process: int) -> None:
    """Leave stdout to Python alone (gloo and others write to it), and to process 0."""
    sys.stdout.flush()
    real = os.dup(1)
    if process == 0:
        os.dup2(2, 1)
        sys.stdout = open(real, "w", buffering=1 if os.isatty(real) else -1, encoding="utf-8")
    else:
        sys.stdout, sys.stderr = open(os.devnull, "w"), open(os.devnull, "w")
        os.dup2(sys.stdout.fileno(), 1)
        os.close(real)


def _versions() -> dict[str, str]:
    import jaxlib

    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": sys.version.split()[0]}


# ------------------------------------------------------------------------------------------------- agreeing and sharing
def _key(what: str) -> str:
    """A name in the store that is new at each call, and the same in all processes."""
    _counters[what] = _counters.get(what, 0) + 1
    return f"{PREFIX}{what}/{_counters[what]}"


def gather(value: Any) -> list[Any]:
    """Each process's ``value`` (JSON), in their order, the same list in all of them."""
    if _watch is None:
        return [value]
    key = _key("gather")
    with _watch.step():
        _watch.put(f"{key}/{_watch.index}", json.dumps(value))
        return [json.loads(_watch.get(f"{key}/{i}")) for i in range(_watch.count)]


def from_first(value: Callable[[], Any]) -> Any:
    """What ``value()`` gives (JSON) in process 0, in all of them; the others do not call it.

    Raises:
      ValueError, OSError: what it raises in process 0, with the same text in the others.
    """
    if _watch is None:
        return value()
    key = _key("first")
    with _watch.step():
        if _watch.index:
            found = json.loads(_watch.get(key))
            if "fault" in found:
                raise getattr(builtins, found["kind"], ValueError)(found["fault"])
            return found["value"]
        try:
            result = value()
        except (ValueError, OSError) as error:
            _watch.put(key, json.dumps({"fault": files.reason(error), "kind": type(error).__name__}))
            raise
        _watch.put(key, json.dumps({"value": result}))
        return result


def tell_others(value: Any) -> None:
    """Leave word (JSON) for all others, in process 0; they get it with :func:`told`, one after the other."""
    assert _watch is not None
    _watch.put(_key("told"), json.dumps(value))


def told() -> Any:
    """What process 0 said next. However long it says nothing, nobody counts as lost for that."""
    assert _watch is not None
    return json.loads(_watch.get(_key("told")))


def agree(what: str, value: Any) -> None:
    """Refuse to go on where processes differ in something that they must have in common.

    Raises:
      ValueError: in every process, naming those that differ from process 0, and both values.
    """
    if _watch is None:
        return
    found = gather(value)
    wrong = [f"process {i} has {_shown(v, found[0])}" for i, v in enumerate(found) if v != found[0]]
    if wrong:
        raise ValueError(f"{what}: process 0 has {_shown(found[0], _other(found))}; {'; '.join(wrong)}")


def _other(found: list[Any]) -> Any:
    return next(v for v in found if v != found[0])


def _shown(value: Any, other: Any) -> str:
    """What of ``value`` is not as in ``other``."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {k: value.get(k) for k in {**value, **other} if value.get(k) != other.get(k)}
    return json.dumps(value)[:400]


def agree_on_content(what: str, content: Any) -> None:
    """The same for something long: a digest of its JSON is compared."""
    if _watch is not None:
        agree(what, hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16])


def host(tree: Any) -> Any:
    """Arrays as NumPy arrays, whole in every process, whoever's devices hold them.

    All processes call it together where some device belongs to another process.
    """
    with contextlib.nullcontext() if _watch is None else _watch.step():
        return jax.tree.map(_whole, tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return jax.device_get(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def hosts() -> list[str]:
    """Name of the machine that each process runs on."""
    return gather(socket.gethostname())


def mesh_shape(tensor: int, data: int, devices: int, machines: list[str]) -> tuple[int, int]:
    """Degrees for ``devices`` devices over several processes, with a fault where not all of them would be used.

    Args:
      tensor, data: as asked for; 1 and 1: tensor inside a machine, data across machines. A data axis of 1 grows to
        take all devices.
      machines: of each process.

    Raises:
      ValueError: naming the number of devices.
    """
    if tensor == data == 1:
        data = len(set(machines)) if devices % len(set(machines)) == 0 else 1
        tensor = devices // data
    elif data == 1 and devices % tensor == 0:
        data = devices // tensor
    if tensor * data != devices:
        raise ValueError(
            f"mesh data={data} x tensor={tensor}: found {devices} devices in {len(machines)} processes, and each must "
            "have a part; accepted: degrees whose product is the number of devices"
        )
    return tensor, data


# ------------------------------------------------------------------------------------------------- watching
class _Undertaker:
    """Says what happened where this process ends without a word: killed, crashed, or ended by JAX since process 0 died
    (JAX aborts then, before any thread of Python can speak). A child that waits for the end of a pipe.
    """

    CODE = """
import signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
said = sys.stdin.readline()
if not said:
    name, address = sys.argv[1:]
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2).close()
        print(f"nemotron-jax: {name} ended without a word: it was killed or crashed", file=sys.stderr)
    except OSError:
        print(f"nemotron-jax: {name} ended since process 0 is gone: nobody answers at {address}", file=sys.stderr)
"""

    def __init__(self, index: int, coordinator: str):
        name = f"process {index} (host {socket.gethostname()}, pid {os.getpid()})"
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", self.CODE, name, coordinator],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def dismiss(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._child.stdin is not None
            self._child.stdin.write(b"done\n")
            self._child.stdin.close()


class _Watch:
    """The watchdog of this process.

    One thread talks to the store (its calls hang where process 0 has stopped), another one judges. Signals that the
    main thread cannot take, because it waits in a collective, come from the thread of interrupts.py.
    """

    def __init__(self, client: Any, index: int, count: int, how: Settings, undertaker: _Undertaker | None):
        self.client, self.index, self.count, self.how, self.undertaker = client, index, count, how, undertaker
        self.names = {i: f"process {i}" for i in range(count)}
        self.limit = how.silence
        self.steps, self._inside = 0, 0.0
        self._quiet = dict.fromkeys(range(count), 0.0)  # seconds since a process's last sign of life
        self._behind = dict.fromkeys(range(count), 0.0)  # seconds that it has been behind this process
        self._beats: dict[int, str] = {}
        self._replied = time.monotonic()
        self._stop, self._ending = threading.Event(), threading.Lock()
        self._failing = False
        self._finished: set[int] = set()
        self._ends: dict[int, str] = {}  # what processes said when they ended, as JSON
        self.put(f"{PREFIX}who/{index}", f"process {index} (host {socket.gethostname()}, pid {os.getpid()})")
        interrupts.hand_over(lambda number: self.end(f"{self.names[index]} was asked to end", 128 + number))
        self._threads = [
            threading.Thread(target=run, name=f"nemotron-jax-{run.__name__}", daemon=True)
            for run in (self._talk, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    # --------------------------------------------------------------------------------- the store
    def put(self, key: str, value: str) -> None:
        self.client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> str:
        """The value, as soon as there is one. The watchdog ends the wait where there will be none."""
        while True:
            try:
                return self.client.blocking_key_value_get(key, 60_000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    @contextlib.contextmanager
    def step(self) -> Generator[None]:
        """Something that all processes do together."""
        self.steps += 1
        self._inside = time.monotonic()
        try:
            yield
        finally:
            self._inside = 0.0

    def _talk(self) -> None:
        beat, last = 0, time.monotonic()
        while not self._stop.wait(TICK):
            beat += 1
            try:
                self.put(f"{PREFIX}beat/{self.index}", f"{beat} {self.steps}")
                found = dict(self.client.key_value_dir_get(f"{PREFIX}beat/"))
                found |= dict(self.client.key_value_dir_get(f"{PREFIX}end/"))
                if not all("pid" in name for name in self.names.values()):
                    who = dict(self.client.key_value_dir_get(f"{PREFIX}who/"))
                    self.names |= {int(k.rpartition("/")[2]): v for k, v in who.items()}
            except jax.errors.JaxRuntimeError:
                continue  # silence of process 0 is counted by the other thread
            now = time.monotonic()
            # Time in which this process did not look, because it was stopped itself, counts against nobody.
            self._look(found, min(now - last, 2 * TICK))
            last = self._replied = now

    def _look(self, found: dict[str, str], seconds: float) -> None:
        for i in range(self.count):
            value = found.get(f"{PREFIX}beat/{i}")
            if value is None or value == self._beats.get(i):
                self._quiet[i] += seconds
            else:
                self._quiet[i], self._beats[i] = 0.0, value
            late = self._inside and value is not None and int(value.split()[1]) < self.steps
            self._behind[i] = self._behind[i] + seconds if late else 0.0
        self._ends = {int(k.rpartition("/")[2]): v for k, v in found.items() if k.startswith(f"{PREFIX}end/")}

    # --------------------------------------------------------------------------------- judging
    def _judge(self) -> None:
        last, silent, heard = time.monotonic(), 0.0, 0.0
        while not self._stop.wait(TICK / 4):
            now = time.monotonic()
            seconds, last = min(now - last, TICK), now
            silent = 0.0 if self._replied > now - 2 * TICK else silent + seconds
            if silent > self.limit:
                self._exit(f"{self.names[0]} is lost: it has not answered for {silent:.0f} s", LOST)
            ends = {i: json.loads(v) for i, v in self._ends.items() if i != self.index}
            self._finished = {i for i, e in ends.items() if e["status"] == 0}
            failed = {i: e for i, e in ends.items() if e["status"] != 0}
            if failed and not self._failing:
                heard += seconds
                if heard > PARTING:  # time to make the same mistake, which is then told once
                    i, e = min(failed.items())
                    self.end(e["lost"] or f"{self.names[i]} failed: {e['text']}", e["status"])
            for i in range(self.count):
                if i == self.index or i in self._finished or i in failed:
                    continue
                if self._quiet[i] > self.limit:
                    why = f"{self.names[i]} is lost: no sign of life for {self._quiet[i]:.0f} s"
                    self.end(f"{why} (it was killed, crashed or stopped, or its machine is)", LOST)
                if self._behind[i] > self.how.stall:
                    self.end(
                        f"{self.names[i]} is lost: for {self._behind[i]:.0f} s it has not come to step {self.steps}, "
                        f"where process {self.index} waits",
                        LOST,
                    )

    def suspect(self) -> None:
        """A collective failed: somebody is probably gone. Wait for the watchdog to find out who."""
        self.limit = min(self.limit, SUSPICIOUS)
        time.sleep(self.limit + 4 * PARTING)

    def fail(self, text: str, status: int) -> NoReturn:
        """End with an error of this process."""
        self._failing = True
        self._tell({"status": status, "text": text, "lost": ""})
        same = False
        if self.index:
            limit = time.monotonic() + PARTING
            while not same and time.monotonic() < limit:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    other = self.client.key_value_try_get(f"{PREFIX}end/0")
                    same = json.loads(other)["text"] == text
                time.sleep(0.1)
        self._exit("" if same else text if not self.index else f"{self.names[self.index]} failed: {text}", status)

    def end(self, text: str, status: int) -> NoReturn:
        """End because of another process (from a thread of the watchdog)."""
        self._tell({"status": status, "text": text, "lost": text})
        self._exit(text, status)

    def _tell(self, what: dict[str, Any]) -> None:
        """Leave word in the store. Process 0 may be beyond hearing, so nobody waits for it."""
        value = json.dumps(what)

        def put():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.put(f"{PREFIX}end/{self.index}", value)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        thread.join(PARTING if self.index else None)

    def _exit(self, text: str, status: int) -> NoReturn:
        with self._ending:  # the first reason is the one
            if text:
                with contextlib.suppress(OSError):
                    line = text.rstrip() if text.startswith("nemotron-jax") else f"nemotron-jax: {text.rstrip()}"
                    os.write(2, f"{line}\n".encode())
            if self.index == 0:  # the store is in this process: the others read why before it goes
                limit = time.monotonic() + 2 * PARTING
                while time.monotonic() < limit and any(
                    i and not self._heard(i) and self._quiet[i] < 3 * TICK for i in range(self.count)
                ):
                    time.sleep(TICK / 4)
                time.sleep(TICK)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            if self.undertaker:
                self.undertaker.dismiss()
            os._exit(status)  # an orderly end would wait for the others
        raise AssertionError

    def _heard(self, i: int) -> bool:
        """Whether a process knows that all end badly."""
        return i in self._ends and json.loads(self._ends[i])["status"] != 0

    def finish(self) -> None:
        """All is done here; wait until it is everywhere."""
        self.put(f"{PREFIX}end/{self.index}", json.dumps({"status": 0, "text": "", "lost": ""}))
        with self.step():
            for i in range(self.count):
                while json.loads(self.get(f"{PREFIX}end/{i}"))["status"]:
                    time.sleep(PARTING)  # the watchdog ends this process too
        self._stop.set()
        for thread in self._threads:
            thread.join(PARTING)
        interrupts.take_back()
        if self.undertaker:
            self.undertaker.dismiss()
