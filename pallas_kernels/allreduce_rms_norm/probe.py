"""Can the devices of a mesh read each other's memory? Asked once per process and mesh, before anything is traced.

One process that owns all GPUs always can. With one process per GPU it depends on NCCL: 2.32.3 hands out peer pointers,
2.28.9 does not ("ncclGetPeerDevicePointer ... unhandled system error").
"""

import ctypes
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.allreduce_rms_norm.support import mesh_fault
from pallas_kernels.rms_norm.windows import THREADS

logger = logging.getLogger(__name__)
_answers: dict[Mesh, str | None] = {}
NCCL_THAT_WORKS = 23203  # NCCL's own numbering: 2.32.3
NCCL_THAT_FAILS = 22809


def peers_reachable(mesh: Mesh) -> bool:
    """Whether every device of `mesh` can read every other's memory from inside a kernel.

    The first call for a mesh runs a tiny kernel on it, so with several processes all of them must call it together; the
    answer is the same in all of them, and is kept. False on anything but GPUs. The reason is in `unreachable_reason`.
    """
    if mesh not in _answers:
        reason = _local_answer(mesh)
        if jax.process_count() > 1 and mesh.is_multi_process:
            from jax.experimental import multihost_utils

            if not multihost_utils.process_allgather(np.array([reason is None])).all() and reason is None:
                reason = "another process cannot reach its peers' memory"
        _answers[mesh] = reason
        if reason is not None:
            logger.info("kernels that use peers' memory are off: %s", reason)
    return _answers[mesh] is None


def unreachable_reason(mesh: Mesh) -> str | None:
    """Why `peers_reachable(mesh)` is False, or None if it is True."""
    return None if peers_reachable(mesh) else _answers[mesh]


def known_reachable(mesh: Mesh | AbstractMesh) -> bool:
    """Whether meshes of these axes have been asked about in this process, and all of them could."""
    shape = tuple(mesh.shape.items())
    answers = [reason for known, reason in _answers.items() if tuple(known.shape.items()) == shape]
    return bool(answers) and all(reason is None for reason in answers)


def nccl_version() -> int | None:
    """Version of the NCCL library of this process (major*10000 + minor*100 + patch), or None if it cannot be told."""
    try:
        version = ctypes.c_int()
        library = ctypes.CDLL("libnccl.so.2")
        return version.value if library.ncclGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def _spelled(version: int) -> str:
    """23203 -> 2.32.3"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _local_answer(mesh: Mesh) -> str | None:
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return f"the mesh is made of {mesh.devices.flat[0].platform} devices"
    if (reason := mesh_fault(mesh)) is not None:
        return reason
    if mesh.size == 1:
        return None
    if mesh.is_multi_process:
        version = nccl_version()
        if version is not None and version <= NCCL_THAT_FAILS:
            return (
                f"NCCL {_spelled(version)} gives processes no pointers to each other's memory; "
                f"{_spelled(NCCL_THAT_WORKS)} does"
            )
    try:
        expected = np.roll(np.arange(mesh.size, dtype=np.int32), -1) + 1
        values = _read_neighbours(mesh)
        for shard in values.addressable_shards:
            position = shard.index[0].start or 0
            if int(np.asarray(shard.data)[0, 0]) != expected[position]:
                return f"device {shard.device} read a wrong value from its neighbour's memory"
    except jax.errors.JaxRuntimeError as error:
        return f"a kernel could not read a peer's memory: {str(error).strip().splitlines()[0][:300]}"
    return None


def _read_neighbours(mesh: Mesh) -> jax.Array:
    """Every device holds its number + 1 in the flattened mesh, and reads that of the next one through a peer
    reference."""
    numbers = np.repeat(np.arange(1, mesh.size + 1, dtype=np.int32)[:, None], THREADS, axis=1)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    x = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    return jax.block_until_ready(neighbour_program(mesh)(x))


def neighbour_program(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """The probe as a jitted function of int32 [devices, 128], sharded over all axes of the mesh."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    axes = tuple(mesh.axis_names)
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    def neighbour(step: int) -> dict[str, jax.Array]:
        """The next (1) or last (-1) device of the flattened mesh, by its place along each axis."""
        number = jnp.int32(0)
        for axis in axes:
            number = number * jnp.int32(mesh.shape[axis]) + lax.axis_index(axis)
        number = lax.rem(number + jnp.int32(mesh.size + step), jnp.int32(mesh.size))
        place = {}
        for axis in reversed(axes):
            size = jnp.int32(mesh.shape[axis])
            place[axis], number = lax.rem(number, size), lax.div(number, size)
        return place

    def kernel(x_ref, out_ref, read):
        out_ref[...] = plgpu.load(plgpu.remote_ref(x_ref, neighbour(1)), layout=layout)
        # Nobody gives its input back to XLA while the device before it still reads.
        pl.semaphore_signal(read, 1, device_id=neighbour(-1))
        pl.semaphore_wait(read, value=1, decrement=False)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
        scratch_types=dict(read=plgpu.SemaphoreType.REGULAR),
        grid=(1,),
        grid_names=("block",),
    )
    spec = PartitionSpec(axes)
    return jax.jit(jax.shard_map(lambda x: call(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
