"""One decode step of a Mamba-2 block: the reference against float64 and against the layer, the kernel in the
interpreter and lowered for CUDA, the choice between them. On a GPU: tests/gpu/test_decode_kernels.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, step, targets
from nemotron_jax.cache import MambaCache, Rows
from pallas_kernels import Unsupported, selection
from pallas_kernels.mamba_step import declined, mamba_step, mosaic_gpu, reference, shapes, supported
from tests import tiny
from tests.gpu.decode_kernel_checks import error, problem
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter

LIMITS = [(0.0, float("inf")), (0.001, float("inf")), (0.05, 0.3)]


def float64(zxbcdt, window, state, conv_weight, conv_bias, a_log, d, dt_bias, norm_weight, alive, groups, eps, limit):
    """The definition again, channel by channel and head by head, in NumPy; no rounding in between."""
    zxbcdt, window, state, conv_weight, a_log, d, dt_bias, norm_weight = (
        np.asarray(v, np.float64) for v in (zxbcdt, window, state, conv_weight, a_log, d, dt_bias, norm_weight)
    )
    rows, heads, p, e = state.shape
    inner, bc = heads * p, groups * e
    z, xbc, raw = np.split(zxbcdt, [inner, 2 * inner + 2 * bc], axis=1)
    inputs = np.concatenate([window, xbc[:, None]], 1)
    conv = np.einsum("bkc,ck->bc", inputs, conv_weight[:, 0]) + (0 if conv_bias is None else np.asarray(conv_bias))
    conv = conv / (1 + np.exp(-conv))
    dt = np.clip(np.logaddexp(0, raw + dt_bias), *limit)
    y, new = np.zeros((rows, inner)), state.copy()
    for row in range(rows):
        for head in range(heads):
            step = dt[row, head] * (alive is None or alive[row] > 0)
            at = inner + head * groups // heads * e
            b, c = conv[row, at : at + e], conv[row, at + bc : at + bc + e]
            x = conv[row, head * p : (head + 1) * p]
            new[row, head] = new[row, head] * np.exp(-step * np.exp(a_log[head])) + np.outer(step * x, b)
            y[row, head * p : (head + 1) * p] = new[row, head] @ c + d[head] * x
    y = (y * z / (1 + np.exp(-z))).reshape(rows, groups, -1)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + eps)
    moved = inputs[:, 1:]
    if alive is not None:
        moved = np.where(np.asarray(alive)[:, None, None] > 0, moved, window)
    return y.reshape(rows, inner) * norm_weight, moved, new


@pytest.mark.parametrize("shape", [(4, 16, 8, 2), (6, 32, 64, 3), (2, 80, 16, 1)])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("bias, alive", [(True, True), (False, False)])
def test_reference_against_float64(shape, limit, bias, alive, count_case):
    operands, groups = problem(1, shape, 4, "float32", bias=bias)
    operands = (*operands[:-1], jnp.array([1, 0, 1, 1]) if alive else None)
    found = mamba_step(*operands, groups=groups, eps=1e-5, time_step_limit=limit, implementation="reference")
    wanted = float64(*operands, groups, 1e-5, limit)
    for a, b in zip(found, wanted, strict=True):
        assert np.sqrt(((np.asarray(a, np.float64) - b) ** 2).mean()) <= 3e-6 * np.sqrt((b**2).mean())
    count_case()


@pytest.mark.parametrize("valid", [None, [True, False, True]])
def test_reference_is_the_layer(valid, count_case, monkeypatch):
    """A layer's own decode step, and the same layer with its kernel switched on, where the kernel is the reference."""
    model = tiny.model()
    layer = model.network().layers[model.config.hybrid_override_pattern.index("M")].mixer
    keys = jax.random.split(jax.random.key(0), 3)
    shapes_ = model.cache_shapes(3, 8).tree.layers[model.config.hybrid_override_pattern.index("M")]
    cache = MambaCache(
        jax.random.normal(keys[0], shapes_.conv.shape, shapes_.conv.dtype),
        jax.random.normal(keys[1], shapes_.ssm.shape, shapes_.ssm.dtype),
    )
    u = jax.random.normal(keys[2], (3, 1, model.config.hidden_size))
    alive = jnp.ones(3, jnp.int32) if valid is None else jnp.array(valid, jnp.int32)
    rows = Rows(jnp.full(3, 5), alive, None if valid is None else jnp.array(valid)[:, None])
    wanted = layer(u, cache, rows)
    calls = []
    monkeypatch.setattr(type(layer), "kernel_fault", lambda self, dtype, cache: calls.append(1))
    found = layer(u, cache, rows)
    assert calls
    real = np.flatnonzero(np.asarray(alive))
    tiny.close(found[0][real], wanted[0][real])
    tiny.close(found[1].ssm, wanted[1].ssm)
    assert (found[1].conv == wanted[1].conv).all()
    count_case()


