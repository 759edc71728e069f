"""The convolution of a Mamba-2 block against its definition in NumPy, token by token, and the windows it leaves."""

import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax.cache import Rows
from nemotron_jax.layers.mamba import causal_conv


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize("window, padded, every", [(1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 1, 1)])
def test_against_the_definition(kernel, tokens, window, padded, every, count_case):
    random = np.random.default_rng(tokens)
    x, past = random.standard_normal((3, tokens, 8), np.float32), random.standard_normal((3, kernel - 1, 8), np.float32)
    w, bias = random.standard_normal((8, 1, kernel), np.float32), random.standard_normal(8, np.float32)
    past = past * window
    new = np.array([0, tokens // 2, tokens]) if padded else np.full(3, tokens)
    valid = np.arange(tokens) < new[:, None] if padded else None
    rows = Rows(
        jnp.zeros(3, jnp.int32), jnp.asarray(new, jnp.int32), None if valid is None else jnp.asarray(valid), bool(every)
    )
    y, left = causal_conv(
        jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias), jnp.asarray(past) if window else None, rows
    )

    inputs = np.concatenate([past, x], axis=1)
    behind = [inputs[:, i + 1 : i + kernel] for i in range(tokens)]
    for i in range(tokens):
        wanted = np.einsum("bkc,ck->bc", inputs[:, i : i + kernel].astype(np.float64), w[:, 0]) + bias
        np.testing.assert_allclose(y[:, i], wanted / (1 + np.exp(-wanted)), rtol=1e-5, atol=1e-5)
    if every:
        assert (np.asarray(left) == np.stack(behind, axis=1)).all()
    else:
        for row in range(3):
            assert (np.asarray(left)[row] == inputs[row, new[row] : new[row] + kernel - 1]).all()
    count_case()
