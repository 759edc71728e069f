"""An MLP in one launch: the kernel in the interpreter, several blocks at the same time, its barrier as a model, its
cuts, lowered for CUDA, the choice in a model. On a GPU: tests/gpu/mlp_step_checks.py."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nemotron_jax import NemotronH, NemotronHConfig, step, targets
from nemotron_jax.layers import mlp as layer
from nemotron_jax.sharding import Axis
from pallas_kernels import Unsupported, selection
from pallas_kernels.matvec.product import MULTIPROCESSORS, SHARED_BYTES, Tiling
from pallas_kernels.mlp_step import api, declined, grid_barrier, mlp_step, mosaic_gpu, reference, shapes, supported
from tests.gpu import mlp_step_checks as checks
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter, races_found

Cuts = mosaic_gpu.Cuts


def test_reference_against_float64(count_case):
    x, up, down = checks.problem(0, 3, 24, 40, "float32")
    h = np.maximum(np.asarray(x, np.float64) @ np.asarray(up, np.float64).T, 0) ** 2
    np.testing.assert_allclose(mlp_step(x, up, down), h @ np.asarray(down, np.float64).T, rtol=2e-5, atol=2e-6)
    count_case()


INTERPRETED = [
    # rows, hidden, wide; dtype; dtype of the result; cuts
    ((8, 192, 336), "bfloat16", None, Cuts(Tiling(24, 64, 4, 2, 2), Tiling(72, 128, 4, 2, 2), 18)),  # moved tiles
    # narrow patterns; a block without a tile in the second product, and others without one in the first
    ((1, 80, 176), "float16", "float32", Cuts(Tiling(16, 64, 2, 1, 2), Tiling(80, 64, 2, 1, 2), 10)),
    ((2, 64, 64), "bfloat16", "float32", Cuts(Tiling(64, 64, 4, 1, 3), Tiling(16, 64, 4, 1, 3), 8)),
]


@pytest.mark.parametrize("shape, dtype, out, cuts", INTERPRETED)
def test_kernel_in_the_interpreter(shape, dtype, out, cuts, count_case):
    operands = checks.problem(1, *shape, dtype)
    out = jnp.dtype(out or dtype)
    with interpreter() as interpret:
        found = mosaic_gpu.mlp_step(*operands, out_dtype=out, cuts=cuts, interpret=interpret)
    assert found.shape == operands[0].shape and found.dtype == out
    assert checks.error(found, reference.mlp_step(*operands, out_dtype=out)) <= checks.BOUND[dtype]
    count_case()


def test_nothing_is_read_before_it_is_written(count_case):
    """The interpreter's blocks run at the same time and its memory is NaN: what passes the barrier too early is a race,
    and a row's NaN stays in it."""
    x, up, down = checks.problem(2, 3, 64, 288)
    x = x.at[1, 5].set(jnp.nan)
    cuts = Cuts(Tiling(72, 64, 3, 1, 3), Tiling(32, 128, 3, 1, 3), 10)
    with interpreter(detect_races=True) as interpret:
        y = mosaic_gpu.mlp_step(x, up, down, out_dtype=x.dtype, cuts=cuts, interpret=interpret)
        assert not races_found()
    assert np.isfinite(np.asarray(y, np.float32)).all(1).tolist() == [True, False, True]
    count_case()


# ------------------------------------------------------------------------------------------------ the barrier
@pytest.mark.parametrize("blocks", [1, 2, 3, 66, 128, 132])
def test_the_barrier_opens_for_the_last_block_alone(blocks, count_case):
    """Launch after launch on one word, whatever the order."""
    rng = random.Random(blocks)
    word = 0
    for _ in range(7):
        before = word & 0x80000000
        shares = [int(grid_barrier.share(block, blocks)) % 2**32 for block in range(blocks)]
        rng.shuffle(shares)
        for i, share in enumerate(shares):
            word = (word + share) % 2**32
            assert bool((word ^ before) & 0x80000000) == (i == blocks - 1)
        assert word & 0x7FFFFFFF == 0
    count_case()


# ------------------------------------------------------------------------------------------------ cuts and lowering
RELEASED = [(name, ranks) for name in shapes.SHAPES for ranks in checks.RANKS]


