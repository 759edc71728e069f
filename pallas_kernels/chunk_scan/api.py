"""Public entry: many tokens of a Mamba-2 block from the convolution's output to the gate's input."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import selection, transforms
from pallas_kernels.chunk_scan import reference, typed, xla
from pallas_kernels.errors import Unsupported

IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")
# Weights inside chunks that exist at a time: 8,192 tokens of 128 heads in chunks of 128. It bounds the memory of long
# prompts, and keeps every array below 2^31 elements.
MOST_WEIGHTS = 1 << 27


def supported(*, heads: int, head_dim: int, state_size: int, groups: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"needs bfloat16; activations are {jnp.dtype(dtype)}"
    if head_dim not in (64, 80):
        return f"needs head_dim 64 or 80; it is {head_dim}"
    if state_size not in (64, 128) and (state_size, head_dim) != (256, 64):
        return f"needs a state size of 64 or 128, or of 256 with head_dim 64; it is {state_size}"
    if heads % groups:
        return f"needs groups of equal size; {heads} heads are in {groups} groups"
    return None


def declined(
    *, batch: int, tokens: int, heads: int, head_dim: int, state_size: int, groups: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel."""
    reason = supported(heads=heads, head_dim=head_dim, state_size=state_size, groups=groups, dtype=dtype)
    if reason is None and batch * tokens == 0:
        reason = "there is no token"
    return selection.declined(
        "chunk_scan", f"chunk_scan, {batch} x {tokens} tokens, {heads} heads of {head_dim}, state {state_size}", reason
    )


def chunk_scan(
    xbc: Float[Array, "batch tokens channels"],
    dt: Float[Array, "batch tokens heads"],
    a: Float[Array, " heads"],
    d: Float[Array, " heads"],
    state: Float[Array, "batch heads head_dim state"] | None = None,
    *,
    groups: int,
    head_dim: int,
    chunk: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch tokens inner"], Float[Array, "batch heads head_dim state"]]:
    """Tokens of each row through the state space of a Mamba-2 block, from any state.

    S_t = exp(dt_t a) S_{t-1} + dt_t x_t B_t^T and y_t = S_t C_t + d x_t, for each head. The kernel's gradient is the
    reference's.

    Args:
        xbc: [batch, tokens, heads * head_dim + 2 * groups * state]: x, then B, then C.
        dt: [batch, tokens, heads] float32 step sizes; with 0 a token leaves the state as it is.
        a: [heads] float32, negative.
        d: [heads] float32.
        state: [batch, heads, head_dim, state]; None: zeros.
        groups: of B and C; head i reads group i // (heads // groups).
        head_dim: channels of a head.
        chunk: tokens of a chunk. It changes rounding only; the kernel has its own.
        implementation: "reference" (float32 throughout), "xla" (bfloat16 only; xla.py says what is rounded) or
            "mosaic_gpu" (likewise); None: the kernel where it is allowed and can run, else "xla" for bfloat16 and
            "reference" for other dtypes.

    Returns:
        (y [batch, tokens, heads * head_dim] float32, state behind the last token, float32).

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    batch, t, channels = xbc.shape
    heads = dt.shape[-1]
    inner = heads * head_dim
    size = (channels - inner) // (2 * groups)
    faults = []
    if size < 1 or inner + 2 * groups * size != channels or heads % groups:
        faults.append(f"{channels} channels are not {heads} heads of {head_dim} and B and C of {groups} groups")
    expected = {
        "dt": (dt, (batch, t, heads)),
        "a": (a, (heads,)),
        "d": (d, (heads,)),
        "state": (state, (batch, heads, head_dim, size)),
    }
    faults += [
        f"{name} has shape {value.shape}; accepted: {shape}"
        for name, (value, shape) in expected.items()
        if value is not None and value.shape != shape
    ]
    if chunk < 1:
        faults.append(f"chunk is {chunk}; accepted: 1 or more")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("chunk_scan: " + "; ".join(faults))
    shape = dict(heads=heads, head_dim=head_dim, state_size=size, groups=groups, dtype=xbc.dtype)
    if implementation is None:
        if declined(batch=batch, tokens=t, **shape) is None:
            implementation = "mosaic_gpu"
        else:
            implementation = "xla" if xbc.dtype == jnp.bfloat16 else "reference"
    elif implementation == "xla" and xbc.dtype != jnp.bfloat16:
        raise Unsupported(f"chunk_scan: the fast form serves bfloat16; xbc is {xbc.dtype}")
    elif implementation == "mosaic_gpu" and (reason := supported(**shape)) is not None:
        raise Unsupported(f"chunk_scan: the kernel {reason}")
    if state is None:
        state = jnp.zeros((batch, heads, head_dim, size), jnp.float32)
    axes = frozenset().union(*(selection.varying(v) for v in (xbc, dt, a, d, state)))
    operands = [selection.vary(v, axes) for v in (xbc, dt, a, d, state)]
    return _run(implementation, groups, max(1, min(chunk, t)), *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(implementation, groups, chunk, xbc, dt, a, d, state):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    batch, t, heads = dt.shape
    if implementation == "mosaic_gpu" and batch * t > 0:
        call = transforms.as_of(
            functools.partial(_run, "reference", groups, chunk),  # in pieces, however many tokens there are
            functools.partial(typed.chunk_scan, groups=groups),
        )
        return call(xbc, dt, a, d, state)
    plain = reference if implementation == "reference" else xla
    form = functools.partial(plain.chunk_scan, groups=groups, chunk=chunk)
    chunks = math.ceil(t / chunk)
    pieces = math.ceil(chunks / max(1, MOST_WEIGHTS // max(1, batch * heads * chunk * chunk)))
    if pieces <= 1:
        return form(xbc, dt, a, d, state)
    size = math.ceil(chunks / pieces) * chunk
    pieces = math.ceil(t / size)
    xbc, dt = (jnp.pad(v, ((0, 0), (0, pieces * size - t), (0, 0))) for v in (xbc, dt))

    def piece(state, i):
        mine = (lax.dynamic_slice_in_dim(v, i * size, size, axis=1) for v in (xbc, dt))
        y, state = form(*mine, a, d, state)
        return state, y

    state, y = lax.scan(piece, state.astype(jnp.float32), jnp.arange(pieces))
    return jnp.moveaxis(y, 0, 1).reshape(batch, pieces * size, y.shape[-1])[:, :t], state
