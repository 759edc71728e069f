"""The memory that the one-launch form `flags` keeps between calls.

Every device owns
    stage    [blocks, 2, world, rows, words]   packets that its peers write, see flags.py
    control  [2 * (3 + world) + blocks]        rank, addresses of both arrays and all stages, calls of each block

The kernel itself counts its calls, in the memory of its own device. So nothing outside has to count along: an exception
on the host, a change of shape, two models or two executables that take turns cannot put the devices out of step, as
long as every device runs the same programs in the same order, which is what a jitted SPMD program is.

The addresses are looked up once, when the state is made. A kernel that asks XLA for its peers' addresses (one_shot,
two_shot) has a table of them copied to the device for every call site of a program, each time the program starts: some
40 us per call site, which a decode step launched from the host would pay at every layer.

Rules for the holder:
* pass it through `jit` and `shard_map` as an argument (specs from `flags_state_specs`), never donate it, never move or
  copy it: the kernel writes into these very buffers, behind XLA's back. A kernel that is handed a copy stops with a
  trap instead of writing to where the original was.
* calls that share one state must depend on one another, as the layers of a model do. XLA may run two independent
  kernels of one CUDA graph at the same time, and these two would share a counter. Independent streams of calls take one
  state each.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.allreduce_rms_norm import layout
from pallas_kernels.errors import Unsupported
from pallas_kernels.rms_norm.windows import DTYPES, THREADS, row_fault

MAX_BLOCKS = 128
ONE_PROCESS = (
    "needs one process for all devices: with several, XLA hands a kernel copies of its arguments in memory that peers "
    "can reach, and what the kernel keeps between calls would be lost"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stage", "control"],
    meta_fields=["mesh_axes", "axis_name", "world", "max_tokens", "hidden", "dtype", "blocks"],
)
@dataclasses.dataclass(frozen=True)
class FlagsState:
    """Staging buffers and call counters of the `flags` form; a pytree of two arrays, sharded over every axis of the
    mesh.

    Attributes:
        stage: int32 [devices, ...], one slice per device of the mesh.
        control: int32 [devices, 2 * (3 + world) + blocks].
        mesh_axes: names of the mesh's axes, in order.
        axis_name: the axis that is summed over.
        world: size of that axis.
        max_tokens: the largest token count a call may have.
        hidden: row length.
        dtype: name of the partial's dtype.
        blocks: thread blocks per call at most.
    """

    stage: jax.Array
    control: jax.Array
    mesh_axes: tuple[str, ...]
    axis_name: str
    world: int
    max_tokens: int
    hidden: int
    dtype: str
    blocks: int

    @property
    def rows(self) -> int:
        """Rows that one block can take in one call."""
        return max(1, -(-self.max_tokens // self.blocks))

    def fault(self, *, tokens: int, hidden: int, dtype: jnp.dtype, world: int, max_blocks: int | None) -> str | None:
        """Why a call of this shape does not fit into this state, or None."""
        blocks = min(self.blocks, max_blocks or self.blocks)
        if (hidden, jnp.dtype(dtype).name, world) != (self.hidden, self.dtype, self.world):
            return (
                f"the flags state was made for hidden {self.hidden}, {self.dtype} and {self.world} devices; "
                f"this call has hidden {hidden}, {jnp.dtype(dtype).name} and {world} devices"
            )
        if tokens > blocks * self.rows:
            return f"the flags state holds {blocks * self.rows} tokens with {blocks} blocks; this call has {tokens}"
        return None


def state_bytes(*, world: int, max_tokens: int, hidden: int, dtype: jnp.dtype, max_blocks: int | None = None) -> int:
    """Bytes of device memory that `make_flags_state` takes on each device."""
    blocks = min(max_blocks or MAX_BLOCKS, max(1, max_tokens))
    rows = max(1, -(-max_tokens // blocks))
    return 4 * (math.prod(_stage_shape(blocks, world, rows, hidden, jnp.dtype(dtype))) + table_words(world) + blocks)


def table_words(world: int) -> int:
    """Words of `control` before the counters: 64-bit entries for the rank, the own stage and the stage of every
    rank."""
    return 2 * (3 + world)


def _stage_shape(blocks: int, world: int, rows: int, hidden: int, dtype: jnp.dtype) -> tuple[int, ...]:
    return (blocks, 2, world, rows, layout.packet_words(hidden, dtype))


def make_flags_state(
    mesh: Mesh,
    axis_name: str,
    max_tokens: int,
    hidden: int,
    dtype: jax.typing.DTypeLike,
    max_blocks: int | None = None,
) -> FlagsState | None:
    """Allocate the state of the `flags` form on every device of `mesh`; returns once all devices hold it, zeroed.

    Args:
        mesh: the mesh under which the kernel will run.
        axis_name: the axis that is summed over. With one device on it no state is needed and None is returned.
        max_tokens: the largest token count of a call.
        hidden: row length, a multiple of 8, at least 128.
        dtype: dtype of the partials: bfloat16, float16 or float32.
        max_blocks: thread blocks per call at most; lower it when several ranks share one GPU.

    Raises:
        ValueError: an argument is out of range, or the axis is not one of the mesh's.
        Unsupported: the mesh spans several processes.
    """
    dtype = jnp.dtype(dtype)
    faults = []
    if axis_name not in mesh.axis_names:
        faults.append(f"axis_name is {axis_name!r}; accepted: {', '.join(map(repr, mesh.axis_names))}")
    if max_tokens < 1:
        faults.append(f"max_tokens is {max_tokens}; accepted: 1 or more")
    if (fault := row_fault(hidden)) is not None:
        faults.append(fault)
    if dtype not in DTYPES:
        faults.append(f"dtype is {dtype}; accepted: bfloat16, float16, float32")
    if max_blocks is not None and not 1 <= max_blocks <= MAX_BLOCKS:
        faults.append(f"max_blocks is {max_blocks}; accepted: 1 to {MAX_BLOCKS}")
    if faults:
        raise ValueError("make_flags_state: " + "; ".join(faults))
    world = mesh.shape[axis_name]
    if world == 1:
        return None
    if mesh.is_multi_process:
        raise Unsupported(f"make_flags_state: {ONE_PROCESS}")
    blocks = min(max_blocks or MAX_BLOCKS, max_tokens)
    rows = -(-max_tokens // blocks)
    axes = tuple(mesh.axis_names)
    spec = PartitionSpec(axes)
    shapes = ((mesh.size, *_stage_shape(blocks, world, rows, hidden, dtype)), (mesh.size, table_words(world) + blocks))
    sharding = NamedSharding(mesh, spec)
    zeros = jax.jit(lambda: tuple(jnp.zeros(shape, jnp.int32) for shape in shapes), out_shardings=(sharding, sharding))
    stage, control = zeros()
    if mesh.devices.flat[0].platform in ("gpu", "cuda"):
        # On other platforms the state can be made and passed around, for tests; the kernel does not run there.
        jax.block_until_ready(
            jax.jit(
                jax.shard_map(
                    lambda stage, control: write_addresses(stage, control, axis_name, world)[None],
                    mesh=mesh,
                    in_specs=spec,
                    out_specs=spec,
                    check_vma=False,
                )
            )(stage, control)
        )
    # A peer may write into a stage as soon as its own program runs: nobody leaves before everybody's zeros are written.
    ready = jax.jit(
        jax.shard_map(
            lambda s, c: jax.lax.psum(s[(slice(None),) + (0,) * (s.ndim - 1)] + c[:, -1], axes),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
        )
    )(stage, control)
    if np.asarray(ready).any():
        raise RuntimeError("make_flags_state: freshly zeroed memory reads as non-zero")
    return FlagsState(stage, control, axes, axis_name, world, max_tokens, hidden, dtype.name, blocks)


def abstract_flags_state(
    mesh: Mesh, axis_name: str, max_tokens: int, hidden: int, dtype: jax.typing.DTypeLike, max_blocks: int | None = None
) -> FlagsState | None:
    """`make_flags_state` without memory: shapes and shardings, to lower and compile a program that takes a state."""
    dtype, world, axes = jnp.dtype(dtype), mesh.shape[axis_name], tuple(mesh.axis_names)
    if world == 1:
        return None
    blocks = min(max_blocks or MAX_BLOCKS, max_tokens)
    rows = -(-max_tokens // blocks)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    shapes = (
        (mesh.size, *_stage_shape(blocks, world, rows, hidden, dtype)),
        (mesh.size, table_words(world) + blocks),
    )
    stage, control = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes)
    return FlagsState(stage, control, axes, axis_name, world, max_tokens, hidden, dtype.name, blocks)


def flags_state_specs(state: FlagsState | None) -> FlagsState | None:
    """The partition specs of a state, as a pytree of its own shape, for `shard_map`'s in_specs."""
    if state is None:
        return None
    return jax.tree.map(lambda _: PartitionSpec(state.mesh_axes), state)


