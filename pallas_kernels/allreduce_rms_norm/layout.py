"""Sizes of what the communicating kernels keep in flight: packets, rows in shared memory, blocks."""

import os

import jax.numpy as jnp

from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.rms_norm.windows import THREADS, Window, windows

SMEM_BYTES = 220 * 1024
MAX_SLOTS = 4
# Ranks that share a GPU set this to 132 // ranks in their environment (scripts/launch_local.py does), so that the
# blocks of all of them are resident together; a block that waits for one that cannot start waits for ever.
MAX_BLOCKS_VARIABLE = "PALLAS_KERNELS_MAX_BLOCKS"


def words_of(window: Window, bits: int) -> int:
    """32-bit words that a thread holds of one window of elements of `bits` bits; a lone 16-bit element counts as
    one."""
    return max(1, window.vec * bits // 32)


def words_per_thread(window: Window, dtype: jnp.dtype) -> int:
    """As `words_of`, by dtype."""
    return words_of(window, 8 * jnp.dtype(dtype).itemsize)


def packet_words(hidden: int, dtype: jnp.dtype) -> int:
    """32-bit words of one row in the staging buffer of `flags`: every word of data travels with a word that dates
    it."""
    return sum(2 * THREADS * words_per_thread(window, dtype) for window in windows(hidden))


def slots_for(rows_per_block: int, row_bytes: int, reserved: int = 0) -> int:
    """How many rows (of all devices) a block holds in shared memory at once, so that fetching runs ahead of the
    work."""
    room = (SMEM_BYTES - 4096 - reserved) // row_bytes
    return max(1, min(MAX_SLOTS, rows_per_block, room))


def blocks_for(rows: int, max_blocks: int | None) -> int:
    """Thread blocks for `rows` rows: all must be resident at once, since they wait for their peers."""
    cap = max_blocks or int(os.environ.get(MAX_BLOCKS_VARIABLE, MULTIPROCESSORS))
    return max(1, min(rows, MULTIPROCESSORS, cap))
