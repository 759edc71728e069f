"""Public entry: all-reduce + residual add + RMSNorm as one operation inside `jax.shard_map`.

    new_residual = round(residual + sum over ranks of partial)        normed = RMSNorm(new_residual) * weight

reference.py says exactly what is computed, support.py which implementation can serve which call, choose.py which one is
fastest. This file checks arguments, picks, and makes every implementation look alike to the rest of JAX: the same types
under `check_vma`, the same gradient, the same behaviour under `vmap`.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from pallas_kernels.allreduce_rms_norm import reference, support
from pallas_kernels.allreduce_rms_norm.choose import choose
from pallas_kernels.allreduce_rms_norm.flags_state import FlagsState
from pallas_kernels.allreduce_rms_norm.probe import known_reachable
from pallas_kernels.allreduce_rms_norm.support import IMPLEMENTATIONS, PEER_MEMORY
from pallas_kernels.errors import Unsupported
from pallas_kernels.rms_norm.reference import add_rms_norm, normalise
from pallas_kernels.rms_norm.windows import DTYPES
from pallas_kernels.selection import vary, varying

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call."""

    implementation: str
    axis_name: str
    world: int
    eps: float
    unit_offset: bool
    out_dtype: jnp.dtype
    max_blocks: int | None
    varying: frozenset[str]  # axes over which the results differ, never axis_name


