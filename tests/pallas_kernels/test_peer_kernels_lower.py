"""Lowering for CUDA without a GPU: every kernel and real row length, 2, 4 and 8 devices; the programs around them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import allreduce_rms_norm
from pallas_kernels.allreduce_rms_norm import PEER_MEMORY, abstract_flags_state, flags_state_specs, shapes, support
from pallas_kernels.allreduce_rms_norm.flags_state import write_addresses
from pallas_kernels.allreduce_rms_norm.probe import neighbour_program
from tests.pallas_kernels import allreduce_cases as cases

TOKENS = (*shapes.DECODE_TOKENS, *shapes.PREFILL_TOKENS, 133)
ALL = list(itertools.product(PEER_MEMORY, shapes.WORLDS, shapes.HIDDEN.values()))


@pytest.fixture(autouse=True)
def pretend_gpu(monkeypatch):
    """The virtual devices are CPUs; what is lowered here is meant for GPUs."""
    monkeypatch.setattr(support, "_GPU", ("gpu", "cuda", "cpu"))


def lower(implementation, mesh, tokens, hidden, *, dtype="bfloat16", residual="bfloat16", loop=0, varying=("tensor",)):
    state = abstract_flags_state(mesh, "tensor", max(tokens, 1), hidden, dtype) if implementation == "flags" else None

    def body(partial, residual, weight, state):
        def one(partial, residual):
            return allreduce_rms_norm(
                partial, residual, weight, axis_name="tensor", eps=1e-5, implementation=implementation, state=state
            )

        if not loop:
            return one(partial, residual)

        def step(carry, _):
            normed, new = one(*carry)
            return (normed * lax.axis_index("tensor").astype(normed.dtype), new), None

        (_, new), _ = lax.scan(step, (partial, residual), None, length=loop)
        return new, new

    rest = P(*(axis for axis in varying if axis != "tensor"))
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(varying), rest, P(), flags_state_specs(state)),
        out_specs=rest,
    )
    data = mesh.size // mesh.shape["tensor"]
    arguments = (
        jax.ShapeDtypeStruct((mesh.size * tokens, hidden), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((data * tokens, hidden), jnp.dtype(residual)),
        jax.ShapeDtypeStruct((hidden,), jnp.bfloat16),
        state,
    )
    return jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def check_text(text, implementation, calls=1):
    assert text.count("mosaic_gpu_v2") == calls
    assert "all_reduce" not in text and "all_gather" not in text
    # flags must not ask XLA for its peers: that costs at every start of a program, and puts a barrier in front
    assert ("uses_xla_collective_metadata = true" in text) == (implementation != "flags")
    if implementation != "flags":
        assert "skip_device_barrier = false" in text


@pytest.mark.parametrize("number", range(len(ALL)))
def test_every_shape(number, count_case):
    implementation, world, hidden = ALL[number]
    tokens = TOKENS[number % len(TOKENS)]
    residual = ("bfloat16", "float32")[number % 2]
    check_text(lower(implementation, cases.mesh(world), tokens, hidden, residual=residual), implementation)
    count_case()


@pytest.mark.full
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("implementation", PEER_MEMORY)
def test_every_shape_and_token_count(implementation, tokens, count_case):
    for world, hidden in itertools.product(shapes.WORLDS, shapes.HIDDEN.values()):
        check_text(lower(implementation, cases.mesh(world), tokens, hidden), implementation)
        count_case()


@pytest.mark.parametrize("implementation", PEER_MEMORY)
def test_other_programs(implementation, count_case):
    """Other dtypes, short rows, a world that is no power of two, no tokens, a loop, a mesh of two axes."""
    for dtype, hidden, world in (("float16", 3136, 3), ("float32", 192, 4), ("bfloat16", 136, 2)):
        text = lower(implementation, cases.mesh(world), 5, hidden, dtype=dtype, residual=dtype)
        check_text(text, implementation)
    assert "mosaic_gpu_v2" not in lower(implementation, cases.mesh(2), 0, 4096)
    check_text(lower(implementation, cases.mesh(2), 1, 4096, loop=7), implementation)
    both = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    check_text(lower(implementation, both, 3, 2688, varying=("data", "tensor")), implementation)
    count_case(5)


def test_probe_and_addresses(count_case):
    both = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    for mesh in (cases.mesh(2), cases.mesh(8), both):
        numbers = jax.ShapeDtypeStruct((mesh.size, 128), jnp.int32)
        assert "mosaic_gpu_v2" in neighbour_program(mesh).trace(numbers).lower(lowering_platforms=("cuda",)).as_text()
        state = abstract_flags_state(mesh, "tensor", 8, 4096, "bfloat16")
        axes = P(mesh.axis_names)
        table = jax.shard_map(
            lambda stage, control, mesh=mesh: write_addresses(stage, control, "tensor", mesh.shape["tensor"])[None],
            mesh=mesh,
            in_specs=axes,
            out_specs=axes,
            check_vma=False,
        )
        assert (
            "mosaic_gpu_v2"
            in jax.jit(table).trace(state.stage, state.control).lower(lowering_platforms=("cuda",)).as_text()
        )
        count_case()


@pytest.mark.parametrize("implementation", PEER_MEMORY)
def test_with_64_bit_numbers(implementation, count_case):
    """Blocks that go through many rows."""
    with jax.enable_x64(True):
        check_text(lower(implementation, cases.mesh(2), 4096, 4096), implementation)
    count_case()


def test_calls_of_one_shape_share_their_lowering():
    """52 layers must not take 52 times as long to lower: they call one function of the module."""
    mesh = cases.mesh(2)

    def layers(partial, residual, weight):
        for _ in range(6):
            partial, residual = allreduce_rms_norm(
                partial, residual, weight, axis_name="tensor", eps=1e-5, implementation="one_shot"
            )
            partial = partial * lax.axis_index("tensor").astype(partial.dtype)
        return residual

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P())
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 4096), (1, 4096), (4096,))]
    text = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and text.count("call @_run") == 6
