"""Public entry: one token of a Mamba-2 block from the input projection's output to the output projection's input.

Convolution with its window, step size, state update, gate and grouped RMSNorm; reference.py says exactly what.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.mamba_step import reference, typed

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
TILE = 64
# Above this state XLA's own kernels are about as fast (one H200: 6 against 16 us at 4 MiB, 95 against 94 at 128).
AUTOMATIC_STATE_BYTES = 64 << 20


def supported(
    *,
    heads: int,
    head_dim: int,
    state_size: int,
    groups: int,
    dtype: jax.typing.DTypeLike,
    state_dtype: jax.typing.DTypeLike,
    window_dtype: jax.typing.DTypeLike,
) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if heads % groups or (heads // groups * head_dim) % TILE:
        return f"needs groups of a multiple of {TILE} channels; {heads} heads of {head_dim} are in {groups} groups"
    if head_dim % 8:
        return f"needs head_dim a multiple of 8; it is {head_dim}"
    if state_size % 16 or state_size < TILE or (state_size > 128 and state_size % 128):
        return f"needs a state size of {TILE} to 128 in steps of 16, or a multiple of 128; it is {state_size}"
    for name, value in (("activations", dtype), ("state", state_dtype)):
        if jnp.dtype(value) not in FLOATS:
            return f"needs bfloat16, float16 or float32; {name} are {jnp.dtype(value)}"
    if jnp.dtype(dtype) != jnp.dtype(window_dtype):
        return f"needs a window of the activations' dtype, {jnp.dtype(dtype)}; it is {jnp.dtype(window_dtype)}"
    return None


def declined(
    state: jax.Array, *, groups: int, dtype: jax.typing.DTypeLike, window_dtype: jax.typing.DTypeLike
) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel.

    Args:
        state: [rows, heads, head_dim, state]; only its type counts.
        groups, dtype, window_dtype: as in `supported`.
    """
    rows, heads, head_dim, state_size = state.shape
    reason = supported(
        heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        groups=groups,
        dtype=dtype,
        state_dtype=state.dtype,
        window_dtype=window_dtype,
    )
    if reason is None and rows == 0:
        reason = "there is no row"
    if reason is None and selection.automatic() and state.size * state.dtype.itemsize > AUTOMATIC_STATE_BYTES:
        reason = f"pays up to {AUTOMATIC_STATE_BYTES >> 20} MiB of state; there are {state.size * state.dtype.itemsize}"
    return selection.declined("mamba_step", f"mamba_step, state {state.shape}", reason)


def mamba_step(
    zxbcdt: Float[Array, "rows packed"],
    window: Float[Array, "rows past channels"],
    state: Float[Array, "rows heads head_dim state"],
    conv_weight: Float[Array, "channels 1 taps"],
    conv_bias: Float[Array, " channels"] | None,
    a_log: Float[Array, " heads"],
    d: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    norm_weight: Float[Array, " inner"],
    alive: Int[Array, " rows"] | None = None,
    *,
    groups: int,
    eps: float,
    time_step_limit: tuple[float, float] = (0.0, float("inf")),
    implementation: str | None = None,
) -> tuple[Float[Array, "rows inner"], Float[Array, "rows past channels"], Float[Array, "rows heads head_dim state"]]:
    """One token of each row through a Mamba-2 block, between its projections.

    The kernel's gradient is the reference's.

    Args:
        zxbcdt: [rows, 2 * inner + 2 * groups * state + heads]: gate z, then x, B, C, then the raw step sizes.
        window: [rows, taps - 1, inner + 2 * groups * state], the convolution's last raw inputs, newest last. The kernel
            overwrites it in place where the caller has no more use of it.
        state: [rows, heads, head_dim, state]; likewise.
        conv_weight: the last tap multiplies the new token.
        a_log, d, dt_bias: per head, float32.
        norm_weight: of the RMSNorm over each group of inner / groups channels, which comes after the gate.
        alive: rows with 0 keep state and window as they are; their y means nothing. None: every row is alive.
        groups: of B and C, and of the norm.
        eps: added to the mean square.
        time_step_limit: bounds of the step size behind softplus.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run and pays.

    Returns:
        (y [rows, inner] in the dtype of zxbcdt, new window, new state).

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    rows, heads, head_dim, state_size = state.shape
    inner = heads * head_dim
    channels = inner + 2 * groups * state_size
    taps = conv_weight.shape[-1]
    expected = {
        "zxbcdt": (zxbcdt, (rows, inner + channels + heads)),
        "window": (window, (rows, taps - 1, channels)),
        "conv_weight": (conv_weight, (channels, 1, taps)),
        "conv_bias": (conv_bias, (channels,)),
        "a_log": (a_log, (heads,)),
        "d": (d, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
        "norm_weight": (norm_weight, (inner,)),
        "alive": (alive, (rows,)),
    }
    faults = [
        f"{name} has shape {value.shape}; accepted: {shape}"
        for name, (value, shape) in expected.items()
        if value is not None and value.shape != shape
    ]
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("mamba_step: " + "; ".join(faults))
    if implementation is None:
        reason = declined(state, groups=groups, dtype=zxbcdt.dtype, window_dtype=window.dtype)
        implementation = "mosaic_gpu" if reason is None else "reference"
    elif implementation == "mosaic_gpu":
        reason = supported(
            heads=heads,
            head_dim=head_dim,
            state_size=state_size,
            groups=groups,
            dtype=zxbcdt.dtype,
            state_dtype=state.dtype,
            window_dtype=window.dtype,
        )
        if reason is not None:
            raise Unsupported(f"mamba_step: the kernel {reason}")
    return _run(
        implementation,
        groups,
        float(eps),
        tuple(map(float, time_step_limit)),
        zxbcdt,
        window,
        state,
        conv_weight,
        conv_bias,
        a_log,
        d,
        dt_bias,
        norm_weight,
        alive,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(implementation, groups, eps, time_step_limit, *operands):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    kwargs = dict(groups=groups, eps=eps, time_step_limit=time_step_limit)
    if implementation == "reference" or operands[0].shape[0] == 0:
        return reference.mamba_step(*operands, **kwargs)
    axes = frozenset().union(*(selection.varying(x) for x in operands if x is not None))
    call = transforms.as_of(
        functools.partial(reference.mamba_step, **kwargs), lambda *operands: typed.mamba_step(list(operands), **kwargs)
    )
    return call(*(None if x is None else selection.vary(x, axes) for x in operands))
