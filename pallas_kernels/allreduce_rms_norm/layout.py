"""How the kernels cut a row over the 128 threads of a block, and what they accept.

A row is covered by *windows* whose length is a multiple of 128 elements, so that no load or store needs a mask. Where the
row is no whole number of windows the last one is moved back to end with the row; it then overlaps the one before, computes
the overlap a second time with the same bits, and leaves it out of the sum of squares. Row starts and window starts are
multiples of 8 elements, hence 16-byte aligned.
"""

import dataclasses

import jax.numpy as jnp

THREADS = 128
HIDDEN_MULTIPLE = 8
HIDDEN_MIN = 128
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
SMEM_BYTES = 220 * 1024
SM_COUNT = 132
MAX_SLOTS = 4


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


def words_of(window: Window, bits: int) -> int:
    """32-bit words that a thread holds of one window of elements of `bits` bits; a lone 16-bit element counts as one."""
    return max(1, window.vec * bits // 32)


def words_per_thread(window: Window, dtype: jnp.dtype) -> int:
    """As `words_of`, by dtype."""
    return words_of(window, 8 * jnp.dtype(dtype).itemsize)


def packet_words(hidden: int, dtype: jnp.dtype) -> int:
    """32-bit words of one row in the staging buffer of `flags`: every word of data travels with a word that dates it."""
    return sum(2 * THREADS * words_per_thread(window, dtype) for window in windows(hidden))


def slots_for(rows_per_block: int, row_bytes: int, reserved: int = 0) -> int:
    """How many rows (of all devices) a block holds in shared memory at once, so that fetching runs ahead of the work."""
    room = (SMEM_BYTES - 4096 - reserved) // row_bytes
    return max(1, min(MAX_SLOTS, rows_per_block, room))


def blocks_for(rows: int, max_blocks: int | None) -> int:
    """Thread blocks for `rows` rows: all must be resident at once, since they wait for their peers."""
    return max(1, min(rows, SM_COUNT, max_blocks or SM_COUNT))
