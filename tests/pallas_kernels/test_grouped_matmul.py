"""The grouped matrix product: the reference against float64, the kernel in the interpreter and lowered for CUDA, the
choice in a model. On a GPU: tests/gpu/test_grouped_matmul.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, step, targets
from nemotron_jax.layers import experts
from pallas_kernels import Unsupported, selection
from pallas_kernels.grouped_matmul import grouped_matmul, mosaic_gpu, reference, row_tile, shapes, supported
from tests.gpu.grouped_matmul_checks import compare, problem
from tests.pallas_kernels.interpreter import interpreter


@pytest.mark.parametrize("squared_relu", [False, True])
def test_reference_against_float64(squared_relu, count_case):
    (x, matrices, tile_group, used), real = problem(0, 8, 7, 5, 4, 33, 20, "float16")
    x, matrices = x.astype(jnp.float32), matrices.astype(jnp.float32)
    found = np.asarray(grouped_matmul(x, matrices, tile_group, used, squared_relu=squared_relu))
    for row in np.flatnonzero(real):
        wanted = np.asarray(matrices[tile_group[row // 8]], np.float64) @ np.asarray(x[row], np.float64)
        wanted = np.maximum(wanted, 0) ** 2 if squared_relu else wanted
        np.testing.assert_allclose(found[row], wanted, rtol=2e-5, atol=2e-6)
    assert real.sum() > 10 and (found[5 * 8 :] == 0).all()
    count_case()


TWO = mosaic_gpu.Tiling(outputs=64, warpgroups=2, stages=3)
INTERPRETED = [
    # row tile, tiles, used, groups, outputs, inputs; dtype; squared ReLU; tiling; blocks
    ((8, 5, 4, 4, 208, 144), "bfloat16", True, None, 2),  # edges in outputs and inputs, one unused tile
    # fewer steps than stages, fewer tiles than some block's turn
    pytest.param((16, 4, 4, 9, 128, 64), "float16", False, TWO, 3, marks=pytest.mark.full),
    ((24, 3, 2, 2, 336, 352), "bfloat16", False, TWO, 1),  # more steps than stages, a narrow pattern on both sides
    pytest.param((8, 2, 2, 2, 384, 128), "bfloat16", True, mosaic_gpu.Tiling(64, 3, 2), 2, marks=pytest.mark.full),
    ((64, 2, 2, 2, 320, 192), "bfloat16", True, None, 5),  # 128 outputs a warpgroup; a block without a tile
    ((8, 3, 0, 2, 128, 64), "bfloat16", False, None, 2),  # nothing to do
]


@pytest.mark.parametrize("shape, dtype, squared_relu, tiling, blocks", INTERPRETED)
def test_kernel_in_the_interpreter(shape, dtype, squared_relu, tiling, blocks, count_case):
    """NaN in padding, in unused tiles and in the matrices of groups without a tile."""
    operands, real = problem(1, *shape, dtype)
    wanted = reference.grouped_matmul(*operands, squared_relu=squared_relu)
    with interpreter() as interpret:
        found = mosaic_gpu.grouped_matmul(
            *operands, squared_relu=squared_relu, tiling=tiling, blocks=blocks, interpret=interpret
        )
    compare(found, wanted, real, dtype)
    assert np.isnan(np.asarray(found, np.float32)[shape[0] * shape[2] :]).all()  # what no tile wrote
    count_case()


def test_experts_through_the_kernel_in_the_interpreter(monkeypatch, count_case):
    """Both products of a block, any choice, some of it another rank's, beside the plain form."""
    rng = np.random.default_rng(2)
    x, up, down = (
        jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, jnp.bfloat16)
        for s in ((9, 128), (6, 144, 128), (6, 128, 144))
    )
    chosen = jnp.asarray(np.argsort(rng.random((9, 8)), -1)[:, :3], jnp.int32)
    weights = jnp.asarray(rng.random((9, 3)), jnp.float32)
    calls = []
    with interpreter() as interpret:

        def call(*operands, squared_relu=False):
            calls.append(squared_relu)
            return mosaic_gpu.grouped_matmul(*operands, squared_relu=squared_relu, blocks=2, interpret=interpret)

        monkeypatch.setattr(experts.kernel, "grouped_matmul", call)
        found = experts.expert_sum(x, up, down, chosen, weights, "grouped")
    wanted = np.asarray(experts.expert_sum(x, up, down, chosen, weights, "dense"), np.float32)
    assert calls == [True, False]
    assert np.abs(np.asarray(found, np.float32) - wanted).max() <= 2.0**-7 * np.abs(wanted).max()
    count_case()


