"""Public entry: RMSNorm on one device, with or without a residual."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.windows import DTYPES, row_fault

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FEW_TOKENS = 64  # up to which XLA's two launches cost more than one


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call."""

    eps: float
    unit_offset: bool
    out_dtype: jnp.dtype

    @property
    def kwargs(self) -> dict:
        return dict(eps=self.eps, unit_offset=self.unit_offset, out_dtype=self.out_dtype)


def rms_norm(
    x: Float[Array, "*tokens hidden"],
    residual: Float[Array, "*tokens hidden"] | None,
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    unit_offset: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"]]:
    """Add `x` to the residual stream and normalise the result, all on one device.

    new_residual = round(residual + x) and normed = RMSNorm(new_residual) * weight (or * (1 + weight)), computed in
    float32 with one rounding to the residual's dtype before the norm and one cast after it. XLA makes two launches of
    it; the kernel is one.

    Args:
        x: [..., hidden] the addend: bfloat16, float16 or float32.
        residual: [..., hidden] the stream so far, same shape; None starts a stream, then new_residual is `x` itself.
        weight: [hidden], any float dtype.
        eps: added to the mean square.
        unit_offset: multiply by 1 + weight instead of by weight.
        out_dtype: dtype of `normed`; the dtype of `x` if None.
        implementation: "reference" or "mosaic_gpu" (needs a residual); None: the kernel where it can run and pays.

    Returns:
        (normed [..., hidden] in out_dtype, new_residual [..., hidden] in the residual's dtype).

    Raises:
        ValueError: shapes or dtypes do not fit; all faults are listed.
        Unsupported: the kernel was asked for and cannot serve this call.
    """
    faults = []
    for name, value in (("x", x), ("residual", residual)):
        if value is not None and value.dtype not in DTYPES:
            faults.append(f"{name} has dtype {value.dtype}; accepted: bfloat16, float16, float32")
    if x.ndim < 1:
        faults.append(f"x has shape {x.shape}; accepted: [..., hidden]")
    elif weight.shape != x.shape[-1:]:
        faults.append(f"weight has shape {weight.shape}; accepted: {x.shape[-1:]}, the last dimension of x")
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        faults.append(f"weight has dtype {weight.dtype}; accepted: any float")
    if residual is not None and residual.shape != x.shape:
        faults.append(f"residual has shape {residual.shape}; accepted: {x.shape}, the shape of x")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("rms_norm: " + "; ".join(faults))
    call = _Call(float(eps), bool(unit_offset), jnp.dtype(x.dtype if out_dtype is None else out_dtype))
    if residual is None:
        if implementation == "mosaic_gpu":
            raise Unsupported("rms_norm: the kernel needs a residual")
        return reference.normalise(x.astype(jnp.float32), weight, **call.kwargs), x
    hidden = x.shape[-1]
    tokens = x.size // hidden if hidden else 0
    reason = row_fault(hidden) or ("there is no row" if tokens == 0 else None)
    if implementation is None:
        few = tokens <= FEW_TOKENS
        use_kernel = reason is None and few and selection.fault("rms_norm") is None
    elif use_kernel := implementation == "mosaic_gpu":
        if reason is not None:
            raise Unsupported(f"rms_norm: the kernel {reason}")

    def plain(x, residual, weight):
        return reference.add_rms_norm(x.astype(jnp.float32), residual, weight, **call.kwargs)

    if not use_kernel:
        return plain(x, residual, weight)
    run = transforms.as_of(plain, functools.partial(_launch, call))
    outs = run(x.reshape(tokens, hidden), residual.reshape(tokens, hidden), weight)
    return tuple(out.reshape(x.shape) for out in outs)


@functools.partial(jax.jit, static_argnums=0)
def _launch(call: _Call, x, residual, weight):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    # Imported here: programs that never leave the CPU do not load the kernel compiler.
    from pallas_kernels.rms_norm.mosaic_gpu import add_rms_norm

    axes = selection.varying(x) | selection.varying(residual) | selection.varying(weight)
    outs = add_rms_norm(*(selection.vary(v, axes) for v in (x, residual, weight)), **call.kwargs)
    return tuple(selection.vary(out, axes) for out in outs)  # a kernel's outputs carry no varying axes of their own
