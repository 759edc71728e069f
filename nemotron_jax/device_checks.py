"""Do the devices compute, do the links carry, do the sums add up? Short checks before a long run.

Each check compares with NumPy in float64, or bit for bit, on data that differ from device to device. With several
processes all of them call each check together, and all get the same answer.
"""

import dataclasses
import importlib.metadata
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax import fusion, processes
from nemotron_jax.sharding import DATA, TENSOR, Axis, ShardingRules, axis_size
from pallas_kernels.allreduce_rms_norm import (
    IMPLEMENTATIONS,
    allreduce_rms_norm,
    flags_state_specs,
    make_flags_state,
    peers_reachable,
    supported,
    unreachable_reason,
)
from pallas_kernels.allreduce_rms_norm.probe import nccl_version

logger = logging.getLogger("nemotron_jax")

EPS = 1e-5
HIDDEN = 4096
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ROUNDOFF = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # half the distance from 1 to the next number
CASES = ((1, HIDDEN, "bfloat16"), (29, 1024, "bfloat16"), (5, 1024, "float32"))  # tokens, hidden, dtype
REPEATS, TOKENS = 50, 64


class NotRun(Exception):
    """A check that has nothing to check here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      name: of the check.
      ok: whether it passed; None: it was not run.
      detail: what was compared; what was wrong; or why it was not run.
      seconds: it took, compilation included.
    """

    name: str
    ok: bool | None
    detail: str
    seconds: float


def run(name: str, check: Callable[[], str]) -> Check:
    """Run one check; it raises AssertionError (or any error) where something is wrong."""
    started = time.perf_counter()
    try:
        ok, detail = True, check()
    except NotRun as reason:
        ok, detail = None, str(reason)
    except Exception as error:  # one failed check does not hide the others
        logger.debug("%s", name, exc_info=True)
        text = str(error).strip() or type(error).__name__
        ok, detail = False, text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"[:2000]
    found = processes.gather([ok, detail])
    if len(found) > 1:
        wrong = [f"process {i}: {d}" for i, (o, d) in enumerate(found) if o is False]
        ok, detail = (False, "; ".join(wrong)) if wrong else found[0]
    return Check(name, ok, detail, round(time.perf_counter() - started, 3))


def every_check(mesh: Mesh, *, copy_bytes: int, repeats: int = REPEATS, tokens: int = TOKENS) -> Iterator[Check]:
    """All checks that this mesh allows, in order.

    Args:
      copy_bytes: size of each copy.
      repeats, tokens: calls of each repeat test, and rows of each call.
    """
    yield run("matmul", lambda: matmul(mesh))
    yield run("copy all pairs", lambda: copies(mesh, copy_bytes))
    yield run("copy inside a process", lambda: local_copies(mesh, copy_bytes))
    for name in IMPLEMENTATIONS:
        yield run(f"all-reduce {name}", lambda name=name: against_float64(mesh, name))
        yield run(f"repeat {name}", lambda name=name: repeated(mesh, name, repeats, tokens))


# ------------------------------------------------------------------------------------------------- devices and links
def matmul(mesh: Mesh, size: int | None = None) -> str:
    """A float32 and a bfloat16 product on each device, against float64, ten times the same bits."""
    size = size or (256 if mesh.devices.flat[0].platform == "cpu" else 2048)
    rng = np.random.default_rng(0)
    faults, worst = [], 0.0
    product = jax.jit(
        lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    )
    for dtype in NUMPY:
        a, b = (rng.standard_normal((size, size)).astype(NUMPY[dtype]) for _ in range(2))
        want = a.astype(np.float64) @ b.astype(np.float64)
        # float32 accumulation in whatever order: far below this; TF32 or a broken unit: far above
        bound = size * 2.0**-24 * np.sqrt(np.mean(want**2))
        for device in mesh.local_devices:
            x, y = jax.device_put(a, device), jax.device_put(b, device)
            found = [np.asarray(product(x, y)) for _ in range(10)]
            error = float(np.max(np.abs(found[0] - want)))
            worst = max(worst, error / bound)
            if not error <= bound:
                faults.append(f"{device}: {dtype} product is off by {error:.3g}, accepted {bound:.3g}")
            if any(not np.array_equal(f.view(np.uint32), found[0].view(np.uint32)) for f in found):
                faults.append(f"{device}: the same {dtype} product gave different bits")
    assert not faults, "; ".join(faults)
    return f"{mesh.size} devices, {size} x {size}, worst error {worst:.2f} of what is accepted"


