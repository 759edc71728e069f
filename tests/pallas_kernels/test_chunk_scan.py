"""Many tokens of a Mamba-2 block's state space: reference and fast form against float64, memory, choice and faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unsupported
from pallas_kernels.chunk_scan import api, chunk_scan, shapes
from tests.pallas_kernels.chunk_scan_cases import error, float64, problem, types

# (heads, head_dim, state, groups), batch, tokens, chunk
SIZES = [
    ((8, 16, 32, 2), 2, 150, 64),
    ((4, 80, 16, 1), 1, 77, 256),
    ((4, 8, 8, 4), 3, 5, 128),
    ((6, 64, 128, 3), 1, 129, 32),
    ((2, 16, 16, 1), 2, 1, 128),
]
BOUND = {"reference": 2e-6, "xla": 3e-3}


@pytest.mark.parametrize("form, dtype", [("reference", "float32"), ("reference", "bfloat16"), ("xla", "bfloat16")])
@pytest.mark.parametrize("shape, batch, tokens, chunk", SIZES)
def test_against_float64(shape, batch, tokens, chunk, form, dtype, count_case):
    operands = problem(1, shape, batch, tokens, dtype)
    kwargs = dict(groups=shape[3], head_dim=shape[1], chunk=chunk)
    found = chunk_scan(*operands, **kwargs, implementation=form)
    for a, b in zip(found, float64(*operands, shape[3]), strict=True):
        assert a.dtype == jnp.float32 and error(a, b) <= BOUND[form]
    chosen = chunk_scan(*operands, **kwargs)
    same = (np.asarray(chosen[0]) == np.asarray(found[0])).all()
    assert same == (form == "xla" or dtype == "float32")
    count_case()


@pytest.mark.parametrize("form, dtype", [("reference", "float32"), ("xla", "bfloat16")])
def test_two_calls_are_one(form, dtype, count_case):
    """The state of one call starts the next; without one it starts from zeros."""
    shape, cut = (4, 16, 32, 2), 70
    xbc, dt, a, d, _ = problem(2, shape, 2, 150, dtype)
    kwargs = dict(groups=2, head_dim=16, chunk=32, implementation=form)
    whole, last = chunk_scan(xbc, dt, a, d, **kwargs)
    first, state = chunk_scan(xbc[:, :cut], dt[:, :cut], a, d, jnp.zeros((2, 4, 16, 32)), **kwargs)
    second, state = chunk_scan(xbc[:, cut:], dt[:, cut:], a, d, state, **kwargs)
    assert error(jnp.concatenate([first, second], axis=1), whole) <= BOUND[form]
    assert error(state, last) <= BOUND[form]
    count_case()


@pytest.mark.parametrize("form, dtype", [("reference", "float32"), ("xla", "bfloat16")])
def test_long_inputs_in_pieces(form, dtype, count_case, monkeypatch):
    """A bound that admits two of five chunks: the same bits as at once, and a remainder."""
    shape, chunk, tokens = (4, 16, 32, 2), 32, 150
    operands = problem(3, shape, 2, tokens, dtype)
    kwargs = dict(groups=2, head_dim=16, chunk=chunk, implementation=form)
    wanted = chunk_scan(*operands, **kwargs)
    monkeypatch.setattr(api, "MOST_WEIGHTS", 2 * 2 * 4 * chunk**2)
    api._run.clear_cache()
    found = chunk_scan(*operands, **kwargs)
    api._run.clear_cache()
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) <= 1e-6
    count_case()


def arrays(jaxpr):
    """Elements of every array that a program names, inner programs included."""
    for equation in jaxpr.eqns:
        for v in equation.outvars:
            yield v.aval.size
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from arrays(inner)


@pytest.mark.parametrize("form", ["reference", "xla"])
@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-nano-9b-v2", "nemotron-h-56b"])
def test_long_prompts_name_no_huge_array(name, form, count_case):
    """128k tokens: nothing but inputs and outputs is larger than at 8k tokens."""
    shape, tokens = shapes.SHAPES[name], 1 << 17
    operands = types(shape, 1, tokens)
    program = jax.make_jaxpr(
        lambda *o: chunk_scan(*o, groups=shape[3], head_dim=shape[1], chunk=128, implementation=form)
    )(*operands)
    sizes = list(arrays(program.jaxpr))
    assert len(sizes) > 50
    through = {tokens * shape[0] * shape[1], operands[0].size}  # y and xbc, which scale with the prompt
    assert max(size for size in sizes if size not in through) <= api.MOST_WEIGHTS * max(1, shape[2] // 128)
    count_case()


def test_empty_calls():
    for batch, tokens in ((0, 5), (2, 0)):
        xbc, dt, a, d, state = problem(0, (4, 16, 8, 2), max(batch, 1), max(tokens, 1))
        xbc, dt, state = xbc[:batch, :tokens], dt[:batch, :tokens], state[:batch]
        y, new = chunk_scan(xbc[:, :tokens], dt[:, :tokens], a, d, state, groups=2, head_dim=16, chunk=8)
        assert y.shape == (batch, tokens, 64) and (np.asarray(new) == np.asarray(state)).all()


def test_faults_at_once_and_refusals():
    xbc, dt, a, d, state = problem(0, (4, 16, 8, 2), 2, 9, "float16")
    with pytest.raises(ValueError) as caught:
        chunk_scan(xbc, dt, a[1:], d, state[:1], groups=2, head_dim=16, chunk=0, implementation="cuda")
    for part in ("a has shape (3,)", "state has shape (1,", "chunk is 0", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="96 channels are not 4 heads of 15"):
        chunk_scan(xbc, dt, a, d, groups=5, head_dim=15, chunk=8)
    with pytest.raises(Unsupported, match="xbc is float16"):
        chunk_scan(xbc, dt, a, d, groups=2, head_dim=16, chunk=8, implementation="xla")
