"""A few rows times a matrix: the reference against float64, the kernel in the interpreter and lowered for CUDA, its
cut, the choice in a model. On a GPU: tests/gpu/test_matvec.py."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, step, targets
from nemotron_jax.cache import Rows
from nemotron_jax.layers import linear
from pallas_kernels import Unsupported, selection
from pallas_kernels.matvec import api, chosen_matvec, declined, matvec, mosaic_gpu, reference, shapes, supported, tiling
from tests import tiny
from tests.gpu import matvec_checks as checks
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter, races_found

Tiling = tiling.Tiling


def test_reference_against_float64(count_case):
    x, w = checks.problem(0, 3, 40, 24, "float32")
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(matvec(x, w), wanted, rtol=2e-5, atol=2e-6)
    count_case()


INTERPRETED = [
    # rows, outputs, inputs; dtype; dtype of the result; tiling
    ((1, 208, 256), "bfloat16", None, Tiling(72, 64, 2, 1, 2)),  # products that overlap; tiles beyond the blocks
    ((5, 200, 352), "bfloat16", "float32", Tiling(32, 128, 4, 2, 3)),  # a tile that is lower than a product
    ((8, 64, 176), "float16", None, Tiling(16, 64, 4, 2, 3)),  # a narrow pattern, an odd number of steps for two
    ((8, 264, 256), "bfloat16", None, Tiling(136, 64, 6, 3, 1)),
    ((13, 144, 128), "bfloat16", "float32", Tiling(144, 64, 3, 1, 1)),  # two groups of rows, one of them not full
    ((3, 72, 80), "bfloat16", "float32", Tiling(24, 64, 4, 2, 2)),
    ((2, 64, 64), "bfloat16", None, None),  # fewer steps than stages
]


@pytest.mark.parametrize("shape, dtype, out, cut", INTERPRETED)
def test_kernel_in_the_interpreter(shape, dtype, out, cut, count_case):
    x, w = checks.problem(1, *shape, dtype)
    out = jnp.dtype(out or dtype)
    wanted = reference.matvec(x.astype(jnp.float32), w.astype(jnp.float32), out_dtype=jnp.float32).astype(out)
    with interpreter() as interpret:
        found = mosaic_gpu.matvec(x, w, out_dtype=out, tiling=cut, interpret=interpret)
    checks.compare(found, wanted)
    count_case()


def test_no_number_stays_in_its_row():
    x, w = checks.problem(2, 3, 72, 128)
    x = x.at[1, 5].set(jnp.nan)
    with interpreter() as interpret:
        y = mosaic_gpu.matvec(x, w, out_dtype=x.dtype, tiling=Tiling(24, 64, 3, 1, 2), interpret=interpret)
    assert np.isfinite(np.asarray(y, np.float32)).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("cut", [Tiling(64, 64, 3, 1, 2), Tiling(96, 64, 4, 2, 1)])
def test_no_races_in_the_interpreter(cut, count_case):
    """Where no tile is moved back and none is lower than a product: those read or write twice on purpose."""
    x, w = checks.problem(2, 3, 192, 256)
    with interpreter(detect_races=True) as interpret:
        found = mosaic_gpu.matvec(x, w, out_dtype=x.dtype, tiling=cut, interpret=interpret)
        assert not races_found()
    wanted = reference.matvec(x.astype(jnp.float32), w.astype(jnp.float32), out_dtype=jnp.float32).astype(x.dtype)
    checks.compare(found, wanted)
    count_case()


CHOICES = [
    # rows, choices of a row, matrices, outputs, inputs; an x for each choice; squared ReLU; tiling
    ((1, 3, 5, 72, 128), False, True, None),
    ((2, 2, 3, 208, 192), True, False, Tiling(72, 64, 3, 1, 4)),  # a block goes from one choice to the next
    ((3, 2, 4, 64, 176), False, False, Tiling(24, 64, 4, 2, 5)),  # a narrow pattern: copies take other rows' x too
    ((2, 3, 4, 88, 96), True, True, Tiling(64, 128, 2, 1, 2)),
]


def choice_problem(shape, each, dtype="bfloat16"):
    """Operands of `chosen_matvec`; matrices that nobody chose hold NaN."""
    rows, k, matrices, outputs, inputs = shape
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal((rows, k, inputs) if each else (rows, inputs))
    w = rng.standard_normal((matrices, outputs, inputs)) / inputs**0.5
    chosen = rng.integers(0, matrices, (rows, k)).astype(np.int32)
    w[~np.isin(np.arange(matrices), chosen)] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(chosen)


@pytest.mark.parametrize("shape, each, squared, cut", CHOICES)
def test_chosen_matrices_in_the_interpreter(shape, each, squared, cut, count_case):
    x, w, chosen = choice_problem(shape, each)
    with interpreter() as interpret:
        found = mosaic_gpu.matvec(
            x.reshape(-1, x.shape[-1]), w, chosen.reshape(-1), out_dtype=x.dtype, squared_relu=squared, tiling=cut,
            interpret=interpret,
        ).reshape(*chosen.shape, -1)  # fmt: skip
    for row, choice in np.ndindex(chosen.shape):
        mine = x[row, choice] if each else x[row]
        wanted = reference.matvec(mine[None], w[chosen[row, choice]], out_dtype=x.dtype, squared_relu=squared)[0]
        checks.compare(found[row, choice], wanted)
        count_case()
    plain = chosen_matvec(x, w, chosen, squared_relu=squared, implementation="reference")
    checks.compare(found, plain)


def test_chosen_matrices_faults_and_lowering(count_case):
    x, w, chosen = choice_problem((2, 3, 4, 64, 64), False)
    with pytest.raises(ValueError) as caught:
        chosen_matvec(x[:1], w[:, :, 1:], chosen.astype(jnp.int16), implementation="cuda")
    for part in ("chosen is int16(2, 3)", "w has shape (4, 64, 63)", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="x has shape"):
        chosen_matvec(x[:1], w, chosen)
    with pytest.raises(Unsupported, match="bfloat16 or float16"):
        chosen_matvec(x.astype("float32"), w.astype("float32"), chosen, implementation="mosaic_gpu")
    for rows, k, experts, outputs, inputs in ((1, 6, 128, 1856, 2688), (4, 6, 128, 2688, 928), (2, 22, 512, 336, 1024)):
        shapes_of = [((rows, inputs), "bfloat16"), ((experts, outputs, inputs), "bfloat16"), ((rows, k), "int32")]
        operands = [jax.ShapeDtypeStruct(*of) for of in shapes_of]
        call = jax.jit(functools.partial(chosen_matvec, implementation="mosaic_gpu"))
        assert call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
        count_case()


def test_the_experts_of_a_decode_step_stream(count_case):
    """Up, down, both shared ones, and nothing else of that kind; without the choice of kernels there is none."""
    target = targets.absent("h200", 1, compile=False)
    config = NemotronHConfig.preset("nemotron-3-nano-30b-a3b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="E", block_configs=config.block_configs and config.block_configs[:1]
    )
    model = NemotronH(config, mesh=target.mesh())
    for setting, kernels in (("none", 0), ("matvec", 5)):  # and the head
        with selection.use(setting):
            assert step.lower_step(model, 1, 1, 64, target).as_text().count("mosaic_gpu_v2") == kernels
        count_case()


CUTS = [(name, ranks) for name in shapes.SHAPES for ranks in checks.RANKS]


def test_cuts_fit_and_load_all_blocks_alike(count_case):
    for name, ranks in CUTS:
        outputs, _ = shapes.of_rank(name, ranks)
        for rows in (1, 8, 16, 64):
            cut = tiling.default_tiling(rows, outputs)
            assert cut.shared_bytes(rows) <= tiling.SHARED_BYTES and cut.stages >= 2
            assert cut.outputs % 8 == 0 and cut.outputs <= tiling.HIGHEST
            covered = {i for first in cut.firsts for i in range(first, first + tiling.HEIGHT)}
            assert covered >= set(range(cut.outputs))
            busiest = math.ceil(math.ceil(outputs / cut.outputs) / cut.blocks) * cut.outputs
            assert busiest <= 1.03 * outputs / cut.blocks + 8
        count_case()


@pytest.mark.parametrize("name", ["8b in_proj", "8b down", "8b o", "9b down", "nano-3 in_proj", "nano-3 head"])
def test_lowers_to_one_launch(name, count_case):
    for ranks, rows in ((1, 1), (4, 8)):
        outputs, inputs = shapes.of_rank(name, ranks)
        operands = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, inputs), (outputs, inputs))]
        for out in ("bfloat16", "float32"):
            call = jax.jit(functools.partial(matvec, out_dtype=out, implementation="mosaic_gpu"))
            text = call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("mosaic_gpu_v2") == 1
            count_case()


def test_narrow_patterns_lower(count_case):
    """Copies of x are then some rows higher than it is."""
    for rows, inputs in ((1, 1056), (3, 80), (7, 336), (33, 1056)):
        operands = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, inputs), (200, inputs))]
        call = jax.jit(functools.partial(matvec, implementation="mosaic_gpu"))
        assert call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
        count_case()


def test_every_tiling_that_is_timed_lowers(count_case):
    for rows, outputs in ((1, 18560), (8, 4096)):
        operands = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, 1024), (outputs, 1024))]
        for cut in checks.tilings(rows, outputs):
            call = jax.jit(functools.partial(mosaic_gpu.matvec, out_dtype=jnp.bfloat16, tiling=cut))
            assert call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
            count_case()


def test_gradient_is_the_references(monkeypatch):
    x, w = checks.problem(3, 2, 64, 96)
    monkeypatch.setattr(api, "_launch", lambda call, x, w: jax.lax.stop_gradient(reference.matvec(x, w, **call.kwargs)))

    def loss(implementation):
        options = dict(out_dtype="float32", squared_relu=True, implementation=implementation)
        return lambda x, w: jnp.sum(matvec(x, w, **options) ** 2)

    for found, wanted in zip(*(jax.grad(loss(i), (0, 1))(x, w) for i in ("mosaic_gpu", "reference")), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_gradient_through_chosen_matrices(monkeypatch):
    """Into the chosen matrices and no others; the choice itself has none."""
    x, w, chosen = choice_problem((2, 3, 8, 64, 96), False)
    w = jnp.nan_to_num(w)
    monkeypatch.setattr(
        api,
        "_launch_chosen",
        lambda squared, x, w, c: jax.lax.stop_gradient(reference.chosen_matvec(x, w, c, squared_relu=squared)),
    )

    def loss(implementation):
        options = dict(squared_relu=True, implementation=implementation)
        return lambda x, w: jnp.sum(chosen_matvec(x, w, chosen, **options).astype(jnp.float32) ** 2)

    found, wanted = (jax.grad(loss(i), (0, 1))(x, w) for i in ("mosaic_gpu", "reference"))
    for a, b in zip(found, wanted, strict=True):
        assert np.asarray(b, np.float32).any()
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    others = ~np.isin(np.arange(8), chosen)
    assert others.any() and not np.asarray(found[1], np.float32)[others].any()


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(rows=8, outputs=4096, inputs=4096, dtype="bfloat16")
    assert supported(**good) is None
    for change, word in [
        (dict(dtype="float32"), "bfloat16 or float16"),
        (dict(rows=65), "1 to 64 rows; there are 65"),
        (dict(rows=0), "rows"),
        (dict(inputs=1960), "inputs of at least 64 in steps of 16; there are 1960"),
        (dict(outputs=4100), "outputs"),
        (dict(outputs=56), "outputs"),
    ]:
        assert word in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    x, w = checks.problem(0, 2, 16, 32)
    with pytest.raises(ValueError) as caught:
        matvec(x, w[:, 1:].astype(jnp.float32), out_dtype="float16", implementation="cuda")
    for part in (
        "w has shape (16, 31); accepted: (outputs, 32)",
        "w has dtype float32",
        "out_dtype is float16",
        "implementation is 'cuda'",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="x has shape"):
        matvec(x[0], w)
    with pytest.raises(Unsupported, match="outputs of at least 64"):
        matvec(x, w, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "setting, rows, outputs, reason",
    [
        ("matvec", 8, 2688, None),
        ("matvec", 9, 2688, "pays up to 8 rows"),  # tiles of 24 outputs
        ("matvec", 16, 4096, None),
        ("matvec", 17, 4096, "twice as many outputs"),
        ("matvec", 32, 18560, None),
        ("matvec", 33, 18560, "there are 33"),
        ("auto", 1, 4096, None),
        ("grouped_matmul", 1, 4096, "switched off"),
        ("none", 1, 4096, "switched off"),
    ],
)
def test_the_choice(setting, rows, outputs, reason):
    with traced_for(setting):
        found = declined(rows=rows, outputs=outputs, inputs=4096, dtype="bfloat16")
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize("bias, squared", [(False, False), (True, False), (False, True), (True, True)])
def test_the_layers_product_through_the_kernel_in_the_interpreter(bias, squared, monkeypatch, count_case):
    x, w = checks.problem(4, 3, 72, 144)
    bias = jax.random.normal(jax.random.key(5), (72,)) if bias else None
    wanted = linear.project(x[:, None], w, bias, squared=squared)
    with interpreter() as interpret:

        def call(x, w, *, out_dtype, squared_relu, implementation):
            assert implementation == "mosaic_gpu"
            return mosaic_gpu.matvec(
                x, w, out_dtype=jnp.dtype(out_dtype), squared_relu=squared_relu, interpret=interpret
            )

        monkeypatch.setattr(linear.matvec, "declined", lambda **_: None)
        monkeypatch.setattr(linear.matvec, "matvec", call)
        found = linear.project(x[:, None], w, bias, squared=squared)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    checks.compare(found, wanted)
    count_case()


def test_a_tiny_models_decode_through_the_kernel_in_the_interpreter(monkeypatch, count_case):
    """One step of a model of one device: every product that the kernel serves, among them the head's."""
    sizes = dict(hidden_size=64, intermediate_size=144, vocab_size=104, num_attention_heads=4, head_dim=16)
    model = tiny.model(dtype="bfloat16", **sizes)
    network = model.network()
    cache = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), model.cache_shapes(2, 4).tree)
    rows = Rows(cache.length, jnp.ones(2, jnp.int32), None)
    plan = model.plan(2, 1)

    def logits():
        hidden, _, _ = network(jnp.array([[3], [5]], jnp.int32), cache, rows, plan)
        return network.lm_head(hidden, network.embeddings)

    wanted = logits()
    calls = []
    with interpreter() as interpret:

        def call(x, w, *, out_dtype, squared_relu, implementation):
            calls.append(w.shape)
            cut = tiling.default_tiling(len(x), len(w), blocks=2)
            return mosaic_gpu.matvec(
                x, w, out_dtype=jnp.dtype(out_dtype), squared_relu=squared_relu, tiling=cut, interpret=interpret
            )

        monkeypatch.setattr(linear.matvec, "declined", supported)
        monkeypatch.setattr(linear.matvec, "matvec", call)
        found = logits()
    assert len(calls) == 7 and calls[-1] == (104, 64)
    assert checks.error(found, wanted) <= 1e-2
    count_case()


@pytest.mark.parametrize(
    "setting, tensor, rows, kernels",
    [
        ("none", 1, 1, 0),
        ("matvec", 1, 1, 7),
        ("matvec", 1, 16, 7),
        ("matvec", 1, 32, 3),
        ("matvec", 1, 33, 0),
        ("matvec", 8, 2, 7),
    ],
)
def test_a_models_decode_step_for_absent_h200(setting, tensor, rows, kernels, count_case):
    """Layers of equal shapes share one lowered function, so the program's text has each matrix's kernel once."""
    target = targets.absent("h200", tensor, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="M*-", block_configs=config.block_configs and config.block_configs[:3]
    )
    model = NemotronH(config, mesh=target.mesh(tensor), dtype="bfloat16", fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, rows, 1, 64, target).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    count_case()
