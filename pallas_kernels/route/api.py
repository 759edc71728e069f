"""Public entry: the experts that each row's logits choose, and their weights."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.route import reference, typed

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
STEP = 128  # experts: the threads of a block
MOST_EXPERTS = 1024  # each is compared with each by one block
MOST_CHOSEN = 64  # rows of one matrix fragment
FEW_ROWS = 64  # up to which the kernel is meant to pay: a block each, all at the same time


def supported(*, experts: int, k: int) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if not 0 < experts <= MOST_EXPERTS or experts % STEP:
        return f"needs a multiple of {STEP} experts, at most {MOST_EXPERTS}; there are {experts}"
    if not 1 <= k <= MOST_CHOSEN:
        return f"chooses 1 to {MOST_CHOSEN} experts; asked for are {k}"
    return None


def declined(*, rows: int, experts: int, k: int) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel."""
    reason = supported(experts=experts, k=k)
    if reason is None and not 1 <= rows <= FEW_ROWS:
        reason = f"pays for 1 to {FEW_ROWS} rows; there are {rows}"
    return selection.declined("route", f"route, {rows} rows, {k} of {experts}", reason)


def route(
    logits: Float[Array, "rows experts"],
    bias: Float[Array, " experts"],
    *,
    k: int,
    normalise: bool = True,
    scale: float = 1.0,
    implementation: str | None = None,
) -> tuple[Int[Array, "rows k"], Float[Array, "rows k"]]:
    """The k experts with the largest `sigmoid(logits) + bias`, in one launch, and their sigmoids as weights.

    Of equal experts the lower one comes first, and a NaN before every number, as in `jax.lax.top_k`. The kernel has the
    reference's gradient; under `vmap` the reference runs in its place.

    Args:
        logits: [rows, experts] float32.
        bias: [experts] float32; for choosing alone.
        normalise: divide the weights by their sum and 1e-20.
        scale: what the weights are multiplied by at the end.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run, pays and is switched on.

    Returns:
        (chosen [rows, k] int32, best first; weights [rows, k] float32 in the same order).

    Raises:
        ValueError: shapes or types do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    faults = []
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        faults.append(f"logits is {logits.dtype}{logits.shape}; accepted: float32(rows, experts)")
    if bias.shape != logits.shape[-1:] or bias.dtype != jnp.float32:
        faults.append(f"bias is {bias.dtype}{bias.shape}; accepted: float32{logits.shape[-1:]}")
    if logits.ndim and not 1 <= k <= logits.shape[-1]:
        faults.append(f"k is {k}; accepted: 1 to {logits.shape[-1]}, the experts")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("route: " + "; ".join(faults))
    rows, experts = logits.shape
    if implementation is None:
        reason = declined(rows=rows, experts=experts, k=k)
        implementation = "mosaic_gpu" if reason is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(experts=experts, k=k)) is not None:
        raise Unsupported(f"route: the kernel {reason}")
    return _run(implementation, k, normalise, float(scale), logits, bias)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(implementation, k, normalise, scale, logits, bias):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    kwargs = dict(k=k, normalise=normalise, scale=scale)
    if implementation == "reference" or logits.shape[0] == 0:
        return reference.route(logits, bias, **kwargs)
    axes = selection.varying(logits) | selection.varying(bias)
    call = transforms.as_of(
        functools.partial(reference.route, **kwargs), lambda *operands: typed.route(list(operands), **kwargs)
    )
    return call(*(selection.vary(x, axes) for x in (logits, bias)))
