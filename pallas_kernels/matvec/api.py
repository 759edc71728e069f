"""Public entries: a few rows times the transpose of a large matrix, or each times that of one it has chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.matvec import reference, tiling

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MOST_ROWS = 64
# Every block reads all of x beside its tile of w, so more rows pay where tiles are high. One H200, 16 and 32 rows
# against XLA: 18,560 outputs 41 and 42 us against 43 and 46; 4,096 outputs of 21,504 inputs 47 and 61 against 51, 55.
FEW_ROWS, MORE_ROWS = 8, 32
LEAST = 64  # outputs and inputs
OUTPUT_STEP, INPUT_STEP = 8, 16  # what TMA can address, and the narrowest pattern that it shares with the tensor cores


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call."""

    out_dtype: jnp.dtype
    squared_relu: bool

    @property
    def kwargs(self) -> dict:
        return dict(out_dtype=self.out_dtype, squared_relu=self.squared_relu)


def supported(*, rows: int, outputs: int, inputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs bfloat16 or float16; x is {jnp.dtype(dtype)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"needs 1 to {MOST_ROWS} rows; there are {rows}"
    for name, size, step in (("outputs", outputs, OUTPUT_STEP), ("inputs", inputs, INPUT_STEP)):
        if size < LEAST or size % step:
            return f"needs {name} of at least {LEAST} in steps of {step}; there are {size}"
    return None


def declined(*, rows: int, outputs: int, inputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel."""
    reason = supported(rows=rows, outputs=outputs, inputs=inputs, dtype=dtype)
    if reason is None and rows > FEW_ROWS:
        tile = tiling.tile_outputs(outputs)
        if rows > MORE_ROWS or 2 * tiling.padded(rows) > tile:
            reason = (
                f"pays up to {FEW_ROWS} rows, or {MORE_ROWS} where a tile has twice as many outputs; there are {rows} "
                f"and tiles of {tile}"
            )
    return selection.declined("matvec", f"matvec, {rows} rows, {inputs} -> {outputs}", reason)


def matvec(
    x: Float[Array, "rows inputs"],
    w: Float[Array, "outputs inputs"],
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    squared_relu: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows outputs"]:
    """`x @ w.T`, accumulated in float32 and rounded once, in one launch. Whatever a row holds reaches no other row.

    The kernel has the reference's gradient; under `vmap` the reference runs in its place.

    Args:
        x: [rows, inputs].
        w: [outputs, inputs], of x's dtype.
        out_dtype: x's dtype, if None, or float32.
        squared_relu: take relu(y)^2 of each result as it was rounded, in float32, and round again.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run, pays and is switched on.

    Returns:
        [rows, outputs] in out_dtype.

    Raises:
        ValueError: shapes or types do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    faults = []
    if x.ndim != 2:
        faults.append(f"x has shape {x.shape}; accepted: (rows, inputs)")
    if w.ndim != 2 or w.shape[1:] != x.shape[-1:]:
        faults.append(f"w has shape {w.shape}; accepted: (outputs, {x.shape[-1] if x.ndim else 'inputs'})")
    if w.dtype != x.dtype:
        faults.append(f"w has dtype {w.dtype}; accepted: {x.dtype}, that of x")
    if out not in (x.dtype, jnp.float32):
        faults.append(f"out_dtype is {out}; accepted: {x.dtype}, that of x, or float32")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("matvec: " + "; ".join(faults))
    shape = dict(rows=x.shape[0], outputs=w.shape[0], inputs=w.shape[1], dtype=x.dtype)
    if implementation is None:
        implementation = "mosaic_gpu" if declined(**shape) is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(**shape)) is not None:
        raise Unsupported(f"matvec: the kernel {reason}")
    call = _Call(out, bool(squared_relu))
    plain = functools.partial(reference.matvec, **call.kwargs)
    run = plain if implementation == "reference" else transforms.as_of(plain, functools.partial(_launch, call))
    return run(x, w)


@functools.partial(jax.jit, static_argnums=0)
def _launch(call: _Call, x, w):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    # Imported here: programs that never leave the CPU do not load the kernel compiler.
    from pallas_kernels.matvec import mosaic_gpu

    axes = selection.varying(x) | selection.varying(w)
    y = mosaic_gpu.matvec(*(selection.vary(v, axes) for v in (x, w)), **call.kwargs)
    return selection.vary(y, axes)  # a kernel's outputs carry no varying axes of their own


def chosen_declined(
    *, choices: int, outputs: int, inputs: int, dtype: jax.typing.DTypeLike, w_dtype: jax.typing.DTypeLike
) -> str | None:
    """Why `chosen_matvec`'s kernel cannot serve the program that is being traced, or None."""
    reason = supported(rows=1, outputs=outputs, inputs=inputs, dtype=dtype)
    if reason is None and jnp.dtype(w_dtype) != jnp.dtype(dtype):
        reason = f"needs matrices of x's dtype; they are {jnp.dtype(w_dtype)}"
    if reason is None and choices == 0:
        reason = "there is no choice"
    return selection.declined("matvec", f"chosen_matvec, {choices} choices, {inputs} -> {outputs}", reason)


def chosen_matvec(
    x: Float[Array, "rows *choices inputs"],
    w: Float[Array, "matrices outputs inputs"],
    chosen: Int[Array, "rows choices"],
    *,
    squared_relu: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows choices outputs"]:
    """`x @ w[chosen].T` for every choice, accumulated in float32 and rounded once, in one launch.

    A matrix is read where it lies, once for each choice of it.

    The kernel has the reference's gradient; under `vmap` the reference runs in its place.

    Args:
        x: [rows, inputs], the same for all choices of a row, or [rows, choices, inputs].
        w: [matrices, outputs, inputs], of x's dtype.
        chosen: [rows, choices] int32, from 0 to matrices - 1.
        squared_relu: take relu^2 of the rounded result, in float32, and round again.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run and is switched on.

    Returns:
        [rows, choices, outputs] in x's dtype.

    Raises:
        ValueError: shapes or types do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    faults = []
    if chosen.ndim != 2 or chosen.dtype != jnp.int32:
        faults.append(f"chosen is {chosen.dtype}{chosen.shape}; accepted: int32(rows, choices)")
    elif x.shape[:-1] not in (chosen.shape, chosen.shape[:1]):
        faults.append(f"x has shape {x.shape}; accepted: {(chosen.shape[0], 'inputs')} or {(*chosen.shape, 'inputs')}")
    if w.ndim != 3 or w.shape[2:] != x.shape[-1:]:
        faults.append(f"w has shape {w.shape}; accepted: (matrices, outputs, {x.shape[-1] if x.ndim else 'inputs'})")
    if w.dtype != x.dtype:
        faults.append(f"w has dtype {w.dtype}; accepted: {x.dtype}, that of x")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("chosen_matvec: " + "; ".join(faults))
    shape = dict(outputs=w.shape[1], inputs=w.shape[2], dtype=x.dtype)
    if implementation is None:
        reason = chosen_declined(choices=chosen.size, w_dtype=w.dtype, **shape)
        implementation = "mosaic_gpu" if reason is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(rows=1, **shape)) is not None:
        raise Unsupported(f"chosen_matvec: the kernel {reason}")
    plain = functools.partial(reference.chosen_matvec, squared_relu=squared_relu)
    if implementation == "reference":
        return plain(x, w, chosen)
    return transforms.as_of(plain, functools.partial(_launch_chosen, squared_relu))(x, w, chosen)


@functools.partial(jax.jit, static_argnums=0)
def _launch_chosen(squared_relu, x, w, chosen):
    from pallas_kernels.matvec import mosaic_gpu

    axes = selection.varying(x) | selection.varying(w) | selection.varying(chosen)
    x, w, flat = (selection.vary(v, axes) for v in (x.reshape(-1, x.shape[-1]), w, chosen.reshape(-1)))
    y = mosaic_gpu.matvec(x, w, flat, out_dtype=x.dtype, squared_relu=squared_relu)
    return selection.vary(y.reshape(*chosen.shape, -1), axes)
