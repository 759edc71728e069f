"""Public entry: many new tokens of each row attend to the row's old and new ones, which the cache holds."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.prefill_attention import reference, typed

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
HEAD_DIMS = (64, 128)
# Of fewer tokens a block's tile would be empty for the most part, and a long row would be read by few blocks.
FEWEST_TOKENS = 64


def supported(
    *, q_heads: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike, cache_dtype: jax.typing.DTypeLike
) -> str | None:
    """Why the kernel cannot serve these shapes, or None; tokens and slots may be of any number. The device is another
    question: `selection.fault`."""
    if head_dim not in HEAD_DIMS:
        return f"needs head_dim {' or '.join(map(str, HEAD_DIMS))}; it is {head_dim}"
    if q_heads % kv_heads:
        return f"needs as many query heads for each KV head; there are {q_heads} for {kv_heads}"
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs bfloat16 or float16; activations are {jnp.dtype(dtype)}"
    if jnp.dtype(dtype) != jnp.dtype(cache_dtype):
        return f"needs a cache of the activations' dtype, {jnp.dtype(dtype)}; it is {jnp.dtype(cache_dtype)}"
    return None


def declined(k: jax.Array, *, tokens: int, q_heads: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel.

    Args:
        k: [rows, slots, kv_heads, head_dim]; only its type counts.
        tokens: new ones of each row.
        q_heads, dtype: as in `supported`.
    """
    rows, slots, kv_heads, head_dim = k.shape
    reason = supported(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, cache_dtype=k.dtype)
    if reason is None and rows * slots == 0:
        reason = "there is no slot"
    if reason is None and tokens < FEWEST_TOKENS:
        reason = f"pays from {FEWEST_TOKENS} tokens on; there are {tokens}"
    return selection.declined("prefill_attention", f"prefill_attention, {tokens} tokens, cache {k.shape}", reason)


def prefill_attention(
    q: Float[Array, "rows tokens heads head_dim"],
    k: Float[Array, "rows slots kv_heads head_dim"],
    v: Float[Array, "rows slots kv_heads head_dim"],
    start: Int[Array, " rows"],
    new: Int[Array, " rows"],
    *,
    q_heads: int | None = None,
    clean: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows tokens q_heads head_dim"]:
    """Query i of a row sees the slots 0 to start + i. The new tokens' keys and values are in the cache already.

    Scores are scaled by head_dim ** -0.5; scores, softmax and sums are in float32; the kernel rounds the weights to q's
    dtype before they meet the values. Query heads of one KV head are neighbours. The kernel's gradient is the
    reference's. Where tokens or slots are no multiple of 8 the kernel works on padded copies.

    Args:
        q: [rows, tokens, heads, head_dim], of which the first `q_heads` heads are queries: a packed projection need not
            be cut.
        k, v: [rows, slots, kv_heads, head_dim], the cache.
        start: [rows] int32, tokens that each row had before.
        new: [rows] int32, how many of the tokens are real; those behind are pads. `start + new` is at most `slots`.
        q_heads: None: all heads of q.
        clean: the slots of v behind a row's tokens hold numbers. Otherwise they may hold anything, and the kernel works
            on a copy of v. Those of k may always.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run.

    Returns:
        [rows, tokens, q_heads, head_dim] in the dtype of q; 0 for pads.

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    faults = []
    if q.ndim != 4:
        faults.append(f"q has shape {q.shape}; accepted: [rows, tokens, heads, head_dim]")
    if k.ndim != 4:
        faults.append(f"k has shape {k.shape}; accepted: [rows, slots, kv_heads, head_dim]")
    if faults:
        raise ValueError("prefill_attention: " + "; ".join(faults))
    rows, _, kv_heads, head_dim = k.shape
    q_heads = q.shape[2] if q_heads is None else q_heads
    if (q.shape[0], q.shape[3]) != (rows, head_dim):
        faults.append(f"q has shape {q.shape}; accepted: ({rows}, tokens, heads, {head_dim})")
    if not 1 <= q_heads <= q.shape[2] or q_heads % kv_heads:
        faults.append(f"q_heads is {q_heads}; accepted: a multiple of the {kv_heads} KV heads, at most {q.shape[2]}")
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        faults.append(f"v is {v.dtype}{v.shape}; accepted: {k.dtype}{k.shape}, as k")
    for name, value in (("start", start), ("new", new)):
        if value.shape != (rows,):
            faults.append(f"{name} has shape {value.shape}; accepted: {(rows,)}")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("prefill_attention: " + "; ".join(faults))
    if implementation is None:
        reason = declined(k, tokens=q.shape[1], q_heads=q_heads, dtype=q.dtype)
        implementation = "mosaic_gpu" if reason is None else "reference"
    elif implementation == "mosaic_gpu":
        reason = supported(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype, cache_dtype=k.dtype)
        if reason is not None:
            raise Unsupported(f"prefill_attention: the kernel {reason}")
    return _run(implementation, q_heads, clean, q, k, v, start, new)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(implementation, q_heads, clean, q, k, v, start, new):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    rows, tokens, _, head_dim = q.shape
    if rows * tokens * k.shape[1] == 0:
        return jnp.zeros((rows, tokens, q_heads, head_dim), q.dtype)
    if implementation == "reference":
        return reference.prefill_attention(q, k, v, start, new, q_heads=q_heads)
    if not clean:
        filled = jnp.arange(v.shape[1], dtype=jnp.int32) < (start + new)[:, None]
        v = jnp.where(filled[:, :, None, None], v, 0)
    operands = (q, k, v, start, new)
    axes = frozenset().union(*(selection.varying(x) for x in operands))
    call = transforms.as_of(
        functools.partial(reference.prefill_attention, q_heads=q_heads),
        functools.partial(typed.prefill_attention, q_heads=q_heads),
    )
    return call(*(selection.vary(x, axes) for x in operands))