def served(name, ranks, rows=8):
    size = shapes.of_rank(name, ranks)
    return size is not None and supported(rows=rows, hidden=size[0], wide=size[1], dtype="bfloat16") is None


@pytest.mark.parametrize("warpgroups, blocks", [(1, MULTIPROCESSORS), (2, MULTIPROCESSORS), (1, 66)])
def test_cuts_fit(warpgroups, blocks, count_case):
    sizes = [shapes.of_rank(*of) for of in RELEASED if served(*of)]
    sizes += [shape[1:] for shape, _ in checks.edges()]
    for hidden, wide in sizes:
        for rows in (1, 8):
            cuts = mosaic_gpu.default_cuts(rows, hidden, wide, warpgroups=warpgroups, blocks=blocks)
            assert cuts.shared_bytes(rows) <= SHARED_BYTES
            assert mosaic_gpu.MOST_STAGES >= cuts.up.stages == cuts.down.stages >= 2 * warpgroups
            assert cuts.up.stages % warpgroups == 0
            for cut in (cuts.up, cuts.down):
                stride = cuts.stride(cut)
                assert stride % 8 == 0 and stride >= cut.outputs
                # one slot size for both: a slot of one product is free when that of the other one has been read
                assert stride * cut.depth == cuts.units * mosaic_gpu.UNIT
                assert cut.depth <= mosaic_gpu.DEEPEST
        count_case()


@pytest.mark.parametrize("ranks", checks.RANKS)
def test_released_shapes_lower_to_one_launch(ranks, count_case):
    for name in shapes.SHAPES:
        if not served(name, ranks):
            assert (name, ranks) in {("9b", 8)}
            continue
        hidden, wide = shapes.of_rank(name, ranks)
        rows, out = (1, "bfloat16") if ranks < 4 else (8, "float32")
        assert lowered(rows, hidden, wide, out_dtype=out).count("mosaic_gpu_v2") == 1
        count_case()


def test_edges_lower(count_case):
    for (rows, hidden, wide), options in checks.edges():
        dtype, out, cuts = options.get("dtype", "bfloat16"), options.get("out_dtype"), options.get("cuts")
        if cuts is not None and (cuts.up.warpgroups, cuts.up.blocks) != (3, 132):
            continue
        assert lowered(rows, hidden, wide, dtype, out_dtype=out, cuts=cuts).count("mosaic_gpu_v2") == 1
        count_case()


def lowered(rows, hidden, wide, dtype="bfloat16", *, out_dtype=None, cuts=None):
    operands = [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, hidden), (wide, hidden), (hidden, wide))]
    out = jnp.dtype(out_dtype or dtype)
    if cuts is None:
        call = functools.partial(mlp_step, out_dtype=out, implementation="mosaic_gpu")
    else:
        call = functools.partial(mosaic_gpu.mlp_step, out_dtype=out, cuts=cuts)
    return jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


