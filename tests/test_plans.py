"""Every plan of a small pattern gives the unfused model; the exact implementations give the same bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import make_mesh
from nemotron_jax.fusion import IMPLEMENTATIONS, LETTERS, add_norm, defer
from nemotron_jax.sharding import TENSOR, Axis
from tests import tiny

PATTERN = "M-*M"
RUNS_ON_CPU = ".pga"
PLANS = ["".join(p) for p in itertools.product(RUNS_ON_CPU, repeat=4)]
# a covering set: each letter at each place, next to each other letter
DEFAULT = ["pppp", "gggg", "aaaa", ".g.g", "p.pg", "gp.a", "a.gp", "..p."]


@pytest.mark.parametrize(
    "letters", [*DEFAULT, *(pytest.param(p, marks=pytest.mark.full) for p in PLANS if p not in DEFAULT)]
)
def test_equals_unfused(letters, count_case):
    ids = tiny.tokens(0, 2, 11)
    shape = dict(hybrid_override_pattern=PATTERN)
    found = tiny.model(4, fusion=f"layers:{letters}", **shape)(ids, hidden_states=True)
    expected = tiny.model(4, fusion="none", **shape)(ids, hidden_states=True)
    tiny.close(found.logits, expected.logits)
    tiny.close(found.hidden_states.layers, expected.hidden_states.layers, 1e-5)
    count_case()


def test_letters_and_implementations_belong_together():
    assert set(LETTERS.values()) == {"eager", "auto", *IMPLEMENTATIONS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exact_implementations_give_the_same_bits(dtype, ranks, count_case):
    rng = np.random.default_rng(ranks)
    axis = Axis(TENSOR, ranks)
    partial = jnp.asarray(rng.normal(size=(ranks, 2, 5, 40)) * 10.0 ** rng.integers(-3, 4, (ranks, 2, 5, 40)), dtype)
    residual = jnp.asarray(rng.normal(size=(2, 5, 40)), dtype)
    weight = rng.normal(size=40).astype(np.float32)

    def run(name):
        def local(x, residual, weight):
            return add_norm(defer(x[0], axis), residual, weight, axis=axis, eps=1e-5, implementation=name)

        specs = (P(TENSOR), P(), P())
        mapped = jax.shard_map(local, mesh=make_mesh(ranks), in_specs=specs, out_specs=P(), check_vma=True)
        return [np.asarray(x) for x in jax.jit(mapped)(partial, residual, weight)]

    (normed, new), (normed_too, new_too) = run("reference"), run("gather")
    assert new.tobytes() == new_too.tobytes() and normed.tobytes() == normed_too.tobytes()
    in_order = np.zeros(residual.shape, np.float32)
    for r in range(ranks):
        in_order = in_order + np.asarray(partial[r], np.float32)
    assert np.array_equal(new, np.asarray(jnp.asarray(np.float32(residual) + in_order, dtype)))
    count_case()
