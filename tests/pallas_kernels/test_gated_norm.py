"""Gated grouped RMSNorm: the reference against float64, the kernel in the interpreter and lowered for CUDA, the choice
between them, both in a Mamba block. On a GPU: tests/gpu/mamba_prefill_checks.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import make_mesh
from pallas_kernels import Unsupported
from pallas_kernels.gated_norm import declined, gated_norm, mosaic_gpu, reference, shapes, supported
from tests.gpu.mamba_prefill_checks import EPS, compare, norm_problem
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("groups", [1, 4])
def test_reference_against_float64(groups, start, count_case):
    random = np.random.default_rng(groups)
    y, packed = random.standard_normal((2, 5, 48)), random.standard_normal((2, 5, 70))
    weight = random.standard_normal(48)
    operands = [jnp.asarray(v, jnp.float32) for v in (y, packed, weight)]
    found = gated_norm(*operands, groups=groups, eps=EPS, start=start, implementation="reference")
    z = packed[..., start : start + 48]
    gated = (y * z / (1 + np.exp(-z))).reshape(2, 5, groups, -1)
    wanted = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + EPS)
    np.testing.assert_allclose(found, wanted.reshape(y.shape) * weight, rtol=1e-5, atol=1e-5)
    count_case()


@pytest.mark.parametrize(
    "shape, batch, tokens, dtype",
    [
        ((2048, 2, 2320), 2, 13, "bfloat16"),  # a row per warp
        ((960, 1, 2188), 1, 17, "bfloat16"),  # two rows per warp
        ((192, 2, 300), 3, 11, "float16"),  # four
        ((2048, 1, 4100), 1, 18, "float32"),
        ((256, 2, 600), 1, 16, "bfloat16"),
    ],
)
def test_kernel_in_the_interpreter(shape, batch, tokens, dtype, count_case):
    inner, groups, columns = shape
    y, packed, weight = norm_problem(1, shape, batch, tokens, dtype)
    wanted = reference.gated_norm(y, packed, weight, groups=groups, eps=EPS)
    start = columns - inner - columns % 4 if columns > 2 * inner else 0
    packed = jnp.roll(packed, start, axis=-1)
    with interpreter() as interpret:
        found = mosaic_gpu.gated_norm(y, packed, weight, groups=groups, eps=EPS, start=start, interpret=interpret)
    compare(found, wanted)
    count_case()


def types(shape, batch, tokens, dtype="bfloat16"):
    inner, _, columns = shape
    sizes = ((batch, tokens, inner), "float32"), ((batch, tokens, columns), dtype), ((inner,), "float32")
    return [jax.ShapeDtypeStruct(*size) for size in sizes]


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_lowers_to_one_launch(name, count_case):
    shape = shapes.SHAPES[name]
    call = jax.jit(lambda *o: gated_norm(*o, groups=shape[1], eps=EPS, implementation="mosaic_gpu"))
    text = call.trace(*types(shape, 1, 4096)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.slice" not in text
    count_case()


def test_lowers_on_values_that_differ_over_a_mesh(count_case):
    by_rank = P(None, None, "tensor")
    call = jax.shard_map(
        lambda *o: gated_norm(*o, groups=1, eps=EPS, implementation="mosaic_gpu"),
        mesh=make_mesh(2),
        in_specs=(by_rank, by_rank, P("tensor")),
        out_specs=by_rank,
        check_vma=True,
    )
    operands = types((2048, 2, 4640), 1, 100)
    assert "mosaic_gpu_v2" in jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    count_case()


@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 512, 896, 960, 1024, 1280, 2048])
def test_tiles(width):
    """A thread's values fit its registers, and no tile has more rows than a call must have."""
    rows, _ = mosaic_gpu.tile_of(width)
    assert rows % 4 == 0 and rows <= 16 and rows * width <= 128 * 64


def test_what_shapes_the_kernel_serves():
    good = dict(rows=77, inner=8192, groups=8, columns=18560, start=0, y_dtype="float32", dtype="bfloat16")
    for inner, groups, columns in shapes.SHAPES.values():
        assert supported(**good | dict(inner=inner, groups=groups, columns=columns)) is None
    for change, word in [
        (dict(y_dtype="bfloat16"), "y in float32"),
        (dict(dtype="int8"), "gate in"),
        (dict(inner=8 * 48), "multiple of 32"),
        (dict(groups=2), "up to 2048"),
        (dict(columns=18561), "18561 columns"),
        (dict(start=2), "starts at 2"),
        (dict(rows=15), "16 rows"),
    ]:
        assert word in supported(**good | change), change


def test_faults_at_once_and_refusals():
    y, packed, weight = norm_problem(0, (64, 2, 150), 1, 20)
    with pytest.raises(ValueError) as caught:
        gated_norm(y, packed[:, 1:], weight[1:], groups=3, eps=EPS, start=87, implementation="cuda")
    for part in ("packed has", "weight has", "groups is 3", "start is 87", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(Unsupported, match="150 columns"):
        gated_norm(y, packed, weight, groups=2, eps=EPS, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "setting, name, reason",
    [
        ("gated_norm", "nemotron-h-8b", None),
        ("auto", "nemotron-h-8b", None),
        ("auto", "nemotron-h-8b, 8 ranks", "pays from 4096 channels"),
        ("gated_norm", "nemotron-h-8b, 8 ranks", None),
        ("grouped_matmul", "nemotron-h-8b", "switched off"),
        ("none", "nemotron-h-8b", "off"),
    ],
)
def test_the_choice(setting, name, reason):
    y, packed, _ = types(shapes.SHAPES[name], 1, 4096)
    with traced_for(setting):
        found = declined(y, packed, groups=shapes.SHAPES[name][1])
    assert found is None if reason is None else reason in found
