"""Public entry: one new token of each row through an attention block, from the packed projection's output to the output
projection's input: cache write and attention over the row's tokens; reference.py says exactly what.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.decode_attention import reference, typed
from pallas_kernels.decode_attention.shapes import HEAD_DIM
from pallas_kernels.errors import Unsupported

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MOST_QUERIES = 64  # of a KV head: rows of one matrix product
FEWEST_SLOTS = 64
SLOT_TILE = 8  # a copy takes slots in tiles of so many, and must find a whole number of them


def supported(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    slots: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike,
) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if head_dim != HEAD_DIM:
        return f"needs head_dim {HEAD_DIM}; it is {head_dim}"
    if q_heads > MOST_QUERIES * kv_heads:
        return f"needs at most {MOST_QUERIES} query heads for each KV head; there are {q_heads} for {kv_heads}"
    if slots < FEWEST_SLOTS:
        return f"needs a cache of at least {FEWEST_SLOTS} slots; it has {slots}"
    if slots % SLOT_TILE:
        return f"needs a cache whose slots are a multiple of {SLOT_TILE}; it has {slots}"
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs bfloat16 or float16; activations are {jnp.dtype(dtype)}"
    if jnp.dtype(dtype) != jnp.dtype(cache_dtype):
        return f"needs a cache of the activations' dtype, {jnp.dtype(dtype)}; it is {jnp.dtype(cache_dtype)}"
    return None


def declined(k: jax.Array, *, q_heads: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel.

    Args:
        k: [rows, slots, kv_heads, head_dim]; only its type counts.
        q_heads, dtype: as in `supported`.
    """
    rows, slots, kv_heads, head_dim = k.shape
    reason = supported(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, slots=slots, dtype=dtype, cache_dtype=k.dtype
    )
    if reason is None and rows == 0:
        reason = "there is no row"
    return selection.declined("decode_attention", f"decode_attention, cache {k.shape}", reason)


def decode_attention(
    qkv: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows slots kv_heads head_dim"],
    v: Float[Array, "rows slots kv_heads head_dim"],
    length: Int[Array, " rows"],
    alive: Int[Array, " rows"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "rows q_heads head_dim"],
    Float[Array, "rows slots kv_heads head_dim"],
    Float[Array, "rows slots kv_heads head_dim"],
]:
    """One new token of each row: its key and value go into slot `length`, its queries see slots 0 to `length`.

    Scores are scaled by head_dim ** -0.5; scores, softmax and sums are in float32. What the slots behind a row's tokens
    hold does not matter. Query heads of one KV head are neighbours. The kernel's gradient is the reference's.

    Args:
        qkv: [rows, q_heads + 2 * kv_heads, head_dim]: queries, then the new keys, then the new values.
        k, v: [rows, slots, kv_heads, head_dim], the cache. The kernel writes into it where the caller has no more use
            of it.
        length: [rows] int32, tokens that each row has in the cache, at most `slots`.
        alive: rows with 0 keep their cache, and their queries see the old tokens alone, as do those of a row whose
            cache is full. None: every row is alive.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run.

    Returns:
        (y [rows, q_heads, head_dim] in the dtype of qkv, 0 where a query sees nothing; new k; new v).

    Raises:
        ValueError: shapes do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    faults = []
    if qkv.ndim != 3:
        faults.append(f"qkv has shape {qkv.shape}; accepted: [rows, q_heads + 2 * kv_heads, head_dim]")
    if k.ndim != 4:
        faults.append(f"k has shape {k.shape}; accepted: [rows, slots, kv_heads, head_dim]")
    if faults:
        raise ValueError("decode_attention: " + "; ".join(faults))
    rows, _, kv_heads, head_dim = k.shape
    q_heads = qkv.shape[1] - 2 * kv_heads
    if (qkv.shape[0], qkv.shape[2]) != (rows, head_dim):
        faults.append(f"qkv has shape {qkv.shape}; accepted: ({rows}, q_heads + {2 * kv_heads}, {head_dim})")
    elif q_heads < 1 or q_heads % kv_heads:
        faults.append(f"qkv has {q_heads} query heads; accepted: a multiple of the {kv_heads} KV heads")
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        faults.append(f"v is {v.dtype}{v.shape}; accepted: {k.dtype}{k.shape}, as k")
    for name, value in (("length", length), ("alive", alive)):
        if value is not None and value.shape != (rows,):
            faults.append(f"{name} has shape {value.shape}; accepted: {(rows,)}")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("decode_attention: " + "; ".join(faults))
    if implementation is None:
        reason = declined(k, q_heads=q_heads, dtype=qkv.dtype)
        implementation = "mosaic_gpu" if reason is None else "reference"
    elif implementation == "mosaic_gpu":
        reason = supported(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            slots=k.shape[1],
            dtype=qkv.dtype,
            cache_dtype=k.dtype,
        )
        if reason is not None:
            raise Unsupported(f"decode_attention: the kernel {reason}")
    return _run(implementation, qkv, k, v, length, alive)


@functools.partial(jax.jit, static_argnums=0)
def _run(implementation, *operands):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    if implementation == "reference" or operands[0].shape[0] == 0:
        return reference.decode_attention(*operands)
    axes = frozenset().union(*(selection.varying(x) for x in operands if x is not None))
    call = transforms.as_of(reference.decode_attention, lambda *operands: typed.decode_attention(list(operands)))
    return call(*(None if x is None else selection.vary(x, axes) for x in operands))