# ------------------------------------------------------------------------------------------------ transforms
def test_gradient_and_vmap_are_the_references(monkeypatch, count_case):
    operands = checks.problem(3, 2, 64, 96)
    monkeypatch.setattr(
        api,
        "_launch",
        lambda call, *a: jax.lax.stop_gradient(reference.mlp_step(*a, out_dtype=call.out_dtype)),
    )

    def loss(implementation):
        return lambda *a: jnp.sum(mlp_step(*a, out_dtype="float32", implementation=implementation) ** 2)

    for found, wanted in zip(*(jax.grad(loss(i), (0, 1, 2))(*operands) for i in api.IMPLEMENTATIONS), strict=True):
        assert np.asarray(found, np.float32).any()
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    monkeypatch.setattr(api, "_launch", lambda call, x, up, down: jnp.zeros(x.shape, call.out_dtype))
    x, up, down = operands
    xs = jnp.stack([x, -x])
    found, wanted = (
        jax.vmap(functools.partial(mlp_step, implementation=i), (0, None, None))(xs, up, down)
        for i in ("mosaic_gpu", "reference")
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    count_case()


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(rows=8, hidden=4096, wide=21504, dtype="bfloat16")
    assert supported(**good) is None
    for change, words in [
        (dict(dtype="float32"), "bfloat16 or float16"),
        (dict(rows=9), "1 to 8 rows; there are 9"),
        (dict(rows=0), "1 to 8 rows"),
        (dict(wide=1960), "inputs of at least 64 in steps of 16; there are 1960 (down)"),
        (dict(hidden=72), "inputs of at least 64 in steps of 16; there are 72 (up)"),
    ]:
        assert words in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    x, up, down = checks.problem(0, 2, 32, 16)
    with pytest.raises(ValueError) as caught:
        mlp_step(x, up[:, 1:], down.astype("float32"), out_dtype="float16", implementation="cuda", max_blocks=0)
    for part in (
        "up has shape (16, 31); accepted: (wide, 32)",
        "down has shape (32, 16); accepted: (31, 16)",
        "down has dtype float32",
        "out_dtype is float16",
        "implementation is 'cuda'",
        "max_blocks is 0",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="x has shape"):
        mlp_step(x[0], up, down)
    with pytest.raises(Unsupported, match="at least 64"):
        mlp_step(x, up, down, implementation="mosaic_gpu")


def test_no_more_blocks_than_are_sure_to_run_together(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "_launch", lambda call, x, up, down: seen.append(call.max_blocks) or x)
    operands = checks.problem(0, 2, 64, 64)
    for asked in (None, 66, 1000):
        mlp_step(*operands, implementation="mosaic_gpu", max_blocks=asked)
    part = type("Device", (), {"core_count": 60})
    monkeypatch.setattr(api.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(api.jax, "local_devices", lambda: [part])
    for asked in (None, 66, 30):
        mlp_step(*operands, implementation="mosaic_gpu", max_blocks=asked)
    assert seen == [132, 66, 132, 60, 60, 30]


@pytest.mark.parametrize(
    "setting, rows, reason",
    [
        ("mlp_step", 8, None),
        ("mlp_step", 9, "1 to 8 rows"),
        ("auto", 1, "switched off"),  # until it has run on hardware
        ("auto,mlp_step", 1, None),
        ("none", 1, "switched off"),
    ],
)
def test_the_choice(setting, rows, reason):
    with traced_for(setting):
        found = declined(rows=rows, hidden=4096, wide=21504, dtype="bfloat16")
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_takes_it_where_there_is_no_bias(bias, monkeypatch, count_case):
    config = dataclasses.replace(NemotronHConfig.preset("nemotron-h-8b"), hidden_size=64)
    block = layer.MLP(config, "", axis=Axis(), dtype=jnp.bfloat16, width=144, bias=bias)
    for i, name in enumerate(("up", "down", "up_bias", "down_bias")[: 4 if bias else 2]):
        value = getattr(block, name)
        filled = jax.random.normal(jax.random.key(i), value.shape) * value.shape[-1] ** -0.5
        setattr(block, name, nnx.Param(filled.astype(value.dtype)))
    x = jax.random.normal(jax.random.key(9), (2, 1, 64), jnp.bfloat16)
    wanted, calls = block(x), []

    def call(x, up, down, *, implementation):
        calls.append(implementation)
        return reference.mlp_step(x, up, down, out_dtype=x.dtype)

    monkeypatch.setattr(layer.mlp_step, "declined", lambda **_: None)
    monkeypatch.setattr(layer.mlp_step, "mlp_step", call)
    found = block(x)
    assert calls == ([] if bias else ["mosaic_gpu"])
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    count_case()


@pytest.mark.parametrize(
    "preset, pattern, setting, tensor, rows, kernels",
    [
        ("nemotron-h-8b", "-", "mlp_step", 1, 1, 1),
        ("nemotron-h-8b", "-", "matvec,mlp_step", 8, 2, 2),  # and the head
        ("nemotron-h-8b", "-", "mlp_step", 1, 16, 0),
        ("nemotron-3-nano-30b-a3b", "E", "mlp_step", 1, 1, 1),  # the shared expert
    ],
)
def test_a_models_decode_step_for_absent_h200(preset, pattern, setting, tensor, rows, kernels, count_case):
    target = targets.absent("h200", tensor, compile=False)
    config = NemotronHConfig.preset(preset)
    config = dataclasses.replace(
        config, hybrid_override_pattern=pattern, block_configs=config.block_configs and config.block_configs[:1]
    )
    model = NemotronH(config, mesh=target.mesh(tensor), dtype="bfloat16", fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, rows, 1, 64, target).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    count_case()
