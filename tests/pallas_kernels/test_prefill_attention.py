"""Causal attention of many tokens: the reference against float64 and against the layer, the kernel in the interpreter
and lowered for CUDA, the choice between them. On a GPU: tests/gpu/prefill_attention_checks.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import NemotronH, NemotronHConfig, make_mesh, step, targets
from nemotron_jax.cache import AttentionCache, Rows
from nemotron_jax.layers.attention import attend
from pallas_kernels import Unsupported, selection
from pallas_kernels.prefill_attention import api, declined, mosaic_gpu, prefill_attention, reference, shapes, supported
from tests import tiny
from tests.gpu.prefill_attention_checks import BOUND, TILINGS, compare, error, exact, problem
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter, races_found


def float64(q, k, v, start, new, q_heads):
    """Query by query and head by head, over the slots that a query sees and no others."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    rows, tokens, _, d = q.shape
    y = np.zeros((rows, tokens, q_heads, d))
    for row, token, head in np.ndindex(y.shape[:3]):
        kv, seen = head * k.shape[2] // q_heads, int(start[row]) + token + 1
        if token < new[row]:
            score = k[row, :seen, kv] @ q[row, token, head] / np.sqrt(d)
            weight = np.exp(score - score.max())
            y[row, token, head] = weight @ v[row, :seen, kv] / weight.sum()
    return y


ROWS = [((0,), (30,)), ((0, 7, 3, 10), (30, 23, 0, 1))]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("start, new", ROWS)
def test_reference_against_float64(heads, start, new, count_case):
    operands = problem(0, heads, 30, 33, start, new, "float32", 16)
    wanted = float64(*operands, heads[0])
    found = prefill_attention(*operands, q_heads=heads[0])  # without a GPU that is the reference
    assert np.abs(np.asarray(found) - wanted).max() <= 1e-5
    assert np.abs(np.asarray(exact(*operands, q_heads=heads[0], span=8)) - wanted).max() <= 1e-5
    count_case()


@pytest.mark.parametrize("start, new", ROWS)
def test_reference_is_the_layers(start, new, count_case):
    q, k, v, start, new = problem(1, (4, 2), 30, 33, start, new, "float32", 16)
    real = (jnp.arange(30) < new[:, None])[:, :, None, None]
    q = jnp.where(real, q, 0)
    wanted = jnp.where(real, attend(q[:, :, :4], k, v, Rows(start, new, real[:, :, 0, 0])), 0)
    tiny.close(reference.prefill_attention(q, k, v, start, new, q_heads=4), wanted)
    count_case()


def interpreted(operands, q_heads, tiling=None, races=False):
    q, k, v, start, new = operands
    v = jnp.where((jnp.arange(v.shape[1]) < (start + new)[:, None])[:, :, None, None], v, 0)
    with interpreter(detect_races=races) as interpret:
        y = mosaic_gpu.prefill_attention(q, k, v, start, new, q_heads=q_heads, tiling=tiling, interpret=interpret)
        y = np.asarray(y)
        assert not (races and races_found())
    return jnp.asarray(y)


INTERPRETED = [  # heads, tokens, slots, start, new, dtype, head_dim
    ((2, 1), 150, 331, (0, 181), (150, 37), "bfloat16", 128),  # capacity off the grid, the second block all pads
    ((1, 1), 130, 700, (571,), (129,), "bfloat16", 128),  # more tiles than shared memory holds
    ((2, 2), 64, 64, (0,), (64,), "float16", 64),
    ((3, 1), 40, 200, (127, 128, 129), (40, 1, 0), "float16", 64),
]


FORMS = ["kernel", *(pytest.param(name, marks=pytest.mark.full) for name in TILINGS if name != "kernel")]


@pytest.mark.parametrize("tiling", FORMS)
@pytest.mark.parametrize("heads, tokens, slots, start, new, dtype, head_dim", INTERPRETED)
def test_kernel_in_the_interpreter(heads, tokens, slots, start, new, dtype, head_dim, tiling, count_case):
    operands = problem(2, heads, tokens, slots, start, new, dtype, head_dim)
    wanted = reference.prefill_attention(*operands, q_heads=heads[0])
    compare(interpreted(operands, heads[0], TILINGS[tiling]), wanted, new, dtype)
    count_case()


