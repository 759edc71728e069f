"""One decode step of an attention block: the reference against float64 and against the layer, the kernel in the
interpreter and lowered for CUDA, the choice between them. On a GPU: tests/gpu/test_decode_kernels.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, step, targets
from nemotron_jax.cache import AttentionCache, Rows
from pallas_kernels import Unsupported, selection
from pallas_kernels.decode_attention import declined, decode_attention, mosaic_gpu, reference, shapes, supported
from tests import tiny
from tests.gpu.decode_kernel_checks import BOUND, attention_problem, error
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter


def float64(qkv, k, v, length, alive):
    """The definition again, row by row and head by head, in NumPy; no rounding in between."""
    qkv, k, v = (np.array(x.astype(jnp.float32), np.float64) for x in (qkv, k, v))
    rows, slots, kv_heads, h = k.shape
    q_heads = qkv.shape[1] - 2 * kv_heads
    y = np.zeros((rows, q_heads, h))
    for row in range(rows):
        seen = int(length[row])
        if seen < slots and (alive is None or alive[row] > 0):
            k[row, seen], v[row, seen] = qkv[row, q_heads : q_heads + kv_heads], qkv[row, q_heads + kv_heads :]
            seen += 1
        for head in range(q_heads if seen else 0):
            kv = head * kv_heads // q_heads
            score = k[row, :seen, kv] @ qkv[row, head] / np.sqrt(h)
            weight = np.exp(score - score.max())
            y[row, head] = weight @ v[row, :seen, kv] / weight.sum()
    return y, k, v


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


LENGTHS = {104: (64, 0, 37, 104), 200: (199, 128, 1, 200), 64: (63, 0, 5, 64)}


@pytest.mark.parametrize("slots", LENGTHS)
@pytest.mark.parametrize("q_heads, kv_heads, alive", [(8, 2, None), (5, 1, (1, 0, 0, 1)), (3, 3, (1, 0, 0, 1))])
def test_reference_against_float64(slots, q_heads, kv_heads, alive, count_case):
    operands = attention_problem(0, (q_heads, kv_heads), slots, LENGTHS[slots], "float32", alive)
    found = decode_attention(*operands, implementation="reference")
    wanted = float64(*operands)
    assert np.abs(np.asarray(found[0]) - wanted[0]).max() <= 1e-5
    for a, b in zip(found[1:], wanted[1:], strict=True):  # NaN where no token is, before and after
        np.testing.assert_array_equal(np.asarray(a), b.astype(np.float32))
    count_case()


@pytest.mark.parametrize("valid", [None, [True, False, True]])
def test_reference_is_the_layer(valid, count_case, monkeypatch):
    """A layer's own decode step, and the same layer with its kernel switched on, where the kernel is the reference."""
    model = tiny.model()
    place = model.config.hybrid_override_pattern.index("*")
    layer = model.network().layers[place].mixer
    shape = model.cache_shapes(3, 8).tree.layers[place].k
    keys = jax.random.split(jax.random.key(0), 3)
    start = jnp.array([3, 5, 7], jnp.int32)
    empty = (jnp.arange(8) >= start[:, None])[:, :, None, None]
    cache = AttentionCache(*(jnp.where(empty, jnp.nan, jax.random.normal(k, shape.shape)) for k in keys[:2]))
    x = jax.random.normal(keys[2], (3, 1, model.config.hidden_size))
    new = jnp.ones(3, jnp.int32) if valid is None else jnp.array(valid, jnp.int32)
    rows = Rows(start, new, None if valid is None else jnp.array(valid)[:, None])
    wanted = layer(x, cache, rows)
    calls = []
    monkeypatch.setattr(type(layer), "kernel_fault", lambda self, dtype, cache: calls.append(1))
    found = layer(x, cache, rows)
    assert calls
    tiny.close(found[0], wanted[0])
    for name in ("k", "v"):
        np.testing.assert_array_equal(getattr(found[1], name), getattr(wanted[1], name))
    count_case()


INTERPRETED = [
    ((8, 2), 200, "bfloat16", (1, 1, 1, 1), 3),  # 5, 4, 1 and 5 tiles for 3 splits; the last one is moved back
    ((5, 1), 104, "bfloat16", (1, 0, 0, 1), 2),
    ((16, 1), 64, "float16", None, 1),
]


@pytest.mark.parametrize("heads, slots, dtype, alive, splits", INTERPRETED)
def test_kernel_in_the_interpreter(heads, slots, dtype, alive, splits, count_case):
    operands = attention_problem(1, heads, slots, LENGTHS[slots], dtype, alive)
    wanted = reference.decode_attention(*operands)
    with interpreter() as interpret:
        found = mosaic_gpu.decode_attention(*operands, splits=splits, interpret=interpret)
    for row, length in enumerate(LENGTHS[slots]):
        if length == 0 and alive is not None and not alive[row]:
            assert (np.asarray(found[0][row]) == 0).all()
        else:
            assert error(found[0][row], wanted[0][row]) <= BOUND[dtype]
    assert same_bits(found[1], wanted[1]) and same_bits(found[2], wanted[2])
    count_case()


