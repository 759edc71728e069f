"""What JAX's Mosaic GPU interpreter lacks for kernels that talk to each other, added for tests.

JAX interprets Mosaic GPU kernels on the CPU, under shard_map on virtual devices, but knows neither semaphores nor
references to the memory of peers. This module adds both, by patching private parts of JAX (0.11.2 and 0.12), and faults
to look for:

* the barrier over all devices that XLA puts in front of a kernel that uses peers' memory;
* `delays`: devices that start late;
* `poison`: as soon as one device has finished, its inputs are overwritten with NaN, as XLA may do. A kernel that lets a
  device go while a peer still reads from it then produces NaN;
* a deadlock is an error after a minute instead of a hang.

It also lacks two forms of matrix products (wgmma): the left operand in registers (before jax 0.12.1), and an
accumulator that starts from a value (`pl.run_state` of `plgpu.ACC.init`). Products are computed at once, so a missing
wait is not seen.

Inline code (plgpu.inline_mgpu) is skipped by the interpreter. Kernels run under `shard_map(check_vma=False)` only.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import textwrap
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax._src.state import discharge

FIRST_OPERAND = 100  # the interpreter's number of the buffer of a kernel's first operand
DEADLOCK_SECONDS = 60


@dataclasses.dataclass
class Faults:
    """What goes wrong on purpose during one run."""

    delays: dict[int, float] = dataclasses.field(default_factory=dict)  # device -> seconds that it starts late
    poison: bool = False
    entry_barrier: bool = True


_faults = Faults()
_devices = threading.local()
_changed = threading.Condition()
_counts: dict[tuple, int] = {}  # semaphore on a device -> value
_clocks: dict[tuple, object] = {}  # semaphore on a device -> vector clock of its signallers
_visits: dict[tuple, int] = {}  # device -> how often it passed the barrier around the kernel
_installed = False


@contextlib.contextmanager
def interpreter(*, detect_races: bool = False, **faults):
    """Gives the `interpret=` argument for kernels that run inside; all state is fresh."""
    global _faults
    _install()
    _faults = Faults(**faults)
    _reset()
    try:
        yield InterpretGPUParams(detect_races=detect_races)
    finally:
        _faults = Faults()
        _reset()


def races_found() -> bool:
    return gpu_callbacks.get_races().races_found


def _reset():
    _counts.clear()
    _clocks.clear()
    _visits.clear()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def _semaphore(key, device=None):
    key = np.asarray(key)  # memory space, device, block, thread, reference count, buffer
    return (int(key[1]) if device is None else int(device), int(key[2]), int(key[3]), int(key[5]))


def _signal(token, thread, key, device, amount, *, mesh_location=None):
    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None
    semaphore = _semaphore(key, device)
    with _changed:
        _counts[semaphore] = _counts.get(semaphore, 0) + int(amount)
        if clock is not None:
            if semaphore in _clocks:
                _clocks[semaphore].update(clock)
            else:
                _clocks[semaphore] = clock.copy()
        _changed.notify_all()
    return token


def _wait(token, thread, key, value, decrement):
    memory = gpu_callbacks._get_shared_memory()
    semaphore, value, began = _semaphore(key), int(value), time.monotonic()
    with _changed:
        while _counts.get(semaphore, 0) < value:
            _changed.wait(0.2)
            memory.check_failed()
            if time.monotonic() - began > DEADLOCK_SECONDS:
                raise RuntimeError(f"deadlock: semaphore {semaphore} is {_counts.get(semaphore, 0)}, awaited {value}")
        if int(decrement):
            _counts[semaphore] -= value
        clock = _clocks.get(semaphore)
    if memory.detect_races and clock is not None:
        with memory.lock:
            memory.clocks[thread].update(clock)
    return token


def _device_number(info, device_id):
    """Flat number of the device that a kernel names by mesh axis, by tuple or by number."""
    axes = dict(info.axis_sizes)
    place = dict(info.axis_indices)
    if isinstance(device_id, dict):
        place.update(device_id)
    elif isinstance(device_id, (tuple, list)):
        place = dict(zip(axes, device_id, strict=True))
    else:
        (only,) = axes
        place = {only: device_id}
    number = jnp.int32(0)
    for axis, size in axes.items():
        number = number * size + jnp.asarray(place[axis], jnp.int32)
    return number


def _interpret_signal(self, equation, token, values):
    semaphore, transforms, amount, device_id, _ = jax.tree.unflatten(equation.params["args_tree"], values())
    assert not transforms
    info = self.device_info
    device = jnp.int32(info.device_id) if device_id is None else _device_number(info, device_id)
    token = callback.io_callback(
        _signal, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, semaphore, device, amount
    )
    return token, []


def _interpret_wait(self, equation, token, values):
    semaphore, transforms, value, decrement = jax.tree.unflatten(equation.params["args_tree"], values())
    assert not transforms
    token = callback.io_callback(
        _wait, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, semaphore, value, jnp.int32(decrement)
    )
    return token, []


@gpu_callbacks.fail_on_exception
def _multiply_registers(*, token, mesh_location, thread, acc, a, b, b_transforms, source_info):
    """acc += a @ b with a value on the left, as `gpu_callbacks.wgmma` does it with references."""
    memory = gpu_callbacks._get_shared_memory()
    logging = jaxpr_interpret.memory.GPULoggingInfo(mesh_location, thread, source_info)
    acc, b = (gpu_callbacks.HostAllocationKey.from_array(key) for key in (acc, b))
    b_transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(b_transforms))
    right, _, _ = memory.get_buffer_content(b, memory.access(b, b_transforms), thread, logging_info=logging)
    whole = memory.access(acc, ())
    value, _, _ = memory.get_buffer_content(acc, whole, thread, logging_info=logging)
    value = value + np.matmul(np.asarray(a), right, dtype=value.dtype)
    memory.store_buffer_content(acc, whole, value, thread, logging_info=logging)
    return token


def _interpret_product(self, equation, token, values):
    if isinstance(equation.invars[1].aval, jax_core.ShapedArray):
        acc, a, b, *leaves = values()
        assert not equation.params["acc_transforms_tree"] and not equation.params["a_transforms_tree"]
        token = callback.io_callback(
            functools.partial(_multiply_registers, source_info=equation.source_info),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            acc=acc,
            a=a,
            b=b,
            b_transforms=jax.tree.unflatten(equation.params["b_transforms_tree"], leaves),
        )
        return token, []
    return self._interpret_wgmma_ref_p(equation, token, values)


def _interpret_run_state(self, equation, token, values):
    """Accumulators are run as scoped ones that start from 0; what they started from is added behind.

    Values that the body closes over come as references that hold them: those are discharged.
    """
    values = values()
    is_acc = [isinstance(v.aval, gpu_core.WGMMAAbstractAccumulatorRef) for v in equation.params["jaxpr"].invars]
    held = [
        isinstance(v.aval, jax_core.ShapedArray) and not acc for v, acc in zip(equation.outvars, is_acc, strict=True)
    ]
    jaxpr = discharge.discharge_state(equation.params["jaxpr"], should_discharge=held)
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts
    accs = [v for v, acc in zip(jaxpr.invars, is_acc, strict=True) if acc]
    others = [v for v, acc in zip(jaxpr.invars, is_acc, strict=True) if not acc]
    sums = [jax_core.Var(v.aval.inner_aval) for v in accs]
    reads = [
        jax_core.new_jaxpr_eqn([v], [out], gpu_primitives.wgmma_accumulator_deref_p, dict(wait_n=0), set())
        for v, out in zip(accs, sums, strict=True)
    ]
    body = types.SimpleNamespace(
        constvars=[*jaxpr.constvars, *others], invars=accs, eqns=[*jaxpr.eqns, *reads], outvars=[*jaxpr.outvars, *sums]
    )
    scoped = types.SimpleNamespace(
        primitive=pallas_primitives.run_scoped_p,
        params=dict(jaxpr=body, collective_axes=(), ref_transforms=((),) * len(accs)),
        source_info=equation.source_info,
    )
    rest = [*consts, *(value for value, acc in zip(values, is_acc, strict=True) if not acc)]
    token, out = self._interpret_run_scoped_p(scoped, token, lambda: rest)
    kept, added = iter(out[: sum(held)]), iter(out[sum(held) :])
    results = []
    for value, acc, changed in zip(values, is_acc, held, strict=True):
        results.append(value + next(added) if acc else next(kept) if changed else value)
    return token, results


def _around_kernel(token, device):
    """Called once before and once after the kernel on each device."""
    memory = gpu_callbacks._get_shared_memory()
    number = int(np.asarray(device.device_id))
    with _changed:
        visit = _visits.get((id(memory), number), 0)
        _visits[id(memory), number] = visit + 1
    if visit == 0:
        if _faults.entry_barrier:
            memory.barrier.wait()
            memory.update_clocks(list(memory.all_concurrent_threads))
            memory.barrier.wait()
        time.sleep(_faults.delays.get(number, 0))
        return token
    memory.update_clocks_for_device_barrier(device)
    if _faults.poison:
        with memory.lock:
            for key, buffer in memory.mem.items():
                if key.device_id == number and key.buffer_id == FIRST_OPERAND and hasattr(buffer, "content"):
                    buffer.content[...] = np.nan
    return token


def _install():
    global _installed
    if _installed:
        return
    _installed = True
    _add_primitives()
    _add_peer_references()
    gpu_callbacks._update_clocks_for_device_barrier = gpu_callbacks.fail_on_exception(_around_kernel)

    uninitialized = jaxpr_interpret.get_uninitialized_array

    def get_uninitialized_array(shape, dtype, *rest):
        if jnp.issubdtype(dtype, pallas_core.semaphore_dtype):
            return jnp.zeros(shape, jnp.int32)
        return uninitialized(shape, dtype, *rest)

    jaxpr_interpret.get_uninitialized_array = get_uninitialized_array

    # JAX looks at the barriers of all devices as soon as one device is done, and then forgets them; others still run.
    check = shared_memory.GPUSharedMemory.assert_no_barriers_allocated

    def assert_no_barriers_allocated(self):
        if self.num_devices > 1:
            self.barrier.wait()
        check(self)

    shared_memory.GPUSharedMemory.assert_no_barriers_allocated = assert_no_barriers_allocated

    def cluster_finished(*, token):
        memory = gpu_callbacks._get_shared_memory()
        if memory.num_devices == 1:
            memory.reset_per_cluster_state()
        else:
            with memory.lock:
                memory.named_barriers = {}
        return token

    gpu_callbacks.cluster_finished = cluster_finished


def _add_primitives():
    """More cases in the `match` statement of the interpreter's main loop, in front of its own."""
    source = textwrap.dedent(inspect.getsource(jaxpr_interpret.JaxprInterpreter.interpret))

    modules = dict(pallas_primitives=pallas_primitives, gpu_primitives=gpu_primitives, discharge=discharge)
    handlers = {
        "semaphore_signal_p": _interpret_signal,
        "semaphore_wait_p": _interpret_wait,
        "run_state_p": _interpret_run_state,
    }
    if "a_is_value" not in inspect.signature(gpu_callbacks.wgmma).parameters:
        handlers["wgmma_ref_p"] = _interpret_product

    def cases(name):
        return " | ".join(f"{label}.{name}" for label, module in modules.items() if hasattr(module, name))

    (first,) = re.findall(r"^ *case lax.axis_index_p:\n", source, re.M)
    indent = first[: first.index("case")]
    added = "".join(
        f"{indent}case {cases(name)}:\n{indent}  token, out = _on_{name}(self, eqn, token, deferred_invals)\n"
        for name in handlers
    )
    source = source.replace(first, added + first)
    namespace = jaxpr_interpret.__dict__ | modules | {f"_on_{name}": handler for name, handler in handlers.items()}
    exec(compile(source, "<interpreter with semaphores>", "exec"), namespace)
    interpret = namespace["interpret"]

    def with_device(self, *args):
        before = getattr(_devices, "info", None)
        _devices.info = self.device_info
        try:
            return interpret(self, *args)
        finally:
            _devices.info = before

    jaxpr_interpret.JaxprInterpreter.interpret = with_device
    _add_peer_references.namespaces = [jaxpr_interpret.__dict__, namespace]


def _add_peer_references():
    """A peer's buffer has the same number on the peer: every device allocates in the same order."""
    resolve = jaxpr_interpret.resolve_ref

    def resolve_ref(aval, key, transforms):
        key, transforms = resolve(aval, key, transforms)
        local = []
        for transform in transforms:
            if isinstance(transform, gpu_core.PeerMemRef):
                key = key.at[1].set(_device_number(_devices.info, transform.device_id))
            else:
                local.append(transform)
        return key, tuple(local)

    for namespace in _add_peer_references.namespaces:
        namespace["resolve_ref"] = resolve_ref
