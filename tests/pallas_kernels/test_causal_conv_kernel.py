"""The convolution of a Mamba-2 block's prefill: the kernel in the interpreter and lowered for CUDA, the choice, and a
model that uses it and the gated norm. The plain form: tests/test_causal_conv.py. On a GPU:
tests/gpu/mamba_prefill_checks.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import NemotronH, NemotronHConfig, make_mesh, step, targets
from nemotron_jax.cache import MambaCache, Rows
from pallas_kernels import Unsupported, selection
from pallas_kernels.causal_conv import causal_conv, declined, mosaic_gpu, reference, shapes, supported, typed
from pallas_kernels.gated_norm import mosaic_gpu as norm_kernel
from pallas_kernels.gated_norm import typed as norm_typed
from tests import tiny
from tests.gpu.mamba_prefill_checks import compare, conv_problem
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter, races_found


@pytest.mark.parametrize(
    "shape, batch, tokens, dtype, bias",
    [
        ((1024, 1280, 2320), 1, 33, "bfloat16", True),  # 256 channels a block
        ((8, 1152, 1168), 2, 17, "bfloat16", False),  # the last tile begins at token 1
        ((8, 1024, 1032), 2, 18, "bfloat16", True),  # at token 2; 16-byte accesses
        ((5, 150, 168), 2, 37, "bfloat16", True),  # odd channels; the last span is moved back
        ((4, 512, 520), 1, 2, "float16", True),  # fewer tokens than the window has
        ((0, 512, 512), 3, 5, "float32", True),
    ],
)
def test_kernel_in_the_interpreter(shape, batch, tokens, dtype, bias, count_case):
    operands = conv_problem(1, shape, batch, tokens, dtype, bias)
    wanted = reference.causal_conv(*operands, start=shape[0])
    races = batch * tokens < 12
    with interpreter(detect_races=races) as interpret:
        found = jax.block_until_ready(mosaic_gpu.causal_conv(*operands, start=shape[0], interpret=interpret))
        assert not (races and races_found())
    compare(found, wanted)
    count_case()


def types(shape, batch, tokens, dtype="bfloat16"):
    _, channels, columns = shape
    sizes = ((batch, tokens, columns), dtype), ((channels, 1, 4), "float32"), ((channels,), "float32")
    return [jax.ShapeDtypeStruct(*size) for size in (*sizes, ((batch, 3, channels), dtype))]


@pytest.mark.parametrize("tokens", [2, 77, 4096])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_lowers_to_one_launch(name, tokens, count_case):
    shape = shapes.SHAPES[name]
    call = jax.jit(lambda *o: causal_conv(*o, start=shape[0], implementation="mosaic_gpu"))
    text = call.trace(*types(shape, 2, tokens)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.slice" not in text
    count_case()


def test_lowers_on_values_that_differ_over_a_mesh(count_case):
    """Without a window it starts from zeros, which differ over no mesh axis."""
    by_rank = P(None, None, "tensor")
    call = jax.shard_map(
        lambda *o: causal_conv(*o, None, start=1024, implementation="mosaic_gpu"),
        mesh=make_mesh(2),
        in_specs=(by_rank, P("tensor"), P("tensor")),
        out_specs=by_rank,
        check_vma=True,
    )
    operands = types((2048, 2560, 4640), 1, 100)[:3]
    assert "mosaic_gpu_v2" in jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    count_case()


@pytest.mark.parametrize(
    "channels, alignment, vec", [(10240, 64, 8), (9728, 32, 8), (1280, 16, 2), (1216, 4, 2), (150, 1, 1), (9216, 4, 4)]
)
def test_the_cut(channels, alignment, vec):
    how = mosaic_gpu.cut(tokens=4096, channels=channels, alignment=alignment, itemsize=2)
    assert how == mosaic_gpu.Cut(vec, min(32, 128 // vec), 2)
    assert mosaic_gpu.cut(tokens=5, channels=channels, alignment=alignment, itemsize=2) == mosaic_gpu.Cut(vec, 5, 1)


def test_what_shapes_the_kernel_serves():
    good = dict(batch=1, tokens=77, channels=10240, columns=18560, start=8192, taps=4, dtype="bfloat16")
    for start, channels, columns in shapes.SHAPES.values():
        assert supported(**good | dict(start=start, channels=channels, columns=columns)) is None
    for change, word in [
        (dict(dtype="int8"), "activations"),
        (dict(taps=1), "taps"),
        (dict(columns=18564), "16 bytes"),
        (dict(channels=127), "128 channels"),
        (dict(tokens=1), "2 tokens"),
        (dict(batch=0), "2 tokens"),
    ]:
        assert word in supported(**good | change), change


def test_faults_at_once_and_refusals():
    packed, weight, bias, window = conv_problem(0, (8, 64, 80), 2, 5)
    with pytest.raises(ValueError) as caught:
        causal_conv(packed, weight, bias[1:], window[1:], start=17, implementation="cuda")
    for part in ("bias has shape (63,)", "window has shape (1,", "start is 17", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(Unsupported, match="128 channels"):
        causal_conv(packed, weight, bias, window, start=8, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "setting, reason", [("causal_conv", None), ("auto", None), ("grouped_matmul", "switched off"), ("none", "off")]
)
def test_the_choice(setting, reason):
    packed, weight, *_ = types(shapes.SHAPES["nemotron-h-8b"], 1, 4096)
    with traced_for(setting):
        found = declined(packed, weight, start=8192)
    assert found is None if reason is None else reason in found


# ------------------------------------------------------------------------------------------------ in the model
@pytest.mark.parametrize("valid", [None, (20, 9)])
def test_a_block_with_both_kernels_in_the_interpreter(valid, count_case, monkeypatch):
    """Output, window and state beside those of the plain block, with and without pads."""
    model = tiny.model(dtype="bfloat16", mamba_head_dim=8, n_groups=2, ssm_state_size=16, hybrid_override_pattern="M-")
    layer = model.network().layers[0].mixer
    kept = model.cache_shapes(2, 32).tree.layers[0]
    keys = jax.random.split(jax.random.key(0), 3)
    cache = MambaCache(
        jax.random.normal(keys[0], kept.conv.shape, kept.conv.dtype),
        jax.random.normal(keys[1], kept.ssm.shape, kept.ssm.dtype),
    )
    u = jax.random.normal(keys[2], (2, 20, model.config.hidden_size), jnp.bfloat16)
    new = jnp.full(2, 20) if valid is None else jnp.array(valid)
    rows = Rows(jnp.full(2, 3), new, None if valid is None else jnp.arange(20) < new[:, None])
    wanted = layer(u, cache, rows)
    calls = []
    with interpreter() as interpret:

        def run(name, kernel):
            def call(*operands, **options):
                calls.append(name)
                return kernel(*operands, **options, interpret=interpret)

            return call

        kernels = ("causal_conv", "gated_norm")
        monkeypatch.setattr(selection, "fault", lambda name: None if name in kernels else "not here")
        monkeypatch.setattr(typed, "causal_conv", run("causal_conv", mosaic_gpu.causal_conv))
        monkeypatch.setattr(norm_typed, "gated_norm", run("gated_norm", norm_kernel.gated_norm))
        with jax.disable_jit(), selection.use(",".join(kernels)):  # named, they are used at any size
            found = jax.block_until_ready(layer(u, cache, rows))
    assert calls == list(kernels)
    real = np.arange(20) < np.asarray(new)[:, None]
    for a, b in ((found[0][real], wanted[0][real]), (found[1].ssm, wanted[1].ssm)):
        a, b = (np.asarray(v.astype(jnp.float32)) for v in (a, b))
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()
    assert (found[1].conv == wanted[1].conv).all()
    count_case()


@pytest.mark.parametrize(
    "setting, tensor, tokens, kernels",
    [
        ("none", 1, 512, 0),
        ("causal_conv", 1, 512, 1),
        ("gated_norm", 1, 512, 1),
        ("causal_conv,gated_norm", 8, 512, 2),
        ("causal_conv,gated_norm", 1, 1, 0),
        ("causal_conv,gated_norm", 16, 512, 1),  # a norm group spans two ranks
    ],
)
def test_a_models_prefill_for_absent_h200(setting, tensor, tokens, kernels, count_case):
    target = targets.absent("h200", tensor, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="M-", block_configs=config.block_configs and config.block_configs[:2]
    )
    model = NemotronH(config, mesh=target.mesh(tensor), dtype="bfloat16", fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, 1, tokens, 1024, target).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    count_case()
