"""Many tokens of a Mamba-2 block's state space: reference and fast form against float64, their memory, the kernel in
the interpreter and lowered for CUDA, the choice between them. On a GPU: tests/gpu/prefill_kernel_checks.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nemotron_jax import NemotronH, NemotronHConfig, make_mesh, step, targets
from pallas_kernels import Unsupported, selection
from pallas_kernels.chunk_scan import api, chunk_scan, declined, mosaic_gpu, reference, shapes, supported
from tests.pallas_kernels.absent import traced_for
from tests.pallas_kernels.chunk_scan_cases import error, float64, problem, types
from tests.pallas_kernels.interpreter import interpreter, races_found

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
    with pytest.raises(Unsupported, match="the kernel needs bfloat16"):
        chunk_scan(xbc, dt, a, d, groups=2, head_dim=16, chunk=8, implementation="mosaic_gpu")


# ------------------------------------------------------------------------------------------------ the kernel
INTERPRETED = [  # shape, batch, tokens, segments, whether races are looked for
    ((2, 64, 128, 1), 2, 330, 3, False),
    ((2, 80, 128, 1), 1, 150, 1, True),
    ((1, 64, 256, 1), 1, 100, 1, False),
    ((4, 64, 64, 2), 1, 5, 1, False),
    pytest.param((1, 64, 128, 1), 1, 515, 2, True, marks=pytest.mark.full),
    pytest.param((4, 64, 64, 2), 2, 400, 1, True, marks=pytest.mark.full),
    pytest.param((3, 80, 64, 3), 1, 321, 4, True, marks=pytest.mark.full),
]


@pytest.mark.parametrize("shape, batch, tokens, segments, races", INTERPRETED)
def test_kernel_in_the_interpreter(shape, batch, tokens, segments, races, count_case):
    heads, p, e, groups = shape
    operands = problem(3, shape, batch, tokens)
    how = mosaic_gpu.cut(batch=batch, tokens=tokens, heads=heads, head_dim=p, state_size=e, groups=groups)
    how = dataclasses.replace(how, segments=segments, chunks=-(-tokens // (segments * mosaic_gpu.CHUNK)))
    with interpreter(detect_races=races) as interpret:
        found = mosaic_gpu.chunk_scan(*operands, groups=groups, how=how, interpret=interpret)
        found = [np.asarray(v) for v in found]
        assert not (races and races_found())
    wanted = reference.chunk_scan(*operands, groups=groups, chunk=mosaic_gpu.CHUNK)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and error(a, b) <= BOUND["xla"]
    count_case()


def lowered(shape, batch, tokens):
    @jax.jit
    def call(*operands):
        return chunk_scan(*operands, groups=shape[3], head_dim=shape[1], chunk=128, implementation="mosaic_gpu")

    return call.trace(*types(shape, batch, tokens)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "name, batch, tokens", [(name, *((1, 8192), (3, 77))[i % 2]) for i, name in enumerate(shapes.SHAPES)]
)
def test_lowers_to_one_or_two_launches(name, batch, tokens, count_case):
    heads, p, e, groups = shapes.SHAPES[name]
    how = mosaic_gpu.cut(batch=batch, tokens=tokens, heads=heads, head_dim=p, state_size=e, groups=groups)
    assert lowered(shapes.SHAPES[name], batch, tokens).count("mosaic_gpu_v2") == (2 if how.segments > 1 else 1)
    count_case()


def test_lowers_on_values_that_differ_over_a_mesh(count_case):
    """Each device has a group of its own; check_vma=True refuses results of another type."""
    shape = shapes.SHAPES["nemotron-h-8b, 8 ranks"]
    xbc, dt, a, d, state = types(shape, 1, 100)
    by_rank = [P(None, None, "tensor"), P(None, None, "tensor"), P("tensor"), P("tensor"), P(None, "tensor")]
    call = jax.shard_map(
        lambda *o: chunk_scan(*o, groups=1, head_dim=shape[1], chunk=128, implementation="mosaic_gpu"),
        mesh=make_mesh(2),
        in_specs=tuple(by_rank),
        out_specs=(P(None, None, "tensor"), P(None, "tensor")),
        check_vma=True,
    )

    def both(v, axis):
        return jax.ShapeDtypeStruct(tuple(n * (1 + (i == axis)) for i, n in enumerate(v.shape)), v.dtype)

    operands = [both(v, axis) for v, axis in zip((xbc, dt, a, d, state), (2, 2, 0, 0, 1), strict=True)]
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text
    count_case()


@pytest.mark.parametrize("tokens", [1, 64, 65, 2048, 8192, 32768])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_the_cut_covers_all_and_fits(name, tokens):
    heads, p, e, groups = shapes.SHAPES[name]
    how = mosaic_gpu.cut(batch=1, tokens=tokens, heads=heads, head_dim=p, state_size=e, groups=groups)
    assert (how.segments - 1) * how.chunks * 64 < tokens <= how.segments * how.chunks * 64
    assert p % how.width == 0 and (heads // groups * p) % (how.width * how.warpgroups) == 0
    assert 2 * how.width % how.swizzle == 0
    a_warpgroup = 64 * how.width * (4 + 2 * how.stages) + 2 * e * how.width + 512 * how.stages
    assert how.warpgroups * a_warpgroup + how.stages * 4 * 64 * e <= mosaic_gpu.SHARED_BYTES
    assert how.width * e <= 128 * 80  # registers of a thread that hold the state


# ------------------------------------------------------------------------------------------------ the choice
def test_what_shapes_the_kernel_serves():
    good = dict(heads=128, head_dim=64, state_size=128, groups=8, dtype="bfloat16")
    for name in shapes.SHAPES:
        sizes = dict(zip(("heads", "head_dim", "state_size", "groups"), shapes.SHAPES[name], strict=True))
        assert supported(**good | sizes) is None
    for change, word in [
        (dict(dtype="float32"), "bfloat16"),
        (dict(head_dim=16), "head_dim"),
        (dict(state_size=96), "state size"),
        (dict(state_size=256, head_dim=80), "state size"),
        (dict(heads=12), "equal size"),
    ]:
        assert word in supported(**good | change), change


@pytest.mark.parametrize(
    "kind, setting, tokens, reason",
    [
        ("NVIDIA H200", "chunk_scan", 9, None),
        ("NVIDIA H200", "chunk_scan", 0, "no token"),
        ("NVIDIA H200", "auto", 9, None),
        ("NVIDIA H200", "rms_norm", 9, "switched off"),
        ("NVIDIA A100", "chunk_scan", 9, "Hopper"),
    ],
)
def test_the_choice(kind, setting, tokens, reason):
    with traced_for(setting, kind):
        found = declined(
            batch=1, tokens=tokens, heads=128, head_dim=64, state_size=128, groups=8, dtype=jnp.dtype("bfloat16")
        )
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("tensor, setting, kernels", [(1, "none", 0), (1, "chunk_scan", 1), (8, "chunk_scan", 1)])
def test_a_models_prefill_for_absent_h200(tensor, setting, kernels, count_case):
    target = targets.absent("h200", tensor, compile=False)
    config = NemotronHConfig.preset("nemotron-h-8b")
    config = dataclasses.replace(
        config, hybrid_override_pattern="M-", block_configs=config.block_configs and config.block_configs[:2]
    )
    model = NemotronH(config, mesh=target.mesh(tensor), fusion="none")
    with selection.use(setting):
        text = step.lower_step(model, 1, 512, 1024, target).as_text()
    assert ("mosaic_gpu_v2" in text) == bool(kernels)
    count_case()