@pytest.mark.parametrize("name", [n for n in shapes.SHAPES if n != "nano_tp8"])
def test_lowers_to_one_launch_each(name, count_case):
    groups, k, f, width = shapes.SHAPES[name]
    for tokens, outputs, inputs in ((8, f, width), (8192, width, f)):
        rows = row_tile(tokens * k, groups)
        operands = [jax.ShapeDtypeStruct(s, d) for s, d in (
            ((7 * rows, inputs), "bfloat16"), ((groups, outputs, inputs), "bfloat16"), ((7,), "int32"), ((1,), "int32")
        )]  # fmt: skip
        call = jax.jit(lambda *a: grouped_matmul(*a, squared_relu=True, implementation="mosaic_gpu"))
        text = call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1
        count_case()


def test_every_tiling_fits_shared_memory_and_registers():
    for rows in (8, 16, 24, 32, 64, 96, 128):
        for outputs in (128, 232, 464, 1024, 2688):
            tiling = mosaic_gpu.default_tiling(rows, outputs)
            assert tiling.shared_bytes(rows) <= 227 * 1024 - 1024
            assert tiling.warpgroups * tiling.outputs <= outputs
            multiply, fetch = tiling.registers
            assert 128 * (tiling.warpgroups * multiply + fetch) <= 65536


def test_row_tiles():
    assert [row_tile(n, 128) for n in (1, 128, 1024, 1025, 3072, 8192, 8193, 49152)] == [8, 8, 8, 16, 32, 64, 128, 128]
    assert row_tile(5, 0) == 8


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(row_tile=128, inputs=2688, outputs=1856, dtype="bfloat16")
    assert supported(**good) is None
    for change, word in [
        (dict(dtype="float32"), "bfloat16 or float16"),
        (dict(row_tile=12), "row tile"),
        (dict(row_tile=136), "row tile"),
        (dict(inputs=232), "inputs of at least 64 in steps of 16; there are 232"),
        (dict(outputs=120), "outputs"),
        (dict(inputs=48), "inputs"),
    ]:
        assert word in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    operands, _ = problem(0, 8, 3, 3, 2, 16, 32)
    x, matrices, tile_group, used = operands
    with pytest.raises(ValueError) as caught:
        grouped_matmul(x, matrices[..., 1:], tile_group[:2].astype(jnp.int8), used[0], implementation="cuda")
    for part in (
        "matrices has shape (2, 16, 31); accepted: (groups, outputs, 32)",
        "used has shape ()",
        "tile_group has dtype int8",
        "implementation is 'cuda'",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="a number of tiles that divides 24 rows"):
        grouped_matmul(x, matrices, jnp.zeros(5, jnp.int32), used)
    with pytest.raises(Unsupported, match="inputs of at least 64 in steps of 16; there are 32"):
        grouped_matmul(*operands, implementation="mosaic_gpu")


def test_the_choice_between_forms():
    assert experts.choose(1, 6, 128, kernel=True) == "gather"
    assert [experts.choose(64, 6, 128, kernel=k) for k in (False, True)] == ["gather", "grouped"]
    assert [experts.choose(8192, 6, 128, kernel=k) for k in (False, True)] == ["blocks", "grouped"]


WHOLE = ShardingRules.from_dict({"experts": "tensor", "expert_mlp": None})


@pytest.mark.parametrize(
    "setting, preset, tensor, rules, tokens, kernels",
    [
        ("none", "nemotron-3-nano-30b-a3b", 1, None, 512, 0),
        ("auto", "nemotron-3-nano-30b-a3b", 1, None, 512, 3),  # and the head
        ("grouped_matmul", "nemotron-3-nano-30b-a3b", 1, None, 512, 2),
        ("grouped_matmul", "nemotron-3-nano-30b-a3b", 1, None, 1, 0),
        ("grouped_matmul", "nemotron-3-nano-30b-a3b", 8, None, 512, 0),  # slices of 232
        ("grouped_matmul", "nemotron-3-nano-30b-a3b", 8, WHOLE, 512, 2),
        ("grouped_matmul", "nemotron-3-super-120b-a12b", 4, None, 512, 2),
    ],
)
def test_a_models_prefill_for_absent_h200(setting, preset, tensor, rules, tokens, kernels, count_case):
    target = targets.absent("h200", tensor, compile=False)
    config = NemotronHConfig.preset(preset)
    config = dataclasses.replace(
        config, hybrid_override_pattern="E", block_configs=config.block_configs and config.block_configs[:1]
    )
    model = NemotronH(config, mesh=target.mesh(tensor), **({"rules": rules} if rules else {}))
    with selection.use(setting):
        text = step.lower_step(model, 1, tokens, tokens, target).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    count_case()
