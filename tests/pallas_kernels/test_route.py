"""A router behind its matrix product in one launch: against the plain code in the interpreter, lowered for CUDA, under
transformations, in a model. On a GPU: tests/gpu/route_checks.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nemotron_jax import NemotronH, NemotronHConfig, make_mesh, step, targets
from nemotron_jax.config import PRESETS
from nemotron_jax.layers import router
from pallas_kernels import Unsupported, selection
from pallas_kernels.route import api, declined, mosaic_gpu, reference, route, shapes, supported, typed
from tests.gpu.route_checks import KINDS, compare, problem
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.interpreter import interpreter

NANO = "nemotron-3-nano-30b-a3b"


def released() -> dict[tuple[int, int], str]:
    """(experts, k) of every block of every preset, and one of its presets."""
    found = {}
    for name in PRESETS:
        config = NemotronHConfig.preset(name)
        for i, letter in enumerate(config.hybrid_override_pattern):
            if letter == "E":
                block = config.layer(i)
                assert block.n_group == 1
                found[block.n_routed_experts, block.num_experts_per_tok] = name
    return found


# ------------------------------------------------------------------------------------------------ results
def interpreted(cases, **options):
    """What the kernel gives for each (logits, bias), all of the same shape: it is traced once."""
    with interpreter() as interpret:
        run = jax.jit(lambda *operands: mosaic_gpu.route(*operands, **options, interpret=interpret))
        return [jax.block_until_ready(run(*operands)) for operands in cases]


@pytest.mark.parametrize("experts, k, normalise", [(128, 6, True), (256, 8, False), (512, 22, True)])
def test_kernel_in_the_interpreter(experts, k, normalise, count_case):
    cases = [problem(experts + k, 2, experts, kind) for kind in KINDS]
    options = dict(k=k, normalise=normalise, scale=2.5 if normalise else 1.0)
    plain, meaning = (jax.jit(lambda *o, f=f: f(*o, **options)[:2]) for f in (router.route, reference.route))
    for operands, found in zip(cases, interpreted(cases, **options), strict=True):
        wanted = plain(*operands)
        compare(found, wanted, 1e-6)
        compare(meaning(*operands), wanted, 1e-6)
        count_case()


def test_edges_of_what_is_compared(count_case):
    """Zeros of both signs, NaN of both signs, infinities, the smallest and the largest numbers: `bias` decides alone,
    since a score of 0 leaves it as it is."""
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    values = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, tiny, -tiny, huge, -huge, 1.0, -1.0]
    bias = jnp.asarray(np.resize(np.float32(values), 128))
    logits = jnp.full((1, 128), -jnp.inf)
    wanted = router.route(logits, bias, k=64)[:2]
    (found,) = interpreted([(logits, bias)], k=64, normalise=True, scale=1.0)
    compare(found, wanted, 1e-6)
    assert len(set(np.asarray(found[0])[0].tolist())) == 64
    count_case()


def test_k_of_one_and_a_single_row(count_case):
    logits, bias = problem(1, 1, 128, "normal")
    ((chosen, weights),) = interpreted([(logits, bias)], k=1, normalise=True, scale=1.0)
    assert chosen.tolist() == [[int(jnp.argmax(jax.nn.sigmoid(logits) + bias))]] and weights.tolist() == [[1.0]]
    count_case()


# ------------------------------------------------------------------------------------------------ lowering, types
def test_every_released_router_is_served_and_lowers(count_case):
    found = released()
    assert set(shapes.SHAPES.values()) <= set(found) and {(128, 6), (512, 4), (512, 22)} <= set(found)
    for rows, (experts, k) in zip(itertools.cycle((1, 8)), found):
        assert supported(experts=experts, k=k) is None
        operands = jax.ShapeDtypeStruct((rows, experts), jnp.float32), jax.ShapeDtypeStruct((experts,), jnp.float32)
        run = jax.jit(lambda *o, k=k: route(*o, k=k, implementation="mosaic_gpu"))
        text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1
        count_case()


@pytest.fixture
def kernel_as_reference(monkeypatch):
    """The kernel is replaced, by what has the right values and no gradient of its own; gives how often it ran."""
    ran = []

    def kernel(operands, **options):
        ran.append(options)
        chosen, weights = reference.route(*operands, **options)
        return chosen, jax.lax.stop_gradient(weights)

    monkeypatch.setattr(typed, "route", kernel)
    api._run.clear_cache()
    yield ran
    api._run.clear_cache()  # what was traced here is no kernel


def test_gradient_is_the_references(kernel_as_reference, count_case):
    """The chosen experts are integers: their cotangents are none."""
    logits, bias = problem(2, 3, 128, "normal")

    def loss(implementation, logits, bias):
        chosen, weights = route(logits, bias, k=6, scale=2.5, implementation=implementation)
        return jnp.sum(jnp.sin(weights) * (1 + chosen))

    grads = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    found, wanted = grads("mosaic_gpu", logits, bias), grads("reference", logits, bias)
    assert kernel_as_reference and np.abs(wanted[0]).max() > 0 and not np.asarray(wanted[1]).any()
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    count_case()


@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_vmap_is_the_references(axes, count_case):
    """The kernel itself cannot run here."""
    two = [jnp.stack(pair) for pair in zip(problem(3, 2, 128, "ties"), problem(4, 2, 128, "normal"), strict=True)]
    operands = [x if axis == 0 else x[0] for x, axis in zip(two, axes, strict=True)]

    def call(implementation):
        return jax.vmap(lambda *o: route(*o, k=8, implementation=implementation), axes)

    found, wanted = call("mosaic_gpu")(*operands), call("reference")(*operands)
    for a, b in zip(found, wanted, strict=True):
        assert np.array_equal(a, b) and a.dtype == b.dtype
    count_case()


# ------------------------------------------------------------------------------------------------ choice and faults
def test_what_shapes_the_kernel_serves():
    for change, word in [
        (dict(experts=64), "multiple of 128"),
        (dict(experts=2048), "at most 1024"),
        (dict(k=65), "1 to 64"),
    ]:
        assert word in supported(**(dict(experts=128, k=6) | change))
    with traced_for("auto"):
        assert declined(rows=64, experts=128, k=6) is None
        assert "pays for" in declined(rows=65, experts=128, k=6)
    with traced_for("matvec"):
        assert "switched off" in declined(rows=1, experts=128, k=6)


def test_faults_at_once_and_refusals():
    with pytest.raises(ValueError) as caught:
        route(jnp.zeros((2, 128), jnp.bfloat16), jnp.zeros(64), k=129, implementation="cuda")
    for part in ("logits is bfloat16", "bias is float32(64,)", "k is 129", "implementation is 'cuda'"):
        assert part in str(caught.value)
    with pytest.raises(Unsupported, match="multiple of 128"):
        route(jnp.zeros((2, 64)), jnp.zeros(64), k=2, implementation="mosaic_gpu")


# ------------------------------------------------------------------------------------------------ in the model
def test_the_routers_results_are_the_plain_ones(kernel_as_reference, monkeypatch, count_case):
    """Shapes of tokens, and options that reach the kernel; with groups it is not used."""
    logits, bias = problem(5, 6, 128, "near 64")
    options = dict(k=6, normalise=False, scale=5.0)
    wanted = router.route(logits.reshape(2, 3, 128), bias, **options)
    monkeypatch.setattr(router.kernel, "declined", lambda **_: None)
    found = router.route(logits.reshape(2, 3, 128), bias, **options)
    assert kernel_as_reference == [options]
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)
    router.route(logits, bias, k=6, groups=4, kept_groups=2)
    assert len(kernel_as_reference) == 1
    count_case()


def lowered(setting, batch, tokens=1, tensor=1, data=1):
    target = targets.absent("h200", tensor * data, compile=False)
    config = dataclasses.replace(NemotronHConfig.preset(NANO), hybrid_override_pattern="E*E", block_configs=())
    model = NemotronH(config, mesh=target.mesh(tensor, data), fusion="none")
    with selection.use(setting):
        return step.lower_step(model, batch, tokens, 64, target).as_text()


@pytest.mark.parametrize("batch, tensor, data, more", [(1, 1, 1, 1), (64, 1, 1, 1), (65, 1, 1, 0), (4, 2, 2, 1)])
def test_a_models_decode_step_for_an_absent_h200(batch, tensor, data, more, count_case):
    """The layers share one lowered function, so the program's text has their kernel once. Over several devices its
    operands differ over the mesh."""
    with_it, without = (
        lowered(setting, batch, tensor=tensor, data=data).count("mosaic_gpu_v2") for setting in ("route", "none")
    )
    assert (with_it, without) == (more, 0)
    count_case()


def test_over_a_mesh(count_case):
    """Tokens that differ over the data axis, a bias that does not."""
    mesh, spec = make_mesh(1, 2), jax.sharding.PartitionSpec
    run = jax.shard_map(
        lambda *o: route(*o, k=6, implementation="mosaic_gpu"),
        mesh=mesh,
        in_specs=(spec("data"), spec()),
        out_specs=spec("data"),
    )
    text = jax.jit(run).trace(*problem(6, 4, 128, "normal")).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    count_case()