def pattern(source: int, words: int) -> np.ndarray:
    """[words] uint32 that no other device has."""
    n = np.arange(words, dtype=np.uint64)
    return ((n * np.uint64(2654435761) + np.uint64(source + 1) * np.uint64(40503019)) & np.uint64(0xFFFFFFFF)).astype(
        np.uint32
    )


def copies(mesh: Mesh, size: int) -> str:
    """Every device sends to every other, in rounds, inside one program; each word is compared."""
    n, words = mesh.size, max(1, size // 4)
    if n == 1:
        raise NotRun("one device: no pair")
    flat = Mesh(mesh.devices.reshape(-1), ("device",))
    place = {device: i for i, device in enumerate(flat.devices.flat)}
    sharding = NamedSharding(flat, P("device"))
    x = jax.make_array_from_callback((n, words), sharding, lambda i: pattern(i[0].start or 0, words)[None])
    faults, slowest = [], float("inf")
    for shift in range(1, n):
        pairs = [(i, (i + shift) % n) for i in range(n)]
        send = jax.jit(
            jax.shard_map(
                lambda x, pairs=pairs: lax.ppermute(x, "device", pairs),
                mesh=flat,
                in_specs=P("device"),
                out_specs=P("device"),
            )
        )
        out = jax.block_until_ready(send(x))
        for shard in out.addressable_shards:
            source, target = (place[shard.device] - shift) % n, shard.device
            faults += _differences(np.asarray(shard.data)[0], source, f"{target} <- {flat.devices.flat[source]}")
        started = time.perf_counter()
        jax.block_until_ready(send(x))
        slowest = min(slowest, 4 * words / (time.perf_counter() - started))
    assert not faults, "; ".join(faults)
    rate = f", slowest round {slowest / 1e9:.1f} GB/s a device" if flat.devices.flat[0].platform != "cpu" else ""
    return f"{n * (n - 1)} pairs, {4 * words} bytes each{rate}"


def local_copies(mesh: Mesh, size: int) -> str:
    """Between the devices of one process, the way ``jax.device_put`` goes."""
    devices, words = mesh.local_devices, max(1, size // 4)
    if len(devices) == 1:
        raise NotRun("one device in a process: no pair")
    faults = []
    for (i, source), (_, target) in itertools.permutations(enumerate(devices), 2):
        moved = jax.device_put(jax.device_put(pattern(i, words), source), target)
        faults += _differences(np.asarray(moved), i, f"{target} <- {source}")
    assert not faults, "; ".join(faults)
    return f"{len(devices) * (len(devices) - 1)} pairs in each process, {4 * words} bytes each"


def _differences(found: np.ndarray, source: int, link: str) -> list[str]:
    wrong = int((found != pattern(source, found.size)).sum())
    return [f"{link}: {wrong} of {found.size} words are wrong"] if wrong else []


# ------------------------------------------------------------------------------------------------- sums
def why_not(mesh: Mesh, name: str, tokens: int, hidden: int, dtype: str) -> str | None:
    """Why an implementation cannot run on this mesh, or None."""
    if axis_size(mesh, TENSOR) == 1:
        return None if name == "reference" else "tensor axis of one device: there is nothing to sum"
    device = mesh.devices.flat[0]
    return supported(
        name, tokens=tokens, hidden=hidden, dtype=dtype, residual_dtype=dtype, world=axis_size(mesh, TENSOR), mesh=mesh,
        platform=device.platform, processes_reachable=peers_reachable(mesh),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Problem:
    """partial [data, tensor, tokens, hidden], residual [data, tokens, hidden], weight [hidden]."""

    partial: np.ndarray
    residual: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, mesh: Mesh, tokens: int, hidden: int, dtype: str) -> "Problem":
        rng = np.random.default_rng((tokens, hidden))
        data, tensor = axis_size(mesh, DATA), axis_size(mesh, TENSOR)
        kind = NUMPY[dtype]
        return cls(
            rng.standard_normal((data, tensor, tokens, hidden)).astype(kind),
            rng.standard_normal((data, tokens, hidden)).astype(kind),
            (1 + 0.3 * rng.standard_normal(hidden)).astype(kind),
        )


def operation(mesh: Mesh, problem: Problem, name: str, dtype: str, body: Callable) -> Any:
    """``body(op, partial, residual)`` on every device; the results of each, stacked as [devices, ...]."""
    _, tensor, tokens, hidden = problem.partial.shape
    axes = (DATA, TENSOR)
    state = make_flags_state(mesh, TENSOR, tokens, hidden, dtype) if name == "flags" and tensor > 1 else None

    def put(x: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    def local(partial, residual, weight, state):
        def op(p, r):
            return allreduce_rms_norm(p, r, weight, axis_name=TENSOR, eps=EPS, implementation=name, state=state)

        outs = body(op, partial[0, 0], residual[0])
        return jax.tree.map(lambda out: _varying(out, axes)[None], outs)

    specs = P(DATA, TENSOR), P(DATA), P(), flags_state_specs(state)
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(axes)))
    arrays = [put(x, s) for x, s in zip((problem.partial, problem.residual, problem.weight), specs[:3], strict=True)]
    return program(*arrays, state)


def _varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    missing = tuple(sorted(set(axes) - set(jax.typeof(x).manual_axis_type.varying)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _shares(mesh: Mesh, x: jax.Array) -> Iterator[tuple[int, jax.Device, np.ndarray]]:
    """(index along the data axis, device, its part) of this process's devices."""
    for shard in x.addressable_shards:
        yield (shard.index[0].start or 0) // axis_size(mesh, TENSOR), shard.device, np.asarray(shard.data)[0]


def against_float64(mesh: Mesh, name: str) -> str:
    """all-reduce + residual + RMSNorm by one implementation on fresh data of a few shapes."""
    faults: list[str] = []
    for tokens, hidden, dtype in CASES:
        if (reason := why_not(mesh, name, tokens, hidden, dtype)) is not None:
            raise NotRun(reason)
        problem = Problem.of(mesh, tokens, hidden, dtype)
        normed, new_residual = operation(mesh, problem, name, dtype, lambda op, p, r: op(p, r))
        partial, residual = problem.partial.astype(np.float64), problem.residual.astype(np.float64)
        total, ranks = residual + partial.sum(1), partial.shape[1]
        terms = np.abs(residual) + np.abs(partial).sum(1)
        # one rounding; the float32 sum before it; and psum may round each addition in the partial's dtype
        bound = np.abs(total) * ROUNDOFF[dtype] * 1.01 + terms * (ranks + 1) * 2.0**-24
        if name == "psum":
            bound += np.abs(partial).sum(1) * ranks * ROUNDOFF[dtype]
        stored = {}
        for group, device, share in _shares(mesh, new_residual):
            stored[device] = share.astype(np.float64)
            faults += _beyond(
                stored[device], total[group], bound[group], f"{device}: sum of {tokens} x {hidden} {dtype}"
            )
        for _, device, share in _shares(mesh, normed):
            y = stored[device]
            want = y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * problem.weight.astype(np.float64)
            limit = np.abs(want) * (ROUNDOFF[dtype] * 1.01 + 1e-6)
            faults += _beyond(share.astype(np.float64), want, limit, f"{device}: norm of {tokens} x {hidden} {dtype}")
    assert not faults, "; ".join(faults)
    shapes = ", ".join(f"{t} x {h} {d}" for t, h, d in CASES)
    return f"{axis_size(mesh, TENSOR)} ranks, {shapes}"


def _beyond(found: np.ndarray, want: np.ndarray, bound: np.ndarray, what: str) -> list[str]:
    error = np.abs(found - want)
    wrong = ~(error <= bound)  # NaN is wrong
    return [f"{what}: {int(wrong.sum())} values are off, by up to {np.max(error):.3g}"] if wrong.any() else []


def repeated(mesh: Mesh, name: str, repeats: int, tokens: int = TOKENS) -> str:
    """The same input again and again, inside one program, must give the same bits: a race seldom does."""
    hidden, dtype = HIDDEN, "bfloat16"
    if (reason := why_not(mesh, name, tokens, hidden, dtype)) is not None:
        raise NotRun(reason)

    def body(op, partial, residual):
        first = op(partial, residual)

        def again(_, bad):
            # The barrier ties the call to the iteration; without it the compiler takes it out of the loop.
            p, r, _ = lax.optimization_barrier((partial, residual, bad))
            return bad + sum(
                (lax.bitcast_convert_type(a, jnp.uint16) != lax.bitcast_convert_type(b, jnp.uint16)).sum()
                for a, b in zip(op(p, r), first, strict=True)
            )

        zero = jnp.int32(0)
        missing = tuple(sorted(jax.typeof(first[0]).manual_axis_type.varying))
        return lax.fori_loop(0, repeats, again, lax.pcast(zero, missing, to="varying") if missing else zero)

    changed = operation(mesh, Problem.of(mesh, tokens, hidden, dtype), name, dtype, body)
    faults = [f"{device}: {int(n)} values changed" for _, device, n in _shares(mesh, changed) if n]
    assert not faults, "; ".join(faults)
    return f"{repeats} times {tokens} x {hidden} {dtype}, the same bits"


# ------------------------------------------------------------------------------------------------- what is here
def versions() -> dict[str, Any]:
    """Of everything that decides what runs."""
    import flax
    import jaxlib

    try:
        own = importlib.metadata.version("nemotron-jax")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    nccl = nccl_version()
    return {
        "nemotron_jax": own,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "python": sys.version.split()[0],
        "platform": jax.devices()[0].client.platform_version.strip().replace("\n", ", "),
        "nccl": None if nccl is None else f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}",
    }


def topology(mesh: Mesh) -> dict[str, Any]:
    """Processes, machines and devices."""
    machines = processes.hosts()
    devices = []
    for place in np.ndindex(mesh.devices.shape):
        device = mesh.devices[place]
        entry = {"id": device.id, "kind": device.device_kind, "process": device.process_index}
        devices.append(entry | {"place": dict(zip(mesh.axis_names, place, strict=True))})
    return {
        "processes": processes.count(),
        "machines": machines,
        "mesh": dict(mesh.shape),
        "devices": devices,
        "peers_reachable": axis_size(mesh, TENSOR) > 1 and peers_reachable(mesh),
        "unreachable_reason": unreachable_reason(mesh) if axis_size(mesh, TENSOR) > 1 else None,
    }


def chosen(mesh: Mesh, hidden: int = HIDDEN, dtype: str = "bfloat16") -> list[dict[str, Any]]:
    """What the plan ``auto`` takes for messages of a few sizes, and why."""
    axis, kind = Axis(TENSOR, axis_size(mesh, TENSOR)), jnp.dtype(dtype)
    found = []
    for tokens, steps in ((1, 32), (8, 32), (64, 32), (512, 1), (8192, 1)):
        plan = fusion.plan(
            "auto", "-", tokens=tokens, hidden=hidden, dtype=kind, residual_dtype=kind, mesh=mesh, axis=axis,
            rules=ShardingRules(), peers_reachable=axis.size > 1 and peers_reachable(mesh), steps=steps,
        )  # fmt: skip
        boundary = plan.boundaries[0]
        entry = {"tokens": tokens, "hidden": hidden, "dtype": dtype, "implementation": boundary.implementation}
        found.append(entry | {"reason": boundary.reason})
    return found


def unavailable(mesh: Mesh) -> dict[str, str]:
    """Implementations that cannot run here, and why."""
    reasons = {name: why_not(mesh, name, 1, HIDDEN, "bfloat16") for name in IMPLEMENTATIONS}
    return {name: reason for name, reason in reasons.items() if reason is not None}
