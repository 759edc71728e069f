"""Public entry: RMSNorm on one device, with or without a residual."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.windows import DTYPES


def rms_norm(
    x: Float[Array, "*tokens hidden"],
    residual: Float[Array, "*tokens hidden"] | None,
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    unit_offset: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"]]:
    """Add `x` to the residual stream and normalise the result, all on one device.

    new_residual = round(residual + x) and normed = RMSNorm(new_residual) * weight (or * (1 + weight)), computed in
    float32 with one rounding to the residual's dtype before the norm and one cast after it. XLA compiles it into its
    own fusion.

    Args:
        x: [..., hidden] the addend: bfloat16, float16 or float32.
        residual: [..., hidden] the stream so far, same shape; None starts a stream, then new_residual is `x` itself.
        weight: [hidden], any float dtype.
        eps: added to the mean square.
        unit_offset: multiply by 1 + weight instead of by weight.
        out_dtype: dtype of `normed`; the dtype of `x` if None.

    Returns:
        (normed [..., hidden] in out_dtype, new_residual [..., hidden] in the residual's dtype).

    Raises:
        ValueError: shapes or dtypes do not fit; all faults are listed.
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
    if faults:
        raise ValueError("rms_norm: " + "; ".join(faults))
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    kwargs = dict(eps=eps, unit_offset=unit_offset, out_dtype=out_dtype)
    if residual is None:
        return reference.normalise(x.astype(jnp.float32), weight, **kwargs), x
    return reference.add_rms_norm(x.astype(jnp.float32), residual, weight, **kwargs)
