"""Problems and oracles shared by every test of allreduce_rms_norm."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# unit roundoff: half the distance from 1 to the next number
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    partial: np.ndarray  # [world, tokens, hidden]
    residual: np.ndarray  # [tokens, hidden]
    weight: np.ndarray  # [hidden]
    unit_offset: bool = False

    @property
    def world(self) -> int:
        return self.partial.shape[0]

    def total_float32(self) -> np.ndarray:
        """Partials in rank order, then the residual, all in float32: exact implementations round precisely this."""
        with np.errstate(all="ignore"):
            total = self.partial[0].astype(np.float32)
            for rank in range(1, self.world):
                total = total + self.partial[rank].astype(np.float32)
            return self.residual.astype(np.float32) + total

    def new_residual(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.total_float32().astype(self.residual.dtype)

    def normed_float64(self) -> np.ndarray:
        """RMSNorm in float64 of the residual as it is stored."""
        y = self.new_residual().astype(np.float64)
        weight = self.weight.astype(np.float64) + (1.0 if self.unit_offset else 0.0)
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight


def problem(
    seed, world, tokens, hidden, *, dtype="bfloat16", residual="bfloat16", weight="bfloat16", unit_offset=False
):
    rng = np.random.default_rng(seed)
    return Problem(
        rng.normal(size=(world, tokens, hidden)).astype(NUMPY[dtype]),
        rng.normal(size=(tokens, hidden)).astype(NUMPY[residual]),
        (rng.normal(size=hidden) * 0.3 + (0.0 if unit_offset else 1.0)).astype(NUMPY[weight]),
        unit_offset,
    )


def mesh(world, axis="tensor"):
    return jax.sharding.Mesh(np.array(jax.devices()[:world]), (axis,))


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def check(case: Problem, normed, new_residual, *, exact=True, out_dtype=None):
    """Compare per-device results [world, tokens, hidden] with the oracles, and the devices with each other."""
    out_dtype = out_dtype or case.partial.dtype.name
    normed, new_residual = np.asarray(normed), np.asarray(new_residual)
    assert normed.shape == new_residual.shape == case.partial.shape
    assert normed.dtype.name == out_dtype and new_residual.dtype == case.residual.dtype
    for rank in range(1, case.world):
        assert (bits(normed[rank]) == bits(normed[0])).all(), f"normed differs between ranks 0 and {rank}"
        assert (bits(new_residual[rank]) == bits(new_residual[0])).all(), f"residual differs between ranks 0 and {rank}"
    got, want = new_residual[0].astype(np.float64), case.total_float32().astype(np.float64)
    roundoff = ROUNDOFF[case.residual.dtype.name]
    if exact:
        assert (bits(new_residual[0]) == bits(case.new_residual())).all(), "new_residual is not rounded once"
    else:  # each addition of psum may round in the partial's dtype
        slack = np.abs(case.partial.astype(np.float64)).sum(0) * case.world * ROUNDOFF[case.partial.dtype.name]
        assert (np.abs(got - want) <= slack + np.abs(want) * roundoff * 1.01 + 1e-6).all()
    if exact and normed.size:
        want = case.normed_float64()
        # 1e-6: rsqrt and the order of the sum of squares in float32; then one cast
        bound = np.abs(want) * (ROUNDOFF[out_dtype] * 1.01 + 1e-6) + (2.0**-24 if out_dtype == "float16" else 1e-30)
        error = np.abs(normed[0].astype(np.float64) - want)
        assert (error <= bound).all(), f"normed: worst error {np.max(error / bound)} times the bound"


def run(case: Problem, function, *, jit=True, check_vma=True):
    """Run `function(partial, residual, weight)` under shard_map; returns numpy results of every device."""
    spec = jax.sharding.PartitionSpec

    def body(partial, residual, weight):
        outs = function(partial[0], residual, weight)
        return tuple(jax.lax.pcast(out, "tensor", to="varying")[None] if check_vma else out[None] for out in outs)

    mapped = jax.shard_map(
        body,
        mesh=mesh(case.world),
        in_specs=(spec("tensor"), spec(), spec()),
        out_specs=spec("tensor"),
        check_vma=check_vma,
    )
    outs = (jax.jit(mapped) if jit else mapped)(*map(jnp.asarray, (case.partial, case.residual, case.weight)))
    return tuple(np.asarray(out) for out in outs)
