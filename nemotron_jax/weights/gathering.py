"""A model that is spread over several processes, written by process 0: the others send what it asks for.

Process 0 alone runs the writers, so files, their order, and what an interruption leaves are those of one process, and
the folder need not be on a disk that all of them see. Where a writer reads rows that only devices of another process
hold, process 0 says to all which ones, and the first process that has them sends them: a buffer at a time, from its
first device to process 0's. So each process takes host memory for its own shares of two parameters and a buffer, and
each of the two devices for a buffer.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nemotron_jax import processes
from nemotron_jax.parameters import aligned
from nemotron_jax.runtime import NemotronH
from nemotron_jax.weights.held import Held
from nemotron_jax.weights.source import DTYPES

BUFFERS = (64 << 10, 1 << 20, 16 << 20)  # bytes; the smallest that holds what is to be sent, or several of the last
OK, FAULT = 0, 1
HEADER = 8  # bytes of a buffer before its content; the first says OK or FAULT


def write_by_first(model: NemotronH, write: Callable[[Held], None]) -> None:
    """Call ``write`` with the model's tensors: in this process, or for a model over several in process 0 alone.

    Returns when all is written. All processes call it together; a fault in one of them is raised in all.

    Raises:
      ValueError: if the model is abstract, or its processes have not joined through processes.py; or what ``write``
        raised.
    """
    held = Held(model)
    if all(array.is_fully_addressable for array in held.arrays):
        write(held)
        return
    if not processes.active():
        raise ValueError(
            "part of this model's weights is on devices of another process; accepted: a mesh of this process alone, or "
            "processes that have found each other through nemotron_jax.processes.join"
        )
    tensors = {name: (t.name, t.dtype, t.shape) for name, t in held.tensors.items()}
    processes.agree_on_content("the tensors to write", tensors)
    shared = _Shared(model)
    if processes.first():
        shared.lead(write)
    else:
        shared.follow()


class _Shared(Held):
    """The tensors of a model over several processes: whole in process 0."""

    def __init__(self, model: NemotronH):
        super().__init__(model)
        self._turn = threading.Lock()  # one request after the other, in the order in which the others hear of them
        devices = list(model.mesh.devices.flat)
        # Of each rank's devices the one whose process sends; process 0's own where it has one.
        self._owner: dict[int, int] = {}
        for device in sorted(devices, key=lambda d: d.process_index):
            self._owner.setdefault(self.ranks[device], device.process_index)
        platform = jax.devices(devices[0].platform)
        self._device = {d.process_index: d for d in reversed(platform)}

    def lead(self, write: Callable[[Held], None]) -> None:
        try:
            write(self)
        except BaseException as error:
            with self._turn:
                processes.tell_others({"end": str(error) or repr(error)})
            raise
        processes.tell_others({"end": ""})

    def follow(self) -> None:
        """Send what process 0 asks for until it is done.

        Raises:
          ValueError: if it failed, with its reason.
        """
        while "end" not in (request := processes.told()):
            if request["owner"] == processes.index():
                self._send(request["name"], request["place"], request["window"])
        if request["end"]:
            raise ValueError(request["end"])

    def part(self, name: str, place: int, window: Sequence[tuple[int, int]]) -> np.ndarray:
        index, placed = self._places[name]
        layout = self.model.parameters[index].layout
        owner = min(self._owner.values()) if layout.replicated else self._owner[placed[place][0]]
        if owner == processes.index():
            return super().part(name, place, window)
        dtype = DTYPES[self.tensors[name].dtype]
        out = np.empty([stop - start for start, stop in window], dtype)
        with self._turn:
            processes.tell_others({"owner": owner, "name": name, "place": place, "window": list(window)})
            self._receive(owner, out.reshape(-1).view(np.uint8))
        return out

    def _send(self, name: str, place: int, window: Sequence[tuple[int, int]]) -> None:
        size, state = math.prod(stop - start for start, stop in window) * DTYPES[self.tensors[name].dtype].itemsize, OK
        try:
            content = np.ascontiguousarray(super().part(name, place, window)).reshape(-1).view(np.uint8)
        except Exception as error:  # process 0 waits for an answer
            fault = f"process {processes.index()} cannot read {name}: {error!r}".encode()
            state, content = FAULT, np.frombuffer(fault[: BUFFERS[0] - HEADER], np.uint8)
        for start, _, buffer in _buffers(size):
            part = content[start : start + buffer.size - HEADER]
            buffer[0], buffer[HEADER : HEADER + part.size] = state, part
            self._move(processes.index(), buffer)
            if state == FAULT:
                break

    def _receive(self, owner: int, out: np.ndarray) -> None:
        for start, stop, buffer in _buffers(out.size):
            found = self._move(owner, buffer)
            if found[0] == FAULT:
                raise ValueError(found[HEADER:].tobytes().rstrip(b"\0").decode(errors="replace"))
            out[start:stop] = found[HEADER : HEADER + stop - start]

    def _move(self, owner: int, buffer: np.ndarray) -> np.ndarray:
        """What the owner has in its buffer, in process 0; both call it."""
        program, sharding = _moving(self._device[owner], self._device[0], buffer.size)
        mine = jax.device_put(buffer, self._device[processes.index()])
        both = jax.make_array_from_single_device_arrays((2 * buffer.size,), sharding, [mine])
        (moved,) = program(both).addressable_shards
        return np.asarray(moved.data)


def _buffers(size: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """[start, stop) of so many bytes, and a buffer for it."""
    sizes = BUFFERS[:1] if processes.share_a_gpu() else BUFFERS
    largest = next((n for n in sizes if size + HEADER <= n), sizes[-1])
    for start in range(0, size, largest - HEADER):
        buffer = aligned((largest,), np.uint8)
        buffer[:] = 0
        yield start, min(start + largest - HEADER, size), buffer


@functools.cache
def _moving(source: jax.Device, target: jax.Device, size: int) -> tuple[Callable, NamedSharding]:
    """A program of two devices, each of which has ``size`` bytes: the target gets the source's."""
    sharding = NamedSharding(Mesh(np.array([target, source]), ("pair",)), P("pair"))
    move = functools.partial(lax.ppermute, axis_name="pair", perm=[(1, 0)])
    return jax.jit(jax.shard_map(move, mesh=sharding.mesh, in_specs=P("pair"), out_specs=P("pair"))), sharding