def allreduce_rms_norm(
    partial: Float[Array, "*tokens hidden"],
    residual: Float[Array, "*tokens hidden"],
    weight: Float[Array, " hidden"],
    *,
    axis_name: str,
    eps: float,
    implementation: str | Sequence[str] | None = None,
    unit_offset: bool = False,
    state: FlagsState | None = None,
    max_blocks: int | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"]]:
    """Sum `partial` over the devices of a mesh axis, add the residual, and apply RMSNorm.

    Call it inside `jax.shard_map`. Gradients follow the reference, with rounding taken as the identity; `vmap` works
    where the weight is not mapped.

    Args:
        partial: [..., hidden], this device's summand; differs over `axis_name`. bfloat16, float16 or float32.
        residual: [..., hidden], the residual stream, the same on all devices of the axis. bfloat16, float16 or float32.
        weight: [hidden] of the norm, the same on all devices of the axis; any float dtype.
        axis_name: the mesh axis to sum over. On an axis of one device nothing is communicated.
        eps: added to the mean square.
        implementation: "reference", "psum", "gather", "one_shot", "two_shot" or "flags": exactly this one, or an error.
            A sequence: the first of them that can serve the call. None: the fastest by measurement among those that
            can; the kernels that use peers' memory are considered once `peers_reachable` has approved a mesh of these
            axes.
        unit_offset: multiply by 1 + weight instead of by weight.
        state: needed by "flags", see `make_flags_state`; ignored by the others.
        max_blocks: cap on the thread blocks of one call. Blocks wait for their peers, so all must be resident at once:
            with N ranks on one GPU pass at most 132 // N.
        out_dtype: dtype of `normed`; the dtype of `partial` if None.

    Returns:
        (normed [..., hidden] in out_dtype, new_residual [..., hidden] in the residual's dtype), the same on every
        device of the axis. All implementations but "psum" give the same bits of new_residual.

    Raises:
        ValueError: an argument is wrong; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call (static, before anything is traced).
    """
    world, tracked = _axis(axis_name)
    faults = _faults(partial, residual, weight, axis_name, world, tracked, implementation, max_blocks)
    if faults:
        raise ValueError("allreduce_rms_norm: " + "; ".join(faults))
    shape = partial.shape
    tokens = partial.size // shape[-1] if shape[-1] else 0
    name = _pick(partial, residual, tokens, implementation, world, state, max_blocks)
    # Results vary over every axis that any operand varies over, other than the one that is summed.
    axes = (varying(partial) | varying(residual)) - {axis_name}
    call = _Call(
        name,
        axis_name,
        world,
        float(eps),
        unit_offset,
        jnp.dtype(partial.dtype if out_dtype is None else out_dtype),
        max_blocks,
        axes,
    )
    partial = vary(partial.reshape(tokens, shape[-1]), axes)
    residual = vary(residual.reshape(tokens, shape[-1]), axes)
    normed, new_residual = _operation(call, partial, residual, weight, state if name == "flags" else None)
    return normed.reshape(shape), new_residual.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operation(call, partial, residual, weight, state):
    return _batchable(call)(partial, residual, weight, state)


def _forward(call, partial, residual, weight, state):
    normed, new_residual = _batchable(call)(partial, residual, weight, state)
    # The zero-size slice carries the partial's type (dtype and varying axes) to the backward rule.
    return (normed, new_residual), (new_residual, weight, partial[:0])


def _backward(call, saved, cotangents):
    """The gradient of the reference, from what was rounded: no partial is kept, nothing is communicated."""
    new_residual, weight, like_partial = saved
    d_normed, d_new_residual = cotangents

    def norm(y, w):
        return normalise(y, w, eps=call.eps, unit_offset=call.unit_offset, out_dtype=call.out_dtype)

    _, pull = jax.vjp(norm, new_residual.astype(jnp.float32), weight)
    d_total, d_weight = pull(d_normed)
    d_total = d_total + d_new_residual.astype(jnp.float32)
    d_partial = vary(d_total.astype(like_partial.dtype), varying(like_partial))
    return d_partial, d_total.astype(new_residual.dtype), d_weight, None


_operation.defvjp(_forward, _backward)


def _batchable(call: _Call):
    """The call as a function that `vmap` maps by putting the mapped axis in front of the tokens."""

    @custom_vmap
    def run(partial, residual, weight, state):
        return _run(call, partial, residual, weight, state)

    @run.def_vmap
    def rule(size, mapped, partial, residual, weight, state):
        if mapped[2] or any(jax.tree.leaves(mapped[3])):
            raise Unsupported("allreduce_rms_norm: vmap over the weight or the state is not supported; use a loop")
        partial = partial if mapped[0] else jnp.broadcast_to(partial, (size, *partial.shape))
        residual = residual if mapped[1] else jnp.broadcast_to(residual, (size, *residual.shape))
        shape = partial.shape
        if state is not None:
            fault = state.fault(
                tokens=size * shape[1],
                hidden=shape[2],
                dtype=partial.dtype,
                world=call.world,
                max_blocks=call.max_blocks,
            )
            if fault is not None:
                raise Unsupported(f"allreduce_rms_norm: under vmap over {size}: {fault}")
        outs = _batchable(call)(partial.reshape(-1, shape[2]), residual.reshape(-1, shape[2]), weight, state)
        return tuple(out.reshape(shape) for out in outs), (True, True)

    return run


@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, partial, residual, weight, state):
    # A jitted function of its own: the layers of a model that make the same call share one trace and one lowering.
    kwargs: dict[str, Any] = dict(eps=call.eps, unit_offset=call.unit_offset, out_dtype=call.out_dtype)
    if call.world == 1:
        if call.axis_name in varying(partial):
            partial = lax.psum(partial, call.axis_name)  # changes the type only; specs P() on such an axis avoid it
        return add_rms_norm(partial.astype(jnp.float32), residual, weight, **kwargs)
    kwargs |= dict(axis_name=call.axis_name)
    if call.implementation not in PEER_MEMORY:
        # XLA's all_gather and the plain expression are the meaning, and also what "gather" runs: a local kernel behind
        # the gather was slower than XLA's fusion at nearly every size (benchmarks/NOTES.md).
        function = reference.psum if call.implementation == "psum" else reference.exact
        return function(partial, residual, weight, **kwargs)
    if partial.shape[0] == 0:
        # Nothing to send, so no launch: every device agrees, the shape is static.
        normed = vary(jnp.zeros(partial.shape, call.out_dtype), call.varying)
        return normed, residual
    outs = _kernel(call, partial, residual, weight, state, kwargs)
    return tuple(vary(out, call.varying) for out in outs)  # a kernel's outputs carry no varying axes of their own


def _kernel(call: _Call, partial, residual, weight, state, kwargs):
    # Imported here: programs that never leave the CPU do not load the kernel compiler.
    from pallas_kernels.allreduce_rms_norm.flags import flags
    from pallas_kernels.allreduce_rms_norm.one_shot import one_shot
    from pallas_kernels.allreduce_rms_norm.two_shot import two_shot

    kwargs |= dict(world=call.world, max_blocks=call.max_blocks)
    if call.implementation == "flags":
        del kwargs["axis_name"]  # the state knows its place in the mesh
        return flags(partial, residual, weight, state, **kwargs)
    function = one_shot if call.implementation == "one_shot" else two_shot
    return function(partial, residual, weight, **kwargs)


