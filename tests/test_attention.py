"""Attention of new tokens over a cache against float64: what is seen, what is not, and both ways to compute it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax.cache import AttentionCache, Cache, MambaCache, Rows, cleaned
from nemotron_jax.layers import attention

HEAD_DIM, SLOTS = 16, 24


def problem(seed, batch, tokens, q_heads, kv_heads, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (batch, tokens, q_heads, HEAD_DIM)).astype(dtype)
    k, v = (jax.random.normal(key, (batch, SLOTS, kv_heads, HEAD_DIM)).astype(dtype) for key in keys[1:])
    start = (jnp.arange(batch, dtype=jnp.int32) * 5) % (SLOTS - tokens)
    return q, k, v, start


def float64(q, k, v, start):
    """Query by query and head by head, over the slots that a query sees and no others."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    y = np.zeros(q.shape)
    for row, token, head in np.ndindex(q.shape[:3]):
        kv, seen = head * k.shape[2] // q.shape[2], int(start[row]) + token + 1
        score = k[row, :seen, kv] @ q[row, token, head] / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max())
        y[row, token, head] = weight @ v[row, :seen, kv] / weight.sum()
    return y


@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("q_heads, kv_heads", [(8, 2), (4, 1), (4, 4), (32, 8)])
@pytest.mark.parametrize("clean", [False, True])
def test_against_float64(batch, tokens, q_heads, kv_heads, clean, count_case, monkeypatch):
    """Empty slots hold NaN, or numbers far from all others where the values are said to be numbers."""
    q, k, v, start = problem(0, batch, tokens, q_heads, kv_heads)
    empty = (jnp.arange(SLOTS) >= start[:, None] + tokens)[:, :, None, None]
    k, v = jnp.where(empty, jnp.nan, k), jnp.where(empty, 1e6 if clean else jnp.nan, v)
    rows = Rows(start, jnp.full(batch, tokens, jnp.int32), None, clean=clean)
    wanted = float64(q, k, v, start)
    for few in (attention.FEW_QUERIES, 0):
        monkeypatch.setattr(attention, "FEW_QUERIES", few)
        found = np.asarray(attention.attend(q, k, v, rows))
        assert np.abs(found - wanted).max() <= 1e-5
        count_case()


@pytest.mark.parametrize("batch", [1, 4])
def test_bfloat16_within_its_rounding(batch, count_case):
    """Weights and result are rounded to 8 bits each: 2 ** -9 of the largest value, twice, and float32 sums."""
    q, k, v, start = problem(1, batch, 1, 16, 2, jnp.bfloat16)
    found = attention.attend(q, k, v, Rows(start, jnp.ones(batch, jnp.int32), None, clean=True))
    wanted = float64(q, k, v, start)
    assert np.abs(np.asarray(found, np.float64) - wanted).max() <= 2.1 * 2**-9 * np.abs(np.asarray(v, float)).max()
    count_case()


def test_one_head_that_is_no_number_stays_in_its_row_and_its_values_in_their_head():
    q, k, v, _ = problem(2, 3, 1, 8, 2)
    rows = Rows(jnp.full(3, 9, jnp.int32), jnp.ones(3, jnp.int32), None, clean=True)
    fine = np.isfinite(np.asarray(attention.attend(q, k.at[1, 4, 0, 3].set(jnp.nan), v, rows))).all((1, 2, 3))
    assert fine.tolist() == [True, False, True]
    fine = np.isfinite(np.asarray(attention.attend(q, k, v.at[1, 4, 0, 3].set(jnp.nan), rows))).all((1, 3))
    assert fine[1].tolist() == [False] * 4 + [True] * 4 and fine[[0, 2]].all()


def test_cleaned_touches_empty_value_slots_alone():
    k = jnp.full((2, 6, 1, 4), jnp.nan)
    state = MambaCache(jnp.full((2, 3, 8), jnp.nan), jnp.full((2, 1, 4, 4), jnp.nan))
    cache = Cache((state, None, AttentionCache(k, k)), jnp.array([2, 6], jnp.int32))
    found = cleaned(cache)
    values = np.asarray(found.layers[2].v)
    assert np.isnan(values[0, :2]).all() and (values[0, 2:] == 0).all() and np.isnan(values[1]).all()
    assert found.layers[0] is state and found.layers[1] is None and np.isnan(np.asarray(found.layers[2].k)).all()
    assert (np.asarray(found.length) == [2, 6]).all()