def write_addresses(stage: jax.Array, control: jax.Array, axis_name: str, world: int) -> jax.Array:
    """Write the head of this device's `control`, in place: rank, own stage, own control, stages of all ranks.

    Runs inside shard_map, in a program whose arguments are the two arrays themselves. The result means nothing; it is
    there to be waited for.
    """
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    from pallas_kernels.inline import lasting

    def kernel(stage_ref, control_ref, done_ref):
        rank = jax.lax.axis_index(axis_name)
        stages = [plgpu.remote_ref(stage_ref, {axis_name: jnp.int32(other)}) for other in range(world)]

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, lasting(), [lasting()] * (1 + world)))
        def write(ctx, rank, control, stages):
            del ctx
            i64 = ir.IntegerType.get_signless(64)
            entries = [arith.extui(i64, rank.registers.item())]
            entries += [llvm.ptrtoint(i64, utils.memref_ptr(ref)) for ref in (stages[0], control, *stages[1:])]
            with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
                for place, entry in enumerate(entries):
                    llvm.inline_asm(
                        ir.Type.parse("!llvm.void"),
                        [utils.memref_ptr(control), entry],
                        f"st.global.b64 [$0+{8 * place}], $1;",
                        "l,l,~{memory}",
                        has_side_effects=True,
                    )

        write(rank, control_ref, [stage_ref, *stages])
        done_ref[...] = plgpu.layout_cast(
            jnp.broadcast_to(rank, (THREADS,)), plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        )

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(stage, control)