def _axis(axis_name: str) -> tuple[int, bool]:
    """Size of the axis, and whether JAX tracks here what varies over it (`check_vma`)."""
    try:
        return lax.axis_size(axis_name), axis_name in varying(lax.axis_index(axis_name))
    except NameError:
        raise ValueError(
            f"allreduce_rms_norm: axis_name is {axis_name!r}, which is no mesh axis here; call it inside jax.shard_map "
            "over a mesh that has this axis (for one device without a mesh there is pallas_kernels.rms_norm)"
        ) from None


def _faults(partial, residual, weight, axis_name, world, tracked, implementation, max_blocks) -> list[str]:
    faults = []
    for name, value in (("partial", partial), ("residual", residual)):
        if value.dtype not in DTYPES:
            faults.append(f"{name} has dtype {value.dtype}; accepted: bfloat16, float16, float32")
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        faults.append(f"weight has dtype {weight.dtype}; accepted: any float")
    if partial.ndim < 1:
        faults.append(f"partial has shape {partial.shape}; accepted: [..., hidden]")
    elif weight.shape != partial.shape[-1:]:
        faults.append(f"weight has shape {weight.shape}; accepted: {partial.shape[-1:]}, the last dimension of partial")
    if residual.shape != partial.shape:
        faults.append(f"residual has shape {residual.shape}; accepted: {partial.shape}, the shape of partial")
    if tracked:
        if jax.typeof(partial).manual_axis_type.unreduced:
            faults.append("partial has JAX's unreduced type; accepted: a value that varies over the axis")
        elif world > 1 and axis_name not in varying(partial):
            faults.append(
                f"partial is the same on all devices of {axis_name!r}; summing it would multiply it by {world}"
            )
        for name, value in (("residual", residual), ("weight", weight)):
            if axis_name in varying(value):
                faults.append(
                    f"{name} differs over {axis_name!r}; accepted: a value that is the same on all its devices"
                )
    names = implementation if isinstance(implementation, (list, tuple)) else [implementation]
    if implementation is not None and (not names or any(name not in IMPLEMENTATIONS for name in names)):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, a sequence, None")
    if max_blocks is not None and max_blocks < 1:
        faults.append(f"max_blocks is {max_blocks}; accepted: 1 or more")
    return faults


def _pick(partial, residual, tokens, implementation, world, state, max_blocks) -> str:
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    platform = getattr(device, "platform", None) or jax.default_backend()
    kind = getattr(device, "device_kind", None) or jax.devices()[0].device_kind

    def reason_against(name: str) -> str | None:
        if name not in PEER_MEMORY or world == 1:
            return None
        if name == "flags" and state is None:
            return "needs state=, see make_flags_state"
        if not mesh.are_all_axes_manual:
            return "needs a shard_map over every axis of the mesh"
        return support.supported(
            name,
            tokens=tokens,
            hidden=partial.shape[-1],
            dtype=partial.dtype,
            residual_dtype=residual.dtype,
            world=world,
            mesh=mesh,
            platform=platform,
            processes_reachable=True,  # an explicit choice vouches for it; without one, known_reachable is asked below
            state=state,
            max_blocks=max_blocks,
        )

    if implementation is None:
        reachable = known_reachable(mesh)
        usable = [n for n in IMPLEMENTATIONS if n not in PEER_MEMORY or (reachable and reason_against(n) is None)]
        name, reason = choose(
            tokens=tokens,
            hidden=partial.shape[-1],
            dtype=partial.dtype,
            world=world,
            device_kind=kind,
            available=usable,
        )
        logger.debug("allreduce_rms_norm %d x %d: %s (%s)", tokens, partial.shape[-1], name, reason)
        return name
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    refused = []
    for name in names:
        reason = reason_against(name)
        if reason is None:
            if refused:
                logger.info("allreduce_rms_norm %d x %d: %s (%s)", tokens, partial.shape[-1], name, "; ".join(refused))
            return name
        refused.append(f"{name} {reason}")
    raise Unsupported("allreduce_rms_norm: " + "; ".join(refused))
