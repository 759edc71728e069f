"""allreduce_rms_norm as users call it, on virtual CPU devices: meaning, types, gradients, transformations, refusals."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import Unsupported, allreduce_rms_norm
from pallas_kernels.allreduce_rms_norm import (
    IMPLEMENTATIONS,
    PEER_MEMORY,
    peers_reachable,
    reference,
    unreachable_reason,
)
from tests.pallas_kernels import allreduce_cases as cases

SPLIT, SAME = P("tensor"), P()
SPLIT, SAME = P("tensor"), P()
PORTABLE = ("reference", "psum", "gather")
DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32"))


def fused(implementation, **kwargs):
    return functools.partial(
        allreduce_rms_norm, axis_name="tensor", eps=cases.EPS, implementation=implementation, **kwargs
    )


@pytest.mark.parametrize("implementation", [*PORTABLE, None])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_values(implementation, world, count_case):
    shapes = ((0, 64), (1, 192), (world + 1, 200), (4, 72))
    for seed, ((dtype, residual), (tokens, hidden)) in enumerate(zip(DTYPES, shapes, strict=True)):
        unit_offset = seed % 2 == 0
        weight = ("float32", dtype)[seed // 2]
        case = cases.problem(
            seed, world, tokens, hidden, dtype=dtype, residual=residual, weight=weight, unit_offset=unit_offset
        )
        outs = cases.run(case, fused(implementation, unit_offset=unit_offset))
        cases.check(case, *outs, exact=implementation in ("reference", "gather"))
        count_case()


@pytest.mark.parametrize("implementation", PORTABLE)
def test_special_values(implementation, count_case):
    """Negative zero, subnormals, a huge channel, cancellation, a row of zeros; infinities and NaN stay in place."""
    case = cases.problem(3, 4, 6, 64)
    case.partial[:, 0, :4] = case.residual[0, :4] = -0.0
    case.partial[:, 0, 4:8] = -1e-39
    case.partial[:, 1, 5] = 75_000
    case.partial[:, 2] = case.residual[2] = 0
    case.partial[0, 3, 0], case.partial[1, 3, 0] = 2e38, -2e38
    normed, new_residual = cases.run(case, fused(implementation))
    cases.check(case, normed, new_residual, exact=implementation != "psum")
    assert (normed[0][2] == 0).all()
    case.partial[1, 4, 7], case.partial[2, 5, 7] = np.inf, np.nan
    normed, new_residual = cases.run(case, fused(implementation))
    assert np.isfinite(normed[0][:4].astype(np.float32)).all()
    assert np.isinf(new_residual[0][4, 7].astype(np.float32)) and np.isnan(normed[0][5].astype(np.float32)).all()
    count_case()


def test_the_norm_is_taken_of_what_is_stored(count_case):
    """XLA drops float32 -> bfloat16 -> float32 as excess precision; the norm must see the rounded value."""
    hidden = 64
    weight = np.ones(hidden, np.float32)
    # 1 + 2^-9 rounds to 1; unrounded it would be seen in a float32 result.
    partial = np.full((2, 1, hidden), 2.0**-10, np.float32)
    residual = np.ones((1, hidden), cases.NUMPY["bfloat16"])
    residual[0, 0] = 64
    case = cases.Problem(partial, residual, weight)
    for implementation in PORTABLE:
        normed, _ = cases.run(case, fused(implementation))
        want = case.normed_float64()
        assert np.abs(normed[0] - want).max() < 1e-6 * np.abs(want).max()
        count_case()


def test_leading_dimensions_and_out_dtype(count_case):
    case = cases.problem(5, 2, 6, 64)
    shaped = cases.Problem(case.partial.reshape(2, 2, 3, 64), case.residual.reshape(2, 3, 64), case.weight)
    normed, new_residual = cases.run(shaped, fused("gather", out_dtype=jnp.float32))
    cases.check(shaped, normed, new_residual, out_dtype="float32")
    count_case()


def test_data_and_tensor_mesh(count_case):
    """Sums over the named axis only; the other axis has different data in every place."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    halves = [cases.problem(seed, 4, 3, 64) for seed in (1, 2)]
    partial = np.stack([half.partial for half in halves])  # [data, tensor, tokens, hidden]
    residual = np.stack([half.residual for half in halves])
    for implementation in ("reference", "gather"):
        call = jax.shard_map(
            lambda p, r, w, implementation=implementation: fused(implementation)(p[0, 0], r[0], w),
            mesh=mesh,
            in_specs=(P("data", "tensor"), P("data"), P()),
            out_specs=P("data"),
        )
        _, new_residual = jax.jit(call)(partial, residual, halves[0].weight)
        want = np.concatenate([half.new_residual() for half in halves])
        assert (cases.bits(new_residual) == cases.bits(want)).all()
        count_case()


