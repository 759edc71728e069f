"""How a kernel cuts a row over the 128 threads of a block, and what rows it accepts.

A row is covered by *windows* whose length is a multiple of 128 elements, so that no load or store needs a mask. Where
the row is no whole number of windows the last one is moved back to end with the row; it then overlaps the one before,
computes the overlap a second time with the same bits, and leaves it out of the sum of squares. Row starts and window
starts are multiples of 8 elements, hence 16-byte aligned.
"""

import dataclasses

import jax.numpy as jnp

THREADS = 128
HIDDEN_MULTIPLE = 8
HIDDEN_MIN = 128
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


def row_fault(hidden: int) -> str | None:
    """Why rows of this length cannot be cut into windows, or None."""
    if hidden % HIDDEN_MULTIPLE or hidden < HIDDEN_MIN:
        return f"needs hidden a multiple of {HIDDEN_MULTIPLE} from {HIDDEN_MIN}; hidden is {hidden}"
    return None


@dataclasses.dataclass(frozen=True)
class Window:
    """`size` elements from `start`, `vec` neighbours to a thread; the first `overlap` belong to the window before."""

    start: int
    size: int
    vec: int
    overlap: int


def windows(hidden: int) -> tuple[Window, ...]:
    """The windows of a row of `hidden` elements (a multiple of 8, at least 128)."""
    vec = 8
    while THREADS * vec > hidden:
        vec //= 2
    size = THREADS * vec
    whole = [Window(i * size, size, vec, 0) for i in range(hidden // size)]
    if hidden % size:
        whole.append(Window(hidden - size, size, vec, size - hidden % size))
    return tuple(whole)
