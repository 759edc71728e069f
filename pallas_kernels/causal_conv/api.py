"""Public entry: silu(depthwise causal convolution) of columns of a Mamba-2 block's packed projection, many tokens."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import selection, transforms
from pallas_kernels.causal_conv import reference, typed
from pallas_kernels.errors import Unsupported

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
FEWEST_CHANNELS = 128  # one for each thread
MOST_TAPS = 8


def supported(
    *, batch: int, tokens: int, channels: int, columns: int, start: int, taps: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    del start  # it decides how wide the accesses are
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs bfloat16, float16 or float32; activations are {jnp.dtype(dtype)}"
    if columns * jnp.dtype(dtype).itemsize % 16:
        return f"needs packed rows of a multiple of 16 bytes; they have {columns} columns"
    if not 2 <= taps <= MOST_TAPS:
        return f"needs 2 to {MOST_TAPS} taps; there are {taps}"
    if channels < FEWEST_CHANNELS:
        return f"needs {FEWEST_CHANNELS} channels or more; there are {channels}"
    if batch == 0 or tokens < 2:
        return f"needs 2 tokens or more; there are {batch} x {tokens}"
    return None


def declined(packed: jax.Array, weight: jax.Array, *, start: int = 0) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel.

    Args:
        packed, weight: only their types count.
        start: as in `causal_conv`.
    """
    batch, tokens, _ = packed.shape
    call = f"causal_conv, {batch} x {tokens} tokens, {weight.shape[0]} channels"
    return selection.declined("causal_conv", call, supported(**_shapes(packed, weight, start)))


def _shapes(packed, weight, start):
    batch, tokens, columns = packed.shape
    channels, _, taps = weight.shape
    return dict(
        batch=batch, tokens=tokens, channels=channels, columns=columns, start=start, taps=taps, dtype=packed.dtype
    )


def causal_conv(
    packed: Float[Array, "batch tokens columns"],
    weight: Float[Array, "channels 1 taps"],
    bias: Float[Array, " channels"] | None,
    window: Float[Array, "batch past channels"] | None,
    *,
    start: int = 0,
    implementation: str | None = None,
) -> Float[Array, "batch tokens channels"]:
    """silu(depthwise causal convolution + bias), accumulated in float32; the last tap multiplies the current token.

    The kernel reads its inputs once, where they lie, and writes the result once. Its gradient is the reference's.

    Args:
        packed: [batch, tokens, columns]; the inputs are its columns from `start` on, as many as there are channels.
        weight: [channels, 1, taps], any float dtype.
        bias: [channels] or None.
        window: [batch, taps - 1, channels], the inputs before the first token, newest last; None: zeros. They are
            rounded to the dtype of packed.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it is allowed and can run.

    Returns:
        [batch, tokens, channels] in the dtype of packed.

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the kernel was asked for and cannot serve this call.
    """
    batch, _, columns = packed.shape
    channels, _, taps = weight.shape
    expected = {
        "weight": (weight, (channels, 1, taps)),
        "bias": (bias, (channels,)),
        "window": (window, (batch, taps - 1, channels)),
    }
    faults = [
        f"{name} has shape {value.shape}; accepted: {shape}"
        for name, (value, shape) in expected.items()
        if value is not None and value.shape != shape
    ]
    if not 0 <= start <= columns - channels:
        faults.append(f"start is {start}; accepted: 0 to {columns - channels}")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("causal_conv: " + "; ".join(faults))
    if implementation is None:
        implementation = "mosaic_gpu" if declined(packed, weight, start=start) is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(**_shapes(packed, weight, start))) is not None:
        raise Unsupported(f"causal_conv: the kernel {reason}")
    return _run(implementation, start, packed, weight, bias, window)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(implementation, start, packed, weight, bias, window):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    if implementation == "reference":
        return reference.causal_conv(packed, weight, bias, window, start=start)
    if window is None:
        window = jnp.zeros((packed.shape[0], weight.shape[2] - 1, weight.shape[0]), packed.dtype)
    operands = (packed, weight, bias, window)
    axes = frozenset().union(*(selection.varying(v) for v in operands if v is not None))
    call = transforms.as_of(
        functools.partial(reference.causal_conv, start=start), functools.partial(typed.causal_conv, start=start)
    )
    return call(*(None if v is None else selection.vary(v, axes) for v in operands))