def _loss(function, case, mesh):
    def body(partial, residual, weight):
        normed, new_residual = function(partial[0], residual, weight)
        return (jnp.sin(normed.astype(jnp.float32)) + new_residual.astype(jnp.float32) ** 2).sum()

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P())
    return jax.jit(jax.grad(mapped, argnums=(0, 1, 2)))(case.partial, case.residual, case.weight)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_gradients(implementation, unit_offset, count_case):
    """Those of the plain expression, differentiated by JAX: in particular not multiplied by the number of devices."""
    case = cases.problem(9, 4, 5, 72, dtype="float32", residual="float32", weight="float32")

    def plain(partial, residual, weight):
        return reference.exact(
            partial,
            residual,
            weight,
            axis_name="tensor",
            eps=cases.EPS,
            unit_offset=unit_offset,
            out_dtype=partial.dtype,
        )

    got = _loss(fused(implementation, unit_offset=unit_offset), case, cases.mesh(4))
    want = _loss(plain, case, cases.mesh(4))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
    count_case()


def test_gradients_keep_dtypes():
    case = cases.problem(9, 2, 5, 72, residual="float32", weight="float16")
    grads = _loss(fused("gather"), case, cases.mesh(2))
    assert [g.dtype.name for g in grads] == ["bfloat16", "float32", "float16"]


def test_vmap(count_case):
    """A mapped axis becomes more tokens; a mapped weight is refused."""
    case = cases.problem(21, 2, 6, 64)
    partial, residual = case.partial.reshape(2, 3, 2, 64), case.residual.reshape(3, 2, 64)

    def body(partial, residual, weight):
        return jax.vmap(lambda p, r: fused("gather")(p, r, weight))(partial[0], residual)

    mapped = jax.shard_map(body, mesh=cases.mesh(2), in_specs=(P("tensor"), P(), P()), out_specs=P())
    _, new_residual = jax.jit(mapped)(partial, residual, case.weight)
    assert (cases.bits(new_residual).reshape(6, 64) == cases.bits(case.new_residual())).all()
    # differentiated as well
    grad = jax.grad(lambda w: mapped(partial, residual, w)[0].astype(jnp.float32).sum())(case.weight)
    assert np.isfinite(np.asarray(grad, np.float32)).all() and np.abs(np.asarray(grad, np.float32)).max() > 0

    def over_weights(partial, residual, weights):
        return jax.vmap(lambda w: fused("gather")(partial[0, 0], residual[0], w))(weights)

    refused = jax.shard_map(over_weights, mesh=cases.mesh(2), in_specs=(P("tensor"), P(), P()), out_specs=P())
    with pytest.raises(Unsupported, match="vmap over the weight"):
        jax.jit(refused)(partial, residual, np.stack([case.weight] * 2))
    count_case()


@pytest.mark.parametrize("implementation", PORTABLE)
def test_inside_scan_while_jit_and_with_donation(implementation, count_case):
    """Three calls in a row, each on the last one's results, under every way to write that."""
    case = cases.problem(31, 4, 2, 64, dtype="float32", residual="float32", weight="float32")
    mesh = cases.mesh(4)

    def step(partial, residual, weight):
        normed, residual = fused(implementation)(partial, residual, weight)
        return normed * (1 + lax.axis_index("tensor")), residual

    def by_loop(partial, residual, weight):
        for _ in range(3):
            partial, residual = jax.jit(step)(partial, residual, weight)
        return residual

    def by_scan(partial, residual, weight):
        return lax.scan(lambda c, _: (step(*c, weight), None), (partial, residual), None, length=3)[0][1]

    def by_while(partial, residual, weight):
        def body(carry):
            return carry[0] + 1, *step(*carry[1:], weight)

        return lax.while_loop(lambda c: c[0] < 3, body, (0, partial, residual))[2]

    def by_remat(partial, residual, weight):
        for _ in range(3):
            partial, residual = jax.checkpoint(step)(partial, residual, weight)
        return residual

    results = []
    for way in (by_loop, by_scan, by_while, by_remat):
        mapped = jax.shard_map(
            lambda p, r, w, way=way: way(p[0], r, w), mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P()
        )
        results.append(
            np.asarray(jax.jit(mapped, donate_argnums=1)(*map(jnp.array, (case.partial, case.residual, case.weight))))
        )
        assert np.allclose(results[-1], results[0], rtol=1e-6, atol=1e-6)
        count_case()


