"""Public entry: RMSNorm over each group of y * silu(z), z being columns of a Mamba-2 block's packed projection."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.gated_norm import reference, typed

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
FEWEST_ROWS = 16  # no tile of the kernel has more
LANE_VALUES = 4  # neighbours that a thread reads at once
WIDEST = 2048  # a row of a group lies in the registers of a warp
# One H200, 8,192 tokens of 1,024 channels: XLA 18 us, the kernel 30; 4,096 tokens of 4,096 channels: 59 and 48.
AUTOMATIC_CHANNELS = 4096


def supported(
    *,
    rows: int,
    inner: int,
    groups: int,
    columns: int,
    start: int,
    y_dtype: jax.typing.DTypeLike,
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    width = inner // groups
    if jnp.dtype(y_dtype) != jnp.float32:
        return f"needs y in float32; it is {jnp.dtype(y_dtype)}"
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs a gate in bfloat16, float16 or float32; it is {jnp.dtype(dtype)}"
    if width % 32 or not 0 < width <= WIDEST:
        return f"needs groups of a multiple of 32 channels up to {WIDEST}; they have {width}"
    if columns % LANE_VALUES or start % LANE_VALUES:
        return f"needs the gate at a multiple of {LANE_VALUES} values; {columns} columns, the gate starts at {start}"
    if rows < FEWEST_ROWS:
        return f"needs {FEWEST_ROWS} rows or more; there are {rows}"
    return None


def declined(y: jax.Array, packed: jax.Array, *, groups: int, start: int = 0) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel.

    Args:
        y, packed: only their types count.
        groups, start: as in `gated_norm`.
    """
    reason = supported(**_shapes(y, packed, groups, start))
    if reason is None and selection.automatic() and y.shape[-1] < AUTOMATIC_CHANNELS:
        reason = f"pays from {AUTOMATIC_CHANNELS} channels on; there are {y.shape[-1]}"
    return selection.declined("gated_norm", f"gated_norm, {y.shape} in {groups} groups", reason)


def _shapes(y, packed, groups, start):
    return dict(
        rows=math.prod(y.shape[:-1]),
        inner=y.shape[-1],
        groups=groups,
        columns=packed.shape[-1],
        start=start,
        y_dtype=y.dtype,
        dtype=packed.dtype,
    )


def gated_norm(
    y: Float[Array, "*rows inner"],
    packed: Float[Array, "*rows columns"],
    weight: Float[Array, " inner"],
    *,
    groups: int,
    eps: float,
    start: int = 0,
    implementation: str | None = None,
) -> Float[Array, "*rows inner"]:
    """RMSNorm over each group of y * silu(z), times the weight; in float32, with one cast at the end.

    The kernel reads y and z once and writes the result once; z stays where it is. Its gradient is the
    reference's.

    Args:
        y: [..., inner], what is gated; the kernel needs float32.
        packed: [..., columns]; z is its columns from `start` on, inner of them.
        weight: [inner], any float dtype.
        groups: of the norm, of inner / groups channels each.
        eps: added to the mean square.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it is allowed and can run.

    Returns:
        [..., inner] in the dtype of packed.

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the kernel was asked for and cannot serve this call.
    """
    faults = []
    inner = y.shape[-1]
    if packed.shape[:-1] != y.shape[:-1]:
        faults.append(f"packed has shape {packed.shape}; accepted: {(*y.shape[:-1], 'columns')}")
    if not 0 <= start <= packed.shape[-1] - inner:
        faults.append(f"start is {start}; accepted: 0 to {packed.shape[-1] - inner}")
    if weight.shape != (inner,):
        faults.append(f"weight has shape {weight.shape}; accepted: {(inner,)}")
    if groups < 1 or inner % groups:
        faults.append(f"groups is {groups}; accepted: a divisor of {inner}")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("gated_norm: " + "; ".join(faults))
    if implementation is None:
        implementation = "mosaic_gpu" if declined(y, packed, groups=groups, start=start) is None else "reference"
    elif implementation == "mosaic_gpu":
        if (reason := supported(**_shapes(y, packed, groups, start))) is not None:
            raise Unsupported(f"gated_norm: the kernel {reason}")
    return _run(implementation, groups, float(eps), start, y, packed, weight)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(implementation, groups, eps, start, *operands):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    kwargs = dict(groups=groups, eps=eps, start=start)
    if implementation == "reference":
        return reference.gated_norm(*operands, **kwargs)
    axes = frozenset().union(*(selection.varying(v) for v in operands))
    call = transforms.as_of(
        functools.partial(reference.gated_norm, **kwargs), functools.partial(typed.gated_norm, **kwargs)
    )
    return call(*(selection.vary(v, axes) for v in operands))
