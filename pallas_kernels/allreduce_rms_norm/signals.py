"""Telling peers, from inside a kernel, that something is done."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Peers:
    """The devices of one axis as seen from one of them, inside a kernel.

    `others` starts with the next rank, so that the devices do not all turn to the same one first.
    """

    def __init__(self, axis_name: str, world: int):
        self.axis_name, self.world = axis_name, world
        self.rank = lax.axis_index(axis_name)

    def after(self, distance: int) -> jax.Array:
        """Rank of the device `distance` places further round the ring."""
        return lax.rem(self.rank + jnp.int32(distance), jnp.int32(self.world))

    @property
    def others(self) -> list[jax.Array]:
        return [self.after(distance) for distance in range(1, self.world)]

    def view(self, ref: Any, rank: jax.Array) -> Any:
        """The same buffer in the memory of another rank; on a mesh of more axes, of the same place along the others."""
        return plgpu.remote_ref(ref, {self.axis_name: rank})

    def signal_all(self, semaphore: Any, *, interpreted: bool) -> None:
        """Add one to the semaphore on every other device, after everything that this block has done before."""
        if interpreted:  # the interpreter skips inline code
            for rank in self.others:
                pl.semaphore_signal(semaphore, 1, device_id={self.axis_name: rank})
        else:
            _fence_and_add([self.view(semaphore, rank) for rank in self.others])

    def wait_all(self, semaphore: Any) -> None:
        """Wait until every other device has signalled once."""
        pl.semaphore_wait(semaphore, value=self.world - 1, decrement=False)


def _fence_and_add(semaphores: Sequence[Any]) -> None:
    """One fence, then relaxed additions.

    `pl.semaphore_signal` would fence and synchronise the block once per peer, and `plgpu.semaphore_signal_parallel`
    puts its fence behind the additions, where it orders nothing.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(semaphores))
    def emit(ctx, *refs):
        del ctx
        utils.warpgroup_barrier()  # every thread of the block is done before one of them speaks for all
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            adds = "".join(f"red.relaxed.sys.global.add.u32 [${i}], 1;\n" for i in range(len(refs)))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [utils.memref_ptr(ref) for ref in refs],
                "fence.acq_rel.sys;\n" + adds,
                ",".join(["l"] * len(refs)) + ",~{memory}",
                has_side_effects=True,
            )

    emit(*semaphores)
