"""All-reduce + residual + RMSNorm in one kernel in which each device does its share of the tokens for all.

Device d takes rows d*R .. (d+1)*R of the tokens, R = ceil(tokens / world): it fetches them from all devices, sums,
adds, normalises, and writes both results into every device's outputs. Norm work and fetched bytes shrink by the number
of devices; the link carries about 3 (world - 1) / world times the message per device instead of world - 1.

Synchronisation: as in one_shot.py, except that a block speaks to its peers once, when its rows have been read *and* its
results are written in their memory. Waiting for all peers before the exit covers both: partials may be reused, and
outputs are complete.
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


def two_shot(
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
    share = -(-tokens // world)
    blocks = layout.blocks_for(share, max_blocks)
    rows_per_block = -(-share // blocks)
    result_bytes = hidden * (jnp.dtype(out_dtype).itemsize + residual.dtype.itemsize)
    row_bytes = world * hidden * partial.dtype.itemsize
    slots = layout.slots_for(rows_per_block, row_bytes, reserved=2 * result_bytes)
    results = 2 if rows_per_block > 1 and slots * row_bytes + 2 * result_bytes <= layout.SMEM_BYTES else 1

    def kernel(
        partial_ref,
        residual_ref,
        weight_ref,
        normed_ref,
        new_residual_ref,
        *,
        fetched,
        landed,
        normed_row,
        residual_row,
        done,
    ):
        peers = signals.Peers(axis_name, world)
        block = lax.axis_index("block")
        first = peers.rank * jnp.int32(share)
        end = jnp.minimum(first + jnp.int32(share), jnp.int32(tokens))

        def row_of(i):
            return first + block + i * jnp.int32(blocks)

        def if_row(i, action):
            if tokens % world or share % blocks:
                pl.when(row_of(i) < end)(action)
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
            result = lax.rem(i, jnp.int32(results)) if results > 1 else 0
            residuals = [rows.load(residual_ref.at[row], window) for window in windows]
            weights = [rows.load(weight_ref, window) for window in windows]
            plgpu.barrier_wait(landed.at[slot])
            if rows_per_block > results:
                # Result buffers go round: the copies out of this one, `results` rows ago, must have read it.
                plgpu.wait_smem_to_gmem(results - 1, wait_read_only=True)
            rounded = []
            for window, old in zip(windows, residuals, strict=True):
                total = None
                for rank in range(world):
                    value = rows.load(fetched.at[slot, rank], window).astype(jnp.float32)
                    total = value if total is None else total + value
                y = rows.add_and_round(total, old)
                residual_row[result, rows.part(window)] = y
                rounded.append(y)
            if rows_per_block > slots:
                plgpu.commit_smem()
                pl.when(row_of(i + slots) < end)(lambda: fetch(i + slots, slot))
            rstd = rows.reciprocal_rms(rounded, windows, hidden=hidden, eps=eps)
            for window, y, scale in zip(windows, rounded, weights, strict=True):
                normed_row[result, rows.part(window)] = rows.scale(
                    y, rstd, scale, unit_offset=unit_offset, out_dtype=out_dtype
                )
            plgpu.commit_smem()
            for distance in range(world):
                rank = peers.after(distance)
                for source, target in ((residual_row, new_residual_ref), (normed_row, normed_ref)):
                    target = peers.view(target, rank) if distance else target
                    # One commit group per row, closed by its last copy.
                    closes = distance == world - 1 and source is normed_row
                    plgpu.copy_smem_to_gmem(source.at[result], target.at[row], commit_group=closes)

        rows.each_row(rows_per_block, lambda i: if_row(i, lambda: do_row(i)))
        plgpu.wait_smem_to_gmem(0)  # written in the peers' memory, not only read from ours
        peers.signal_all(done, interpreted=interpret is not None)
        peers.wait_all(done)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, hidden), out_dtype),
            jax.ShapeDtypeStruct((tokens, hidden), residual.dtype),
        ),
        scratch_types=dict(
            fetched=plgpu.SMEM((slots, world, hidden), partial.dtype),
            landed=plgpu.Barrier(num_arrivals=world, num_barriers=slots),
            normed_row=plgpu.SMEM((results, hidden), out_dtype),
            residual_row=plgpu.SMEM((results, hidden), residual.dtype),
            done=plgpu.SemaphoreType.REGULAR,
        ),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=rows.compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(partial, residual, weight)
