"""Random values that are drawn where they lie: the same at every degree, and those of an independent loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, ShardingRules, make_mesh, random_weights
from nemotron_jax.parameters import pieces
from tests import tiny

SHAPES = {
    "dense": dict(hybrid_override_pattern="M*-"),
    "more ranks than groups": dict(hybrid_override_pattern="M*", n_groups=2, num_key_value_heads=2),
    "vocabulary that no degree divides": dict(hybrid_override_pattern="-", vocab_size=103),
    "experts": dict(hybrid_override_pattern="ME", **tiny.LATENT_EXPERTS),
}
RULES = {
    "slices": ShardingRules(),
    "whole": ShardingRules.from_dict({"experts": "tensor"}),
}


def model(tensor, rules="slices", dtype="float32", data=1, **shape):
    return NemotronH(
        tiny.config(**shape), mesh=make_mesh(tensor, data), rules=RULES[rules], dtype=dtype, fusion="none", rngs=5
    )


@pytest.fixture(autouse=True)
def all_on_the_device(monkeypatch):
    monkeypatch.setattr(random_weights, "SMALL", 0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tensor, data", [(2, 1), (4, 2)])
def test_every_degree_is_the_same_model(name, tensor, data, count_case):
    ids = np.array([[1, 5, 9, 2], [7, 7, 3, 0]], np.int32)
    tiny.close(model(tensor, data=data, **SHAPES[name])(ids).logits, model(1, **SHAPES[name])(ids).logits)
    count_case()


@pytest.mark.parametrize(
    "rules, tensor, name", [("slices", 2, "dense"), ("slices", 4, "experts"), ("whole", 4, "experts")]
)
def test_against_a_loop_over_rows(rules, tensor, name, count_case):
    """Every number of every rank, from the definition: a key for the tensor, one for the row, a draw for the row."""
    found = model(tensor, rules, **SHAPES[name])
    for parameter, weight in zip(found.parameters, found.weights, strict=True):
        layout, whole = parameter.layout, np.asarray(weight)
        for rank in range(1 if layout.replicated else tensor):
            width = layout.local_shape[layout.dim]
            local = np.take(whole, range(rank * width, rank * width + width), layout.dim)
            wanted = np.zeros(layout.local_shape, np.float32)
            for piece in pieces(layout, rank):
                others = tuple(n for i, n in enumerate(piece.shape) if i != piece.dim)
                kind = random_weights._kind(piece.tensor)
                draw = jax.random.uniform if kind in random_weights.UNIFORM else jax.random.normal
                key = jax.random.fold_in(jax.random.key(5), random_weights._number(piece.tensor))
                rows = [draw(jax.random.fold_in(key, row), others) for row in range(piece.start, piece.stop)]
                fan_in = piece.shape[-1] if len(piece.shape) > 1 else 1
                wanted[piece.index] = random_weights._scaled(jnp.stack(rows, piece.dim), kind, fan_in, jnp)
            np.testing.assert_allclose(local, wanted, rtol=2e-6, atol=1e-7, err_msg=str(parameter.path))
            count_case()


def test_parameters_of_the_same_shapes_share_a_program():
    random_weights._program.cache_clear()
    model(2, hybrid_override_pattern="M-M-M-")
    once = random_weights._program.cache_info().misses
    random_weights._program.cache_clear()
    model(2, hybrid_override_pattern="M-")
    assert random_weights._program.cache_info().misses == once


def test_dtype_and_seed():
    shape = dict(hybrid_override_pattern="M-")
    narrow, wide = model(2, dtype="bfloat16", **shape), model(2, **shape)
    for a, b in zip(narrow.weights, wide.weights, strict=True):
        assert (np.asarray(a) == np.asarray(b.astype(a.dtype))).all()
    other = NemotronH(tiny.config(**shape), mesh=make_mesh(2), dtype="float32", rngs=6)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(other.weights, wide.weights, strict=True))
