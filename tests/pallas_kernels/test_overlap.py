"""Kernels that begin while the one in front still runs: which do, and what matvec asks for before. On a GPU:
tests/gpu/overlap_checks.py."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matvec import mosaic_gpu, reference
from tests.gpu import matvec_checks, overlap_checks
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter

KERNELS = "mamba_step,rms_norm,decode_attention,matvec"


def step_for_cuda(setting: str) -> str:
    x, residual, (cache,), (weights,) = jax.eval_shape(lambda: overlap_checks.problem(0, 1, 1, 1024, 1024, 2048, 8, 2))
    length = jax.ShapeDtypeStruct((1,), "int32")
    with traced_for(setting):
        traced = jax.jit(lambda *a: overlap_checks.step(*a)).trace(x, residual, cache, weights, length)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_every_kernel_of_a_step_overlaps_where_asked(count_case):
    plain, overlapping = step_for_cuda(KERNELS), step_for_cuda(f"{KERNELS},overlap")
    launches = plain.count("mosaic_gpu_v2")
    assert launches >= 9 and "uses_pdl" not in plain
    assert overlapping.count("mosaic_gpu_v2") == overlapping.count("uses_pdl") == launches
    count_case(2)


@pytest.mark.parametrize("tiling", [(72, 64, 2, 1, 2), (32, 128, 4, 2, 3), (136, 64, 8, 1, 2)])
def test_first_steps_of_a_matrix_asked_for_before(tiling, count_case):
    """More tiles than blocks, fewer steps than stages: each step is fetched once, whoever asks for it."""
    x, w = matvec_checks.problem(1, 3, 200, 256)
    with interpreter() as interpret:
        found = mosaic_gpu.matvec(
            x, w, out_dtype=x.dtype, tiling=mosaic_gpu.Tiling(*tiling), overlap=True, interpret=interpret
        )
    wanted = reference.matvec(x.astype(jnp.float32), w.astype(jnp.float32), out_dtype=jnp.float32).astype(x.dtype)
    matvec_checks.compare(found, wanted)
    count_case()