def test_one_device_communicates_nothing(count_case):
    """Specs P(): no collective in the compiled program."""
    case = cases.problem(41, 1, 3, 64)
    for implementation in (*IMPLEMENTATIONS, None):
        call = jax.shard_map(fused(implementation), mesh=cases.mesh(1), in_specs=P(), out_specs=P())
        compiled = jax.jit(call).lower(case.partial[0], case.residual, case.weight).compile()
        assert "all-reduce" not in compiled.as_text() and "all-gather" not in compiled.as_text()
        _, new_residual = compiled(case.partial[0], case.residual, case.weight)
        assert (cases.bits(new_residual) == cases.bits(case.new_residual())).all()
        count_case()


def test_reduces_exactly_once():
    """One collective per call in the compiled program, whichever implementation."""
    case = cases.problem(43, 4, 3, 64, dtype="float32", residual="float32")
    for implementation, op in (("psum", "all-reduce("), ("gather", "all-gather("), ("reference", "all-gather(")):
        call = jax.shard_map(
            lambda p, r, w, implementation=implementation: fused(implementation)(p[0], r, w),
            mesh=cases.mesh(4),
            in_specs=(P("tensor"), P(), P()),
            out_specs=P(),
        )
        text = jax.jit(call).lower(case.partial, case.residual, case.weight).compile().as_text()
        assert sum(text.count(f" {name}") for name in ("all-reduce(", "all-gather(")) == text.count(f" {op}") == 1


def _trace(function, *, partial=SPLIT, residual=SAME, weight=SAME, shapes=((8, 4, 64), (4, 64), (64,)), dtypes=None):
    dtypes = dtypes or (jnp.bfloat16,) * 3
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    mapped = jax.shard_map(
        lambda p, r, w: function(p[0], r, w), mesh=cases.mesh(8), in_specs=(partial, residual, weight), out_specs=P()
    )
    return jax.eval_shape(mapped, *arrays)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(partial=P()), "multiply it by 8"),  # already summed
        (dict(residual=P("tensor"), shapes=((8, 4, 64), (32, 64), (64,))), "residual differs over 'tensor'"),
        (dict(weight=P("tensor"), shapes=((8, 4, 64), (4, 64), (512,))), "weight differs over 'tensor'"),
        (dict(shapes=((8, 4, 64), (4, 64), (32,))), r"weight has shape \(32,\)"),
        (dict(shapes=((8, 4, 64), (3, 64), (64,))), r"residual has shape \(3, 64\)"),
        (dict(dtypes=(jnp.int32, jnp.bfloat16, jnp.bfloat16)), "partial has dtype int32"),
        (dict(dtypes=(jnp.bfloat16, jnp.bfloat16, jnp.int8)), "weight has dtype int8"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        _trace(fused("gather"), **change)


def test_all_faults_at_once():
    with pytest.raises(ValueError) as caught:
        _trace(fused("nccl", max_blocks=0), shapes=((8, 4, 64), (3, 64), (32,)))
    for part in ("weight has shape", "residual has shape", "implementation is 'nccl'", "max_blocks is 0"):
        assert part in str(caught.value)


def test_outside_shard_map():
    with pytest.raises(ValueError, match="call it inside jax.shard_map"):
        fused("psum")(jnp.ones((2, 8)), jnp.ones((2, 8)), jnp.ones(8))


@pytest.mark.parametrize("implementation", PEER_MEMORY)
def test_kernels_are_refused_on_cpus_and_only_they_fall_back(implementation, caplog):
    with pytest.raises(Unsupported, match=implementation):
        _trace(fused(implementation))
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        _trace(fused([implementation, "gather"]))
    assert f"gather ({implementation} needs" in caplog.text
    with pytest.raises(Unsupported):
        _trace(fused([implementation]))


def test_other_errors_do_not_fall_back(monkeypatch):
    """A fault in an implementation is a fault; it must not quietly lead to the next one."""
    from pallas_kernels.allreduce_rms_norm import reference as module

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(module, "psum", broken)
    with pytest.raises(RuntimeError, match="broken"):
        _trace(fused(["psum", "gather"]), shapes=((8, 4, 56), (4, 56), (56,)))


def test_probe_on_cpus():
    mesh = cases.mesh(2)
    assert not peers_reachable(mesh) and "cpu" in unreachable_reason(mesh)
