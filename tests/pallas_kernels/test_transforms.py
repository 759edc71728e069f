"""Kernels that are used by themselves have the gradient and the batching of plain JAX: on a GPU models can be
differentiated and mapped as on the CPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import make_mesh
from pallas_kernels import rms_norm, transforms
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.matvec import chosen_matvec, matvec
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


@pytest.mark.parametrize("name", CASES)
def test_lowers_with_64_bit_numbers(name, count_case):
    operands, options = CASES[name]()
    run = getattr(importlib.import_module(f"pallas_kernels.{name}.api"), name)
    with jax.enable_x64(True):
        call = jax.jit(lambda *operands: run(*operands, **options, implementation="mosaic_gpu"))
        assert "mosaic_gpu_v2" in call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    count_case()


def test_over_a_mesh_with_integers_and_none():
    """Types that differ over mesh axes, an operand that is not there, one that has no gradient."""
    mesh, spec = make_mesh(2), jax.sharding.PartitionSpec("tensor")

    def plain(x, n, nothing):
        assert nothing is None
        return x * n

    def step(x, n):
        return jax.grad(
            lambda x: jnp.sum(transforms.as_of(plain, lambda *o: jax.lax.stop_gradient(plain(*o)))(x, n, None) ** 2)
        )(x)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    found = run(jnp.arange(4.0), jnp.array([1, 2, 3, 4], jnp.int32))
    assert found.tolist() == [0.0, 8.0, 36.0, 96.0]


@pytest.mark.parametrize("name", CASES)
def test_vmap_is_the_references(name, count_case):
    """Over the first operand and the last one that is there, two of each; the kernel itself cannot run here."""
    api = importlib.import_module(f"pallas_kernels.{name}.api")
    operands, options = CASES[name]()
    last = max(i for i, x in enumerate(operands) if x is not None)
    axes = [0 if i in (0, last) else None for i in range(len(operands))]
    two = [x if axis is None or x is None else jnp.stack([x, x[::-1]]) for x, axis in zip(operands, axes, strict=True)]

    def call(implementation):
        return lambda *operands: getattr(api, name)(*operands, **options, implementation=implementation)

    api._run.clear_cache()
    found = jax.vmap(call("mosaic_gpu"), axes)(*two)
    wanted = [call("reference")(*(x if a is None else x[i] for x, a in zip(two, axes, strict=True))) for i in (0, 1)]
    for i in (0, 1):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted[i]), strict=True):
            np.testing.assert_allclose(np.asarray(a[i], np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2)
    count_case()


def test_vmap_of_products(count_case):
    """matvec, chosen_matvec, rms_norm and grouped_matmul, which have no type of their own; vmap inside and outside of
    a gradient."""
    x, w = _normal(0, 3, 2, 64), _normal(1, 64, 64)
    chosen = jnp.array([[[0, 1], [2, 0]]] * 3, jnp.int32)
    many, weight = _normal(2, 4, 128, 64), _normal(3, 128)
    rows, tiles = _normal(4, 3, 48, 64), jnp.array([0, 1, 2], jnp.int32)
    used = jnp.array([3], jnp.int32)
    calls = {
        "matvec": (lambda i, x: matvec(x, w, implementation=i), x),
        "chosen_matvec": (lambda i, x: chosen_matvec(x, many, chosen[0], implementation=i), x),
        "rms_norm": (lambda i, x: rms_norm(x, x, weight, eps=1e-5, implementation=i)[0], _normal(5, 3, 2, 128)),
        "grouped_matmul": (lambda i, x: grouped_matmul(x, many, tiles, used, implementation=i), rows),
    }

    def squares(f):
        return jax.grad(lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2))

    for call, x in calls.values():
        for transform in (lambda f: f, squares):
            kernel, plain = (transform(functools.partial(call, i)) for i in ("mosaic_gpu", "reference"))
            for a, b in zip(jax.vmap(kernel)(x), map(plain, x), strict=True):
                np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2)
            count_case()
