"""Which implementation can serve which call: static facts only, so that every rank gets the same answer."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.allreduce_rms_norm import layout
from pallas_kernels.allreduce_rms_norm.flags_state import ONE_PROCESS, FlagsState
from pallas_kernels.rms_norm.windows import DTYPES, row_fault

IMPLEMENTATIONS = ("reference", "psum", "gather", "one_shot", "two_shot", "flags")
PEER_MEMORY = ("one_shot", "two_shot", "flags")
_GPU = ("gpu", "cuda")


def supported(
    implementation: str,
    *,
    tokens: int,
    hidden: int,
    dtype: jax.typing.DTypeLike,
    residual_dtype: jax.typing.DTypeLike,
    world: int,
    mesh: Any,
    platform: str,
    processes_reachable: bool,
    state: FlagsState | None = None,
    max_blocks: int | None = None,
) -> str | None:
    """Why `implementation` cannot serve this call, or None if it can. Traces nothing and touches no device.

    Args:
        implementation: one of IMPLEMENTATIONS.
        tokens: rows per device.
        hidden: row length.
        dtype: dtype of the partials.
        residual_dtype: dtype of the residual stream.
        world: size of the tensor axis.
        mesh: the Mesh, or an AbstractMesh (then the order of the devices is not checked).
        platform: "gpu", "cuda", "cpu", ...: where the program will run.
        processes_reachable: what `peers_reachable(mesh)` said at start.
        state: the state that a `flags` call would be given; without one only the other conditions are checked.
        max_blocks: the block cap of the call.

    Raises:
        ValueError: there is no such implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}")
    if implementation not in PEER_MEMORY or world == 1:
        return None
    dtype, residual_dtype = jnp.dtype(dtype), jnp.dtype(residual_dtype)
    if platform not in _GPU:
        return f"needs GPUs; this program runs on {platform}"
    for name, value in (("partial", dtype), ("residual", residual_dtype)):
        if value not in DTYPES:
            return f"needs bfloat16, float16 or float32; {name} is {value}"
    if (reason := row_fault(hidden)) is not None:
        return reason
    if tokens * hidden >= 2**31:
        return f"needs fewer than 2**31 elements; tokens x hidden is {tokens * hidden}"
    if implementation != "flags":
        need = smem_bytes(implementation, hidden, dtype, residual_dtype, world)
        if need > layout.SMEM_BYTES:
            return f"needs {need} bytes of shared memory for one row of {world} devices; there are {layout.SMEM_BYTES}"
    if (reason := mesh_fault(mesh)) is not None:
        return reason
    if not processes_reachable:
        return "the devices cannot read each other's memory (see peers_reachable)"
    if implementation == "flags" and (
        mesh.is_multi_process if isinstance(mesh, jax.sharding.Mesh) else jax.process_count() > 1
    ):
        return ONE_PROCESS
    if implementation == "flags" and state is not None:
        return state.fault(tokens=tokens, hidden=hidden, dtype=dtype, world=world, max_blocks=max_blocks)
    return None


def smem_bytes(
    implementation: str, hidden: int, dtype: jnp.dtype, residual_dtype: jnp.dtype, world: int, slots: int = 1
) -> int:
    """Shared memory of one block in bytes, scratch of the reductions and barriers included."""
    rows = slots * world * hidden * dtype.itemsize
    if implementation == "two_shot":
        rows += hidden * (dtype.itemsize + residual_dtype.itemsize)
    return rows + 4096


def mesh_fault(mesh: Any) -> str | None:
    """Why peer-memory kernels cannot run on this mesh, or None.

    Mosaic GPU numbers the devices of a mesh by their position in it and expects ids 0..n-1 in that order.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    ids = [int(device.id) for device in mesh.devices.flat]
    if ids != list(range(math.prod(mesh.devices.shape))):
        return f"needs a mesh whose device ids are 0..{len(ids) - 1} in row-major order; they are {_short(ids)}"
    for device in mesh.devices.flat:
        capability = getattr(device, "compute_capability", None)
        if capability is not None and float(capability) < 9.0:
            return f"needs compute capability 9.0 (Hopper) or newer; {device} has {capability}"
    return None


def _short(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:16])) + (", ..." if len(ids) > 16 else "")