@pytest.mark.parametrize("tiling", FORMS)
def test_nothing_races(tiling, count_case):
    operands = problem(3, (1, 1), 150, 330, (180,), (150,), "bfloat16", 64)
    how = dataclasses.replace(TILINGS[tiling], slots=64)
    wanted = reference.prefill_attention(*operands, q_heads=1)
    assert error(interpreted(operands, 1, how, races=True), wanted) <= BOUND["bfloat16"]
    count_case()


def test_what_lies_behind_a_row_does_not_matter(count_case):
    """To the bit. Keys there are NaN, numbers that would drown all others, or zeros; values any numbers."""
    q, k, v, start, new = problem(4, (2, 1), 70, 200, (5, 100), (70, 30), "bfloat16", 64)
    empty = (jnp.arange(200) >= (start + new)[:, None])[:, :, None, None]
    results = []
    for key, value in ((jnp.nan, 1e30), (1e30, -3.0), (0.0, 0.0)):
        a, b = (jnp.where(empty, junk, x).astype(x.dtype) for x, junk in ((k, key), (v, value)))
        with interpreter() as interpret:
            y = mosaic_gpu.prefill_attention(q, a, b, start, new, q_heads=2, interpret=interpret)
        results.append(np.asarray(y, np.float32))
        assert results[-1].tobytes() == results[0].tobytes() and np.isfinite(results[0]).all()
        count_case()


def test_no_number_in_a_row_is_not_hidden():
    q, k, v, start, new = problem(5, (2, 2), 64, 100, (30,), (64,), "bfloat16", 64)
    y = interpreted((q, k.at[0, 50, 1, 3].set(jnp.nan), v, start, new), 2)
    fine = np.isfinite(np.asarray(y[0], np.float32)).all(-1)
    assert fine[:, 0].all() and fine[:20, 1].all() and not fine[20:, 1].any()


def lowered(heads, rows, tokens, slots, dtype="bfloat16", head_dim=128, clean=True):
    operands = jax.eval_shape(lambda: problem(0, heads, tokens, slots, (0,) * rows, (tokens,) * rows, dtype, head_dim))

    def call(*operands):
        return prefill_attention(*operands, q_heads=heads[0], clean=clean, implementation="mosaic_gpu")

    return jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "rows, tokens, slots, name", [((1, 8192, 8192), (3, 77, 1000))[i % 2] + (n,) for i, n in enumerate(shapes.SHAPES)]
)
def test_lowers_to_one_launch(name, rows, tokens, slots, count_case):
    text = lowered(shapes.SHAPES[name], rows, tokens, slots)
    assert text.count("mosaic_gpu_v2") == 1
    count_case()


@pytest.mark.parametrize(
    "tokens, slots, head_dim", [(4096, 4100, 128), (777, 777, 128), (65, 130, 64), (64, 3, 128), (1, 1, 64)]
)
def test_lowers_at_any_number_of_tokens_and_slots(tokens, slots, head_dim, count_case):
    """The interpreter copies what the GPU's copies refuse, so only lowering shows what works."""
    assert lowered((4, 2), 2, tokens, slots, "float16", head_dim, clean=False).count("mosaic_gpu_v2") == 1
    count_case()


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_tiling_lowers(tiling, count_case):
    def call(*operands):
        return mosaic_gpu.prefill_attention(*operands, q_heads=4, tiling=TILINGS[tiling])

    operands = jax.eval_shape(lambda: problem(0, (4, 2), 300, 1000, (9,), (300,)))
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    count_case()


def test_lowers_beyond_two_to_the_31_elements(count_case):
    assert 40 * 70_000 * 8 * 128 > 2**31
    assert lowered((32, 8), 40, 4096, 70_000).count("mosaic_gpu_v2") == 1
    count_case()


def test_lowers_on_values_that_differ_over_a_mesh(count_case):
    """Each device has KV heads of its own; check_vma=True refuses results of another type."""
    by_head = P(None, None, "tensor")
    call = jax.shard_map(
        lambda *o: prefill_attention(*o, q_heads=4, implementation="mosaic_gpu"),
        mesh=make_mesh(2),
        in_specs=(by_head, by_head, by_head, P(), P()),
        out_specs=by_head,
        check_vma=True,
    )
    operands = jax.eval_shape(lambda: problem(0, (8, 2), 100, 300, (5,), (100,)))
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text
    count_case()


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", cache_dtype="bfloat16")
    assert supported(**good) is None
    for change, word in [
        (dict(head_dim=96), "head_dim"),
        (dict(q_heads=30), "query heads"),
        (dict(dtype="float32", cache_dtype="float32"), "activations are float32"),
        (dict(cache_dtype="float16"), "cache"),
    ]:
        assert word in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    q, k, v, start, new = problem(0, (4, 2), 20, 30, (1, 2), (3, 4), "float32", 16)
    with pytest.raises(ValueError) as caught:
        prefill_attention(q, k, v[:, 1:], start[1:], new, q_heads=9, implementation="cuda")
    for part in ("q_heads is 9", "v is float32(2, 29, 2, 16)", "start has shape (1,)", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="q has shape"):
        prefill_attention(q[0], k, v, start, new)
    with pytest.raises(Unsupported, match="head_dim 64 or 128"):
        prefill_attention(q, k, v, start, new, implementation="mosaic_gpu")


