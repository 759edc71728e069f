"""All-reduce + residual + RMSNorm in one kernel that reads its peers' partials straight from their memory.

Every block takes whole rows. A row of all devices is fetched by bulk copies into shared memory, summed in float32 in
rank order, added to the residual, rounded, normalised and stored. The link carries world - 1 times the message per
device.

Synchronisation:
* A partial is complete before it is read: XLA launches a small barrier over all devices of the mesh in front of a
  kernel that uses peers' memory, in the same stream as everything that produced the partial.
* A partial is not reused before it has been read: when the last row of a block has landed in shared memory, the block
  says so to the block of the same number on every peer, and it does not exit before all peers have said the same. XLA
  may hand the partial's memory to whatever runs next.
* The semaphores are zeroed by XLA before each call; nothing lives between calls.
* Blocks wait for the block of the same number on their peers, so all must get to run: at most one block per
  multiprocessor (`blocks_for`), fewer when ranks share a GPU (`max_blocks`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.allreduce_rms_norm import layout, signals
from pallas_kernels.rms_norm import rows
from pallas_kernels.rms_norm.windows import windows as cut


def one_shot(
    partial: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    axis_name: str,
    world: int,
    eps: float,
    unit_offset: bool,
    out_dtype: jnp.dtype,
    max_blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.exact`; partial and residual are [tokens, hidden] with tokens >= 1, and support.py has said
    yes."""
    tokens, hidden = partial.shape
    windows = cut(hidden)
    blocks = layout.blocks_for(tokens, max_blocks)
    rows_per_block = -(-tokens // blocks)
    uneven = tokens % blocks != 0
    slots = layout.slots_for(rows_per_block, world * hidden * partial.dtype.itemsize)

    def kernel(partial_ref, residual_ref, weight_ref, normed_ref, new_residual_ref, *, fetched, landed, read):
        peers = signals.Peers(axis_name, world)
        block = lax.axis_index("block")

        def row_of(i):
            return block + i * jnp.int32(blocks)

        def if_row(i, action):
            if uneven:
                pl.when(row_of(i) < tokens)(action)
            else:
                action()

        def fetch(i, slot):
            for distance in range(world):
                rank = peers.after(distance)
                source = peers.view(partial_ref, rank) if distance else partial_ref
                plgpu.copy_gmem_to_smem(
                    source.at[row_of(i)],
                    fetched.at[slot, rank],
                    landed.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        for i in range(min(slots, rows_per_block)):
            if_row(jnp.int32(i), lambda i=i: fetch(jnp.int32(i), i))

        def do_row(i):
            row = row_of(i)
            slot = lax.rem(i, jnp.int32(slots)) if slots > 1 else 0
            # Asked for before the wait, so that they travel at the same time as the peers' rows.
            residuals = [rows.load(residual_ref.at[row], window) for window in windows]
            weights = [rows.load(weight_ref, window) for window in windows]
            plgpu.barrier_wait(landed.at[slot])
            if rows_per_block == 1:
                peers.signal_all(read, interpreted=interpret is not None)
            else:
                last = row + jnp.int32(blocks) >= tokens
                pl.when(last)(lambda: peers.signal_all(read, interpreted=interpret is not None))
            rounded = []
            for window, old in zip(windows, residuals, strict=True):
                total = None
                for rank in range(world):
                    value = rows.load(fetched.at[slot, rank], window).astype(jnp.float32)
                    total = value if total is None else total + value
                y = rows.add_and_round(total, old)
                new_residual_ref[row, rows.part(window)] = y
                rounded.append(y)
            if rows_per_block > slots:
                plgpu.commit_smem()  # all threads have read the slot: the copy engine may fill it again
                pl.when(row_of(i + slots) < tokens)(lambda: fetch(i + slots, slot))
            rstd = rows.reciprocal_rms(rounded, windows, hidden=hidden, eps=eps)
            for window, y, scale in zip(windows, rounded, weights, strict=True):
                normed_ref[row, rows.part(window)] = rows.scale(
                    y, rstd, scale, unit_offset=unit_offset, out_dtype=out_dtype
                )

        rows.each_row(rows_per_block, lambda i: if_row(i, lambda: do_row(i)))
        peers.wait_all(read)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, hidden), out_dtype),
            jax.ShapeDtypeStruct((tokens, hidden), residual.dtype),
        ),
        scratch_types=dict(
            fetched=plgpu.SMEM((slots, world, hidden), partial.dtype),
            landed=plgpu.Barrier(num_arrivals=world, num_barriers=slots),
            read=plgpu.SemaphoreType.REGULAR,
        ),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=rows.compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(partial, residual, weight)
