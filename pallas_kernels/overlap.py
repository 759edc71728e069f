"""Kernels that begin while the kernel in front of them still runs (CUDA's programmatic dependent launch).

A kernel that calls `begin` is launched with CUDA's attribute for it: as soon as every block of the kernel in front has
called `begin` too, or has ended, its own blocks take what room is left on the multiprocessors. There they wait until
the kernel in front has ended and what it wrote can be seen. So the time between two launches is gone, and what does not
depend on the kernel in front, such as the first tiles of a weight matrix, may be asked for before `begin`.

Why nothing is read too early: each kernel ends only after its own wait, so what comes before the kernel in front has
ended as well. Before `begin` a kernel may read what neither the kernel in front nor a copy in front of it writes: in a
model these are the weights. It may write nothing.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu


def begin() -> None:
    """Wait for the kernel in front, then let the next one in; by all threads that read or write afterwards."""
    plgpu.griddepcontrol_wait()
    _no_load_moves_up()
    plgpu.griddepcontrol_launch_dependents()


def _no_load_moves_up() -> None:
    # jax's wait has side effects for the compiler, but does not say that memory changes.
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu()
    def emit(ctx):
        del ctx
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "griddepcontrol.wait;", "~{memory}", has_side_effects=True)

    emit()