INTERPRETED = [
    ((2, 64, 128, 1), "bfloat16", "float32", True, 2),
    ((4, 32, 96, 2), "float32", "float32", False, 1),
    ((4, 80, 64, 1), "float32", "bfloat16", True, 2),  # five tiles through two slots
    ((4, 80, 64, 1), "bfloat16", "float32", False, 1),
    ((1, 64, 256, 1), "float16", "float32", True, 1),
]


@pytest.mark.parametrize("shape, dtype, state_dtype, bias, slots", INTERPRETED)
def test_kernel_in_the_interpreter(shape, dtype, state_dtype, bias, slots, count_case):
    """One block per group: the sum over a cluster is inline code, which the interpreter lacks."""
    operands, groups = problem(2, shape, 2, dtype, state_dtype, bias)
    operands = (*operands[:-1], jnp.array([1, 0], jnp.int32))
    kwargs = dict(groups=groups, eps=1e-5, time_step_limit=(0.001, 0.3))
    wanted = reference.mamba_step(*operands, **kwargs)
    with interpreter() as interpret:
        found = mosaic_gpu.mamba_step(*operands, **kwargs, blocks=1, slots=slots, interpret=interpret)
    bound = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}
    assert error(found[0], wanted[0]) <= bound[dtype]
    assert (np.asarray(found[1]) == np.asarray(wanted[1])).all()
    assert error(found[2], wanted[2]) <= bound[state_dtype]
    assert (np.asarray(found[2][1]) == np.asarray(operands[2][1])).all()  # the finished row
    count_case()


