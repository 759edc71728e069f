"""Residual add + RMSNorm on one device against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from tests.pallas_kernels import allreduce_cases as cases


@pytest.mark.parametrize("dtype, residual", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_with_residual(dtype, residual, unit_offset, count_case):
    case = cases.problem(1, 1, 5, 200, dtype=dtype, residual=residual, weight="float32", unit_offset=unit_offset)
    call = jax.jit(lambda x, r, w: rms_norm(x, r, w, eps=cases.EPS, unit_offset=unit_offset))
    normed, new_residual = call(case.partial[0], case.residual, case.weight)
    cases.check(case, np.asarray(normed)[None], np.asarray(new_residual)[None])
    count_case()


def test_without_residual(count_case):
    """The first norm of a stack: what comes in becomes the stream."""
    x = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    normed, stream = rms_norm(jnp.asarray(x), None, jnp.ones(64), eps=1e-5, out_dtype=jnp.bfloat16)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    assert normed.dtype == jnp.bfloat16 and (np.asarray(stream) == x).all()
    assert np.abs(np.asarray(normed, np.float64) - want).max() <= 2.0**-8 * np.abs(want).max()
    count_case()


def test_zero_rows_and_no_rows():
    normed, _ = rms_norm(jnp.zeros((2, 64)), jnp.zeros((2, 64)), jnp.ones(64), eps=1e-5)
    assert (normed == 0).all()
    assert rms_norm(jnp.zeros((0, 64)), jnp.zeros((0, 64)), jnp.ones(64), eps=1e-5)[0].shape == (0, 64)


def test_all_faults_at_once():
    with pytest.raises(ValueError) as caught:
        rms_norm(jnp.zeros((2, 64), jnp.int32), jnp.zeros((3, 64)), jnp.ones(32, jnp.int8), eps=1e-5)
    for part in ("x has dtype int32", "residual has shape (3, 64)", "weight has shape (32,)", "weight has dtype int8"):
        assert part in str(caught.value)
