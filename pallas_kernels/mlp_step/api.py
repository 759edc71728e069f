"""Public entry: an MLP without a gate for a few rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import matvec, selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.mlp_step import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
MOST_ROWS = 8
MOST_BLOCKS = 132  # multiprocessors of the whole H100 and H200 with NVLink


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call."""

    out_dtype: jnp.dtype
    max_blocks: int


def supported(*, rows: int, hidden: int, wide: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if not 1 <= rows <= MOST_ROWS:
        return f"needs 1 to {MOST_ROWS} rows; there are {rows}"
    for name, outputs, inputs in (("up", wide, hidden), ("down", hidden, wide)):
        if (reason := matvec.supported(rows=rows, outputs=outputs, inputs=inputs, dtype=dtype)) is not None:
            return f"{reason} ({name})"
    return None


def declined(*, rows: int, hidden: int, wide: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel."""
    reason = supported(rows=rows, hidden=hidden, wide=wide, dtype=dtype)
    return selection.declined("mlp_step", f"mlp_step, {rows} rows, {hidden} -> {wide} -> {hidden}", reason)


def mlp_step(
    x: Float[Array, "rows hidden"],
    up: Float[Array, "wide hidden"],
    down: Float[Array, "hidden wide"],
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    max_blocks: int | None = None,
) -> Float[Array, "rows hidden"]:
    """`relu(x @ up.T)^2 @ down.T` in one launch; each product is accumulated in float32 and rounded once, the square of
    what was rounded is rounded again. Whatever a row holds reaches no other row.

    The kernel's blocks wait for each other, so all must run at the same time. They do on a device that this process has
    for itself (or takes turns on as a whole) if calls of one program depend on each other, as a model's layers do: two
    independent ones may run at the same time and never end. `max_blocks` is for a device that is shared in parts.

    The kernel has the reference's gradient; under `vmap` the reference runs in its place.

    Args:
        x: [rows, hidden].
        up: [wide, hidden], of x's dtype.
        down: [hidden, wide], of x's dtype.
        out_dtype: x's dtype, if None, or float32.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run and is switched on.
        max_blocks: thread blocks that are sure to run at the same time; None: one for each multiprocessor.

    Returns:
        [rows, hidden] in out_dtype.

    Raises:
        ValueError: shapes or types do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    faults = []
    if x.ndim != 2:
        faults.append(f"x has shape {x.shape}; accepted: (rows, hidden)")
    hidden = x.shape[-1] if x.ndim else "hidden"
    if up.ndim != 2 or up.shape[1:] != x.shape[-1:]:
        faults.append(f"up has shape {up.shape}; accepted: (wide, {hidden})")
    if down.shape != up.shape[::-1]:
        faults.append(f"down has shape {down.shape}; accepted: {up.shape[::-1]}, that of up the other way round")
    for name, w in (("up", up), ("down", down)):
        if w.dtype != x.dtype:
            faults.append(f"{name} has dtype {w.dtype}; accepted: {x.dtype}, that of x")
    if out not in (x.dtype, jnp.float32):
        faults.append(f"out_dtype is {out}; accepted: {x.dtype}, that of x, or float32")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if max_blocks is not None and max_blocks < 1:
        faults.append(f"max_blocks is {max_blocks}; accepted: 1 or more")
    if faults:
        raise ValueError("mlp_step: " + "; ".join(faults))
    shape = dict(rows=x.shape[0], hidden=x.shape[1], wide=up.shape[0], dtype=x.dtype)
    if implementation is None:
        implementation = "mosaic_gpu" if declined(**shape) is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(**shape)) is not None:
        raise Unsupported(f"mlp_step: the kernel {reason}")
    plain = functools.partial(reference.mlp_step, out_dtype=out)
    if implementation == "reference":
        return plain(x, up, down)
    call = _Call(out, min(max_blocks or MOST_BLOCKS, _multiprocessors()))
    return transforms.as_of(plain, functools.partial(_launch, call))(x, up, down)


def _multiprocessors() -> int:
    """Of the GPUs that are here, parts of one and smaller kinds too; without any, the program is for a whole H200."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return MOST_BLOCKS
    return min(device.core_count for device in jax.local_devices())


@functools.partial(jax.jit, static_argnums=0)
def _launch(call: _Call, x, up, down):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    # Imported here: programs that never leave the CPU do not load the kernel compiler.
    from pallas_kernels.mlp_step import mosaic_gpu

    axes = selection.varying(x) | selection.varying(up) | selection.varying(down)
    operands = (selection.vary(v, axes) for v in (x, up, down))
    y = mosaic_gpu.mlp_step(*operands, out_dtype=call.out_dtype, max_blocks=call.max_blocks)
    return selection.vary(y, axes)  # a kernel's outputs carry no varying axes of their own