def test_what_lies_behind_a_row_does_not_matter(count_case):
    """To the bit. Empty slots hold NaN, numbers that would drown all others, or zeros."""
    operands = attention_problem(2, (4, 1), 104, (37, 70), "bfloat16", (1, 0))
    qkv, k, v, length, alive = operands
    empty = (jnp.arange(104) >= length[:, None])[:, :, None, None]
    results = []
    for junk in (jnp.nan, 1e30, 0.0):
        k, v = (jnp.where(empty, junk, x).astype(x.dtype) for x in (k, v))
        with interpreter() as interpret:
            results.append(mosaic_gpu.decode_attention(qkv, k, v, length, alive, splits=2, interpret=interpret)[0])
        assert same_bits(results[0], results[-1])
        count_case()
    assert np.isfinite(np.asarray(results[0], np.float32)).all()


def test_no_number_in_a_row_is_not_hidden():
    qkv, k, v, length, alive = attention_problem(3, (4, 2), 64, (20, 20, 30, 30), "bfloat16", None)
    k = k.at[1, 7, 0, 5].set(jnp.nan)
    with interpreter() as interpret:
        y = mosaic_gpu.decode_attention(qkv, k, v, length, alive, splits=1, interpret=interpret)[0]
    fine = np.isfinite(np.asarray(y, np.float32)).all(-1)
    assert fine.tolist() == [[True] * 4, [False, False, True, True], [True] * 4, [True] * 4]


def lowered(heads, rows, slots, dtype="bfloat16"):
    operands = jax.eval_shape(lambda: attention_problem(0, heads, slots, (1,) * rows, dtype, (1,) * rows))

    def call(*operands):
        return decode_attention(*operands, implementation="mosaic_gpu")

    return jax.jit(call, donate_argnums=(1, 2)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "rows, slots, name", [((1, 2048), (40, 1000))[i % 2] + (n,) for i, n in enumerate(shapes.SHAPES)]
)
def test_lowers_to_two_launches_that_keep_the_cache(name, rows, slots, count_case):
    text = lowered(shapes.SHAPES[name], rows, slots)
    assert text.count("mosaic_gpu_v2") == 2
    assert text.count("output_operand_alias<") == 2  # keys and values
    count_case()


@pytest.mark.parametrize("slots", [4100, 777, 130, 4104, 776, 136])
def test_any_capacity_is_lowered_or_refused(slots, count_case):
    """The interpreter copies what the GPU's copies refuse, so only lowering shows what works."""
    if slots % 8:
        with pytest.raises(Unsupported, match=f"multiple of 8; it has {slots}"):
            lowered((32, 2), 3, slots)
    else:
        assert lowered((32, 2), 3, slots).count("mosaic_gpu_v2") == 2
    count_case()


def test_lowers_beyond_two_to_the_31_elements(count_case):
    assert 40 * 70_000 * 8 * 128 > 2**31
    assert lowered((32, 8), 40, 70_000).count("mosaic_gpu_v2") == 2
    count_case()


def test_splits_fill_the_device():
    assert mosaic_gpu.splits_of(1, 8, 32768) == 33
    assert mosaic_gpu.splits_of(1, 2, 32768) == 64
    assert mosaic_gpu.splits_of(1, 8, 100) == 2  # never more than tiles
    assert mosaic_gpu.splits_of(32, 8, 2048) == 1
    assert mosaic_gpu.splits_of(32, 8, 32768) == 8  # rows differ in length


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(q_heads=32, kv_heads=8, head_dim=128, slots=64, dtype="bfloat16", cache_dtype="bfloat16")
    assert supported(**good) is None
    for change, word in [
        (dict(head_dim=64), "head_dim"),
        (dict(q_heads=130, kv_heads=2), "query heads"),
        (dict(slots=63), "64 slots"),
        (dict(slots=4100), "multiple of 8"),
        (dict(dtype="float32", cache_dtype="float32"), "activations are float32"),
        (dict(cache_dtype="float16"), "cache"),
    ]:
        assert word in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    qkv, k, v, length, alive = attention_problem(0, (4, 2), 64, (1, 2, 3, 4), "float32", None)
    with pytest.raises(ValueError) as caught:
        decode_attention(qkv[:, 1:], k, v[:, 1:], length[1:], alive, implementation="cuda")
    for part in ("3 query heads", "v is float32(4, 63, 2, 128)", "length has shape (3,)", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="qkv has shape"):
        decode_attention(qkv[0], k, v, length)
    with pytest.raises(Unsupported, match="bfloat16 or float16"):
        decode_attention(qkv, k, v, length, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "setting, reason", [("decode_attention", None), ("auto", None), ("grouped_matmul", "switched off"), ("none", "off")]
)
def test_the_choice(setting, reason):
    k = jax.ShapeDtypeStruct((1, 2048, 8, 128), jnp.bfloat16)
    with traced_for(setting):
        found = declined(k, q_heads=32, dtype="bfloat16")
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize(
    "setting, tensor, data, tokens, steps",
    [("none", 1, 1, 1, 0), ("decode_attention", 1, 1, 1, 1), ("decode_attention", 1, 1, 2, 0)]
    + [("decode_attention", 2, 1, 1, 1), ("decode_attention", 16, 2, 1, 1)],
)
def test_a_models_decode_step_for_an_absent_h200(setting, tensor, data, tokens, steps, count_case):
    """The attention layers share one lowered function, so the program's text has their kernels once."""
    target = targets.absent("h200", tensor * data, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="*-*", block_configs=config.block_configs and config.block_configs[:3]
    )
    model = NemotronH(config, mesh=target.mesh(tensor, data), dtype="bfloat16", fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, data, tokens, 64, target).as_text()
    assert text.count("output_operand_alias<") == 2 * steps
    assert text.count("mosaic_gpu_v2") == 2 * steps
    count_case()
