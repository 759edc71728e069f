"""Kernels that are used by themselves have the gradient of plain JAX: models can be differentiated on a GPU."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import make_mesh
from pallas_kernels import gradient
from tests.gpu.decode_kernel_checks import attention_problem
from tests.gpu.decode_kernel_checks import problem as mamba_problem
from tests.pallas_kernels import chunk_scan_cases


def _normal(seed, *shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _mamba_step():
    operands, groups = mamba_problem(0, (4, 32, 64, 2), 3, "bfloat16")
    return operands, dict(groups=groups, eps=1e-5)


def _decode_attention():
    return attention_problem(1, (4, 2), 64, (5, 0, 63)), {}


def _prefill_attention():
    k, v = _normal(1, 2, 72, 2, 64), _normal(2, 2, 72, 2, 64)
    start, new = jnp.array([3, 0], jnp.int32), jnp.array([64, 60], jnp.int32)
    return (_normal(0, 2, 64, 4, 64), k, v, start, new), dict(clean=True)


def _chunk_scan():
    return chunk_scan_cases.problem(3, (2, 64, 64, 1), 2, 20), dict(groups=1, head_dim=64, chunk=8)


def _causal_conv():
    return (_normal(0, 2, 9, 192), _normal(1, 128, 1, 4, dtype="float32"), None, _normal(2, 2, 3, 128)), dict(start=64)


def _gated_norm():
    y, weight = _normal(0, 2, 16, 128, dtype="float32"), _normal(2, 128, dtype="float32")
    return (y, _normal(1, 2, 16, 192), weight), dict(groups=2, eps=1e-5, start=64)


CASES = {
    "mamba_step": _mamba_step,
    "decode_attention": _decode_attention,
    "prefill_attention": _prefill_attention,
    "chunk_scan": _chunk_scan,
    "causal_conv": _causal_conv,
    "gated_norm": _gated_norm,
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_references(name, monkeypatch, count_case):
    """The kernel itself is replaced, by what has the right values and no gradient of its own: this is about what
    differentiation does with the operation around it."""
    api, typed, reference = (
        importlib.import_module(f"pallas_kernels.{name}.{part}") for part in ("api", "typed", "reference")
    )
    operands, options = CASES[name]()
    plain, ran = getattr(reference, name), []

    def kernel(*operands, **kwargs):
        ran.append(name)
        kwargs |= {"chunk": options["chunk"]} if name == "chunk_scan" else {}
        return jax.lax.stop_gradient(plain(*(operands[0] if isinstance(operands[0], list) else operands), **kwargs))

    monkeypatch.setattr(typed, name, kernel)
    floats = [i for i, x in enumerate(operands) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(implementation, *values):
        mine = list(operands)
        for i, value in zip(floats, values, strict=True):
            mine[i] = value
        out = getattr(api, name)(*mine, **options, implementation=implementation)
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(out))

    grads = jax.grad(loss, argnums=tuple(range(1, len(floats) + 1)))
    values = [operands[i] for i in floats]
    api._run.clear_cache()
    found = grads("mosaic_gpu", *values)
    wanted = grads("reference", *values)
    assert ran and any(np.asarray(x, np.float32).any() for x in wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-3)
    api._run.clear_cache()  # what was traced here is no kernel
    count_case()


def test_over_a_mesh_with_integers_and_none():
    """Types that differ over mesh axes, an operand that is not there, one that has no gradient."""
    mesh, spec = make_mesh(2), jax.sharding.PartitionSpec("tensor")

    def plain(x, n, nothing):
        assert nothing is None
        return x * n

    def step(x, n):
        return jax.grad(
            lambda x: jnp.sum(gradient.as_of(plain, lambda *o: jax.lax.stop_gradient(plain(*o)))(x, n, None) ** 2)
        )(x)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    found = run(jnp.arange(4.0), jnp.array([1, 2, 3, 4], jnp.int32))
    assert found.tolist() == [0.0, 8.0, 36.0, 96.0]
