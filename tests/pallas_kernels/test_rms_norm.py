"""Residual add + RMSNorm on one device against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unsupported, rms_norm
from pallas_kernels.rms_norm import api
from pallas_kernels.rms_norm.mosaic_gpu import add_rms_norm
from tests.pallas_kernels import allreduce_cases as cases
from tests.pallas_kernels.interpreter import interpreter


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


# ------------------------------------------------------------------------------------------------ the kernel
@pytest.mark.parametrize("dtype, residual", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("tokens, hidden, unit_offset", [(1, 1024, False), (3, 200, True)])
def test_kernel_in_the_interpreter(dtype, residual, tokens, hidden, unit_offset, count_case):
    options = dict(dtype=dtype, residual=residual, weight="float32", unit_offset=unit_offset)
    case = cases.problem(2, 1, tokens, hidden, **options)
    with interpreter() as interpret:
        normed, new_residual = add_rms_norm(
            case.partial[0], case.residual, case.weight, eps=cases.EPS, unit_offset=unit_offset,
            out_dtype=jnp.dtype(dtype), interpret=interpret,
        )  # fmt: skip
    cases.check(case, np.asarray(normed)[None], np.asarray(new_residual)[None])
    count_case()


@pytest.mark.parametrize("tokens, hidden", [(1, 4096), (64, 8192), (7, 2688), (2, 200)])
def test_kernel_lowers_to_one_launch(tokens, hidden, count_case):
    x = jax.ShapeDtypeStruct((1, tokens, hidden), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((hidden,), jnp.float32)
    call = jax.jit(lambda x, r, w: rms_norm(x, r, w, eps=1e-5, implementation="mosaic_gpu"))
    text = call.trace(x, x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    count_case()


def test_gradient_through_the_kernel_is_the_references(monkeypatch, count_case):
    """With the launch replaced by the reference without its gradient: the rule is what is tested here."""

    def launch(call, x, r, w):
        return jax.lax.stop_gradient(api.reference.add_rms_norm(x, r, w, **call.kwargs))

    monkeypatch.setattr(api, "_launch", launch)
    keys = jax.random.split(jax.random.key(0), 3)
    x, residual = (jax.random.normal(k, (2, 128)) for k in keys[:2])
    weight = 1 + 0.1 * jax.random.normal(keys[2], (128,))

    def loss(implementation):
        def total(*args):
            normed, new = rms_norm(*args, eps=1e-5, implementation=implementation)
            return jnp.sum(normed**3) + jnp.sum(jnp.sin(new))

        return jax.grad(total, argnums=(0, 1, 2))(x, residual, weight)

    for found, wanted in zip(loss("mosaic_gpu"), loss("reference"), strict=True):
        assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= 1e-5
    count_case()


def test_refusals():
    x = jnp.zeros((2, 100))
    with pytest.raises(Unsupported, match="multiple of 8"):
        rms_norm(x, x, jnp.ones(100), eps=1e-5, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match="no row"):
        rms_norm(jnp.zeros((0, 128)), jnp.zeros((0, 128)), jnp.ones(128), eps=1e-5, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match="residual"):
        rms_norm(x, None, jnp.ones(100), eps=1e-5, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation is 'triton'"):
        rms_norm(x, x, jnp.ones(100), eps=1e-5, implementation="triton")