def lowered(shape, rows, dtype="bfloat16", state_dtype="float32", **options):
    operands, groups = jax.eval_shape(lambda: problem(0, shape, rows, dtype, state_dtype)[0]), shape[3]

    def call(*operands):
        return mamba_step(*operands, groups=groups, eps=1e-5, implementation="mosaic_gpu", **options)

    return jax.jit(call, donate_argnums=(1, 2)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows, name", [((1, 129)[i % 2], name) for i, name in enumerate(shapes.SHAPES)])
def test_lowers_to_one_launch_that_keeps_its_buffers(name, rows, count_case):
    text = lowered(shapes.SHAPES[name], rows)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 2  # window and state
    count_case()


def test_the_cut():
    for heads, p, e, groups in shapes.SHAPES.values():
        tiles = heads * p // groups // mosaic_gpu.TILE
        blocks = mosaic_gpu.blocks_of(heads * p // groups)
        assert tiles % blocks == 0 and 1 <= blocks <= 8
        for rows in (1, 3, 17, 129):
            slots = mosaic_gpu.slots_of(tiles // blocks, mosaic_gpu.TILE * e * 4, rows * groups * blocks)
            assert 1 <= slots <= tiles // blocks and slots * mosaic_gpu.TILE * e * 4 <= mosaic_gpu.SHARED_BYTES
    assert mosaic_gpu.blocks_of(1024) == 8 and mosaic_gpu.blocks_of(1280) == 5 and mosaic_gpu.blocks_of(64) == 1
    assert mosaic_gpu.slots_of(4, 32 << 10, 40) == 4 and mosaic_gpu.slots_of(4, 32 << 10, 1280) == 2
    assert mosaic_gpu.slots_of(4, 1 << 20, 1) == 1


def test_softplus_to_the_last_digits(count_case):
    x = np.concatenate([np.linspace(-120, 120, 20001), [-1e30, 1e30, 0.0]]).astype(np.float32)
    wanted = np.logaddexp(0, x.astype(np.float64))
    found = np.asarray(mosaic_gpu.softplus(jnp.asarray(x)), np.float64)
    normal = wanted > 1.2e-38
    assert (np.abs(found - wanted)[normal] <= 5e-7 * wanted[normal]).all()
    assert (np.abs(found[~normal]) <= 1.2e-38).all()
    count_case()


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    good = dict(heads=128, head_dim=64, state_size=128, groups=8, dtype="bfloat16", state_dtype="float32",
                window_dtype="bfloat16")  # fmt: skip
    assert supported(**good) is None
    for change, word in [
        (dict(heads=4, head_dim=8), "64 channels"),
        (dict(heads=12), "64 channels"),
        (dict(state_size=16), "state size"),
        (dict(state_size=192), "state size"),
        (dict(head_dim=4, heads=2048), "head_dim"),
        (dict(state_dtype="int8"), "state are int8"),
        (dict(window_dtype="float32"), "window"),
    ]:
        assert word in supported(**(good | change)), change


def test_faults_at_once_and_refusals():
    operands, groups = problem(0, (4, 16, 8, 2), 2, "float32")
    bad = list(operands)
    bad[1], bad[5] = bad[1][:, 1:], bad[5][1:]
    with pytest.raises(ValueError) as caught:
        mamba_step(*bad, groups=groups, eps=1e-5, implementation="cuda")
    for part in ("window has shape", "a_log has shape (3,)", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(Unsupported, match="64 channels"):
        mamba_step(*operands, groups=groups, eps=1e-5, implementation="mosaic_gpu")


def test_the_choice(monkeypatch):
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    assert selection.allowed() == selection.AUTO
    assert "needs a GPU" in selection.fault("mamba_step")  # here
    with selection.use("none"):
        assert selection.allowed() == () and "switched off" in selection.fault("mamba_step")
        with selection.use("rms_norm"):
            assert selection.allowed() == ("rms_norm",)
    with selection.use("auto,rms_norm"):
        assert selection.allowed() == selection.AUTO and selection.automatic()
    with selection.use("auto"):
        auto = selection.key()
    with selection.use(" , ".join(selection.AUTO)):
        assert selection.allowed() == selection.AUTO and selection.key() != auto  # named, they are used at any size
    with pytest.raises(ValueError, match="none stands alone"), selection.use("auto,none"):
        pass
    monkeypatch.setenv(selection.VARIABLE, "none")
    assert selection.allowed() == ()
    monkeypatch.setenv(selection.VARIABLE, "mamba,rms_norm")
    with pytest.raises(ValueError, match="PALLAS_KERNELS is 'mamba,rms_norm': no such kernel 'mamba'"):
        selection.allowed()
    with pytest.raises(ValueError, match="kernels is 'all'"), selection.use("all"):
        pass


@pytest.mark.parametrize("rows, setting, reason", [(16, "auto", None), (17, "auto", "pays"), (17, "mamba_step", None)])
def test_large_states_are_left_to_xla(rows, setting, reason):
    state = jax.ShapeDtypeStruct((rows, 128, 64, 128), jnp.float32)
    with traced_for(setting):
        found = declined(state, groups=8, dtype="bfloat16", window_dtype="bfloat16")
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("kind, reason", [("NVIDIA H200", None), ("NVIDIA A100", "Hopper")])
def test_the_device_decides(kind, reason):
    with traced_for("auto", kind):
        found = selection.fault("mamba_step")
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize(
    "setting, batch, steps, norms",
    [
        ("none", 1, 0, False),
        ("mamba_step", 1, 1, False),
        ("rms_norm", 1, 0, True),
        ("auto", 1, 1, True),
        ("auto", 17, 0, True),
        ("mamba_step", 17, 1, False),
    ],
)
def test_a_models_decode_step_for_an_absent_h200(setting, batch, steps, norms, count_case):
    """The Mamba layers share one lowered function, so the program's text has their kernel once."""
    target = targets.absent("h200", 1, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="M-M-", block_configs=config.block_configs and config.block_configs[:4]
    )
    model = NemotronH(config, mesh=target.mesh())
    with selection.use(setting):
        text = step.lower_step(model, batch, 1, 64, target).as_text()
    assert text.count("output_operand_alias<") == 2 * steps  # window and state
    assert (text.count("mosaic_gpu_v2") > steps) == norms
    count_case()


@pytest.mark.parametrize("tensor, data, plan, steps", [(2, 1, "all/psum", 1), (2, 2, "none", 1), (16, 1, "none", 0)])
def test_over_several_devices(tensor, data, plan, steps, count_case):
    """Operands differ over the mesh; with more ranks than groups the norm is not the kernel's."""
    target = targets.absent("h200", tensor * data, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="M-", block_configs=config.block_configs and config.block_configs[:2]
    )
    model = NemotronH(config, mesh=target.mesh(tensor, data), fusion=plan)
    with selection.use("mamba_step"):
        text = step.lower_step(model, data, 1, 64, target).as_text()
    assert text.count("output_operand_alias<") == 2 * steps
    count_case()
