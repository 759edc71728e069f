"""Pending sums: a sum that is forgotten or taken twice is an error while tracing; plans mean what they say."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from nemotron_jax import fusion, make_mesh
from nemotron_jax.fusion import add_norm, defer, parse_plan, settle
from nemotron_jax.sharding import TENSOR, Axis, ShardingRules, arg_max_over, sum_over
from tests import tiny

ONE, FOUR = Axis(TENSOR, 1), Axis(TENSOR, 4)
PACKAGE = Path(fusion.__file__).parent


ROWS, SAME = P(TENSOR), P()


def on_ranks(function, *args, specs=ROWS, out=SAME):
    """``function`` of per-rank rows over four devices."""
    return jax.jit(jax.shard_map(function, mesh=make_mesh(4), in_specs=specs, out_specs=out, check_vma=True))(*args)


def summands(seed=0):
    return np.random.default_rng(seed).normal(size=(4, 3, 8)).astype(np.float32)


def test_settle_sums_once():
    x = summands()
    found = on_ranks(lambda x: settle(defer(x[0], FOUR), FOUR), x)
    tiny.close(found, x.sum(0), 1e-6)


def test_axis_of_size_one_is_the_identity():
    x = jnp.ones((3,))
    assert defer(x, ONE) is x and settle(x, ONE) is x


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p: settle(settle(p, FOUR), FOUR),
        lambda p: settle(jnp.ones((3, 8)), FOUR),
        lambda p: defer(settle(p, FOUR), FOUR),
        lambda p: defer(p, FOUR),
        lambda p: defer(lax.psum(lax.axis_index(TENSOR), TENSOR), FOUR),
        lambda p: p + 1.0,
        lambda p: jnp.ones((3, 8)) + p,
        lambda p: jnp.sum(p),
        lambda p: sum_over(settle(p, FOUR), FOUR),
        lambda p: add_norm(p, None, jnp.ones(8), axis=FOUR, eps=1e-5),
    ],
    ids=[
        "settle twice",
        "settle an array",
        "defer after a sum",
        "defer twice",
        "defer after psum",
        "pending + 1",
        "1 + pending",
        "reduce a pending",
        "sum over twice",
        "pending without residual",
    ],
)
def test_misuse_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        on_ranks(lambda x: wrong(defer(x[0], FOUR)), summands())


def test_forgotten_sum_at_a_norm():
    with pytest.raises(TypeError, match="no PendingSum"):
        on_ranks(lambda x: add_norm(x[0], jnp.ones((3, 8)), jnp.ones(8), axis=FOUR, eps=1e-5)[0], summands())


def test_forgotten_sum_at_the_exit():
    with pytest.raises(Exception, match="out_specs|varying|vma|replicat"):
        on_ranks(lambda x: defer(x[0], FOUR), summands(), out=P())


def test_no_direct_collectives_outside_fusion_and_sharding():
    """Only fusion.py, sharding.py and the kernels issue collectives; a direct call elsewhere bypasses the checks
    above.
    """
    calls = re.compile(r"\b(psum\w*|all_gather|all_to_all|ppermute|pmean|pmax|pmin|pbroadcast|all_reduce)\s*\(")
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        # device_checks.py copies between devices on purpose: it tests the links, and runs no model
        if file.relative_to(PACKAGE).as_posix() in ("fusion.py", "sharding.py", "device_checks.py"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if calls.search(line.split("#")[0]):
                found.append(f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert not found, found


def test_the_source_check_sees_a_direct_call():
    assert re.search(r"\b(psum\w*)\s*\(", "y = lax.psum(x, 'tensor')")


@pytest.mark.parametrize("implementation", ["psum", "gather", "reference"])
@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_consuming_norm_against_float64(implementation, residual_dtype, count_case):
    x, rng = summands(1), np.random.default_rng(2)
    residual = jnp.asarray(rng.normal(size=(3, 8)), residual_dtype)
    weight = rng.normal(size=8).astype(np.float32)

    def local(x, residual, weight):
        return add_norm(defer(x[0], FOUR), residual, weight, axis=FOUR, eps=1e-5, implementation=implementation)

    normed, new = on_ranks(local, x, residual, weight, specs=(P(TENSOR), P(), P()))
    exact = np.float64(residual) + np.float64(x).sum(0)
    half_ulp = 0.0 if residual_dtype == "float32" else 2.0**-8  # rounded once: at most half a unit in the last place
    assert np.all(np.abs(np.float64(new) - exact) <= half_ulp * np.abs(exact) + 1e-6)
    exact = np.float64(new)
    tiny.close(normed, exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight, 2e-6)
    assert new.dtype == residual_dtype and normed.dtype == jnp.float32
    count_case()


PATTERN = "M-*E"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", ("eager",) * 4),
        ("all", ("auto",) * 4),
        ("auto", ("auto",) * 4),
        ("all/gather", ("gather",) * 4),
        ("kinds:M*", ("auto", "eager", "auto", "eager")),
        ("kinds:E/one_shot", ("eager", "eager", "eager", "one_shot")),
        ("layers:.pg1", ("eager", "psum", "gather", "one_shot")),
        ("layers:2fa.", ("two_shot", "flags", "auto", "eager")),
    ],
)
def test_plan_spellings(spec, expected):
    assert parse_plan(spec, PATTERN) == expected


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("some", "some"),
        ("none/gather", "takes no"),
        ("layers:.../psum", "takes no"),
        ("all/nccl", "nccl"),
        ("kinds:MX", "X"),
        ("kinds:", "none"),
        ("layers:..", "2 letters"),
        ("layers:.xq.", "'x' at 1, 'q' at 2"),
        ("", "unknown"),
    ],
)
def test_plan_misspellings_are_named(spec, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        parse_plan(spec, PATTERN)


def test_plan_reasons_and_counts():
    facts = dict(tokens=1, hidden=64, dtype="float32", residual_dtype="float32", rules=ShardingRules())
    plan = fusion.plan("layers:.pg1", "M-*-", mesh=make_mesh(4), axis=FOUR, **facts)
    assert plan.fused_boundaries == 3
    assert [b.implementation for b in plan.boundaries][:3] == ["eager", "psum", "gather"]
    assert plan.boundaries[3].implementation in ("psum", "gather") and "one_shot" in plan.boundaries[3].reason
    assert "one_shot" in plan.describe()
    alone = fusion.plan("all", "M-*-", mesh=make_mesh(1), axis=ONE, **facts)
    assert alone.fused_boundaries == 0 and "size 1" in alone.boundaries[0].reason
    uncut = dict(facts, rules=ShardingRules(mlp=None))
    assert fusion.plan("all/gather", "M-*-", mesh=make_mesh(4), axis=FOUR, **uncut).letters == "g.g."


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_arg_max_over_ranks_takes_the_lower_id_at_ties(ranks):
    """As torch.argmax: the first of equal entries, and the first that is not a number before all others."""
    logits = np.zeros((5, 16), np.float32)
    logits[0, [5, 9]] = 3.0
    logits[1, :] = -np.inf
    logits[2, [15, 14]] = [0.0, 1e-30]
    logits[3, [3, 11, 12]] = [7.0, np.nan, np.nan]
    logits[4, 0] = -0.0  # equals 0.0
    axis, specs = (Axis(TENSOR, ranks), P(None, TENSOR)) if ranks > 1 else (ONE, SAME)
    run = jax.shard_map(lambda x: arg_max_over(x, axis), mesh=make_mesh(ranks), in_specs=specs, out_specs=SAME)
    assert jax.jit(run)(logits).tolist() == [5, 0, 14, 11, 0]