def test_empty_calls():
    q, k, v, start, new = problem(0, (4, 2), 20, 30, (1, 2), (3, 4), "float32", 16)
    assert prefill_attention(q[:, :0], k, v, start, new, q_heads=4).shape == (2, 0, 4, 16)
    assert not prefill_attention(q, k[:, :0], v[:, :0], start, 0 * new, q_heads=4).any()


@pytest.mark.parametrize(
    "setting, tokens, slots, reason",
    [
        ("prefill_attention", 64, 2048, None),
        ("prefill_attention", 63, 2048, "64 tokens"),
        ("prefill_attention", 64, 0, "no slot"),
        ("auto", 64, 2048, None),
        ("grouped_matmul", 64, 2048, "switched off"),
        ("none", 64, 2048, "off"),
    ],
)
def test_the_choice(setting, tokens, slots, reason):
    k = jax.ShapeDtypeStruct((1, slots, 8, 128), jnp.bfloat16)
    with traced_for(setting):
        found = declined(k, tokens=tokens, q_heads=32, dtype="bfloat16")
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_layer_with_its_kernel(dtype, cached, count_case, monkeypatch):
    """A layer's own attention, and the same layer with the kernel switched on, in the interpreter; some tokens are
    pads, and empty slots hold NaN."""
    model = tiny.model(head_dim=64, num_attention_heads=4, dtype=dtype)
    layer = model.network().layers[model.config.hybrid_override_pattern.index("*")].mixer
    keys = jax.random.split(jax.random.key(0), 3)
    start, new = jnp.array([3, 0] if cached else [0, 0], jnp.int32), jnp.array([66, 20], jnp.int32)
    shape = (2, 75, 2, 64)
    empty = (jnp.arange(75) >= start[:, None])[:, :, None, None]
    k, v = (jnp.where(empty, jnp.nan, jax.random.normal(key, shape)).astype(dtype) for key in keys[:2])
    cache = AttentionCache(k, v) if cached else None
    x = jax.random.normal(keys[2], (2, 66, model.config.hidden_size)).astype(dtype)
    valid = jnp.arange(66) < new[:, None]
    rows = Rows(start, new, valid)
    wanted, kept = layer(x, cache, rows)
    calls = []

    def kernel(*operands, q_heads):
        calls.append(1)
        with interpreter() as interpret:
            return mosaic_gpu.prefill_attention(*operands, q_heads=q_heads, interpret=interpret)

    monkeypatch.setattr(type(layer), "prefill_fault", lambda *args: None)
    monkeypatch.setattr(api, "declined", lambda *args, **kwargs: None)
    monkeypatch.setattr(api.typed, "prefill_attention", kernel)
    with jax.disable_jit():
        found, cache = layer(x, cache, rows)
    assert calls
    assert error(found[valid], wanted[valid]) <= 2 * BOUND[dtype]
    if cached:
        for name in ("k", "v"):
            a, b = (np.asarray(getattr(x, name), np.float32) for x in (cache, kept))
            np.testing.assert_array_equal(a, b)
    count_case()


@pytest.mark.parametrize(
    "setting, tensor, data, tokens, kernels",
    [("none", 1, 1, 512, 0), ("prefill_attention", 1, 1, 512, 1), ("prefill_attention", 1, 1, 1, 0)]
    + [("prefill_attention", 2, 1, 512, 1), ("prefill_attention", 16, 2, 100, 1)],
)
def test_a_models_prefill_for_absent_h200(setting, tensor, data, tokens, kernels, count_case):
    """The attention layers share one lowered function, so the program's text has their kernel once."""
    target = targets.absent("h200", tensor * data, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="*-*", block_configs=config.block_configs and config.block_configs[:3]
    )
    model = NemotronH(config, mesh=target.mesh(tensor, data), dtype="bfloat16", fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, data, tokens, 1030, target).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    count_case()
