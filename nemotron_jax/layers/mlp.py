"""Dense MLP block ("-"): down(relu(up(x))^2), no gate."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import project, weight
from nemotron_jax.sharding import Axis, cut_rows, row_parallel_bias


class MLP(nnx.Module):
    """Width cut over the tensor axis: up by rows, down by columns, so the output is a summand on each rank."""

    def __init__(self, config: NemotronHConfig, prefix: str, *, axis: Axis, dtype, width: int, bias: bool):
        d = config.hidden_size
        self.up = weight(cut_rows(f"{prefix}up_proj.weight", (width, d), axis), dtype)
        self.down = weight(cut_rows(f"{prefix}down_proj.weight", (d, width), axis, dim=1), dtype)
        self.up_bias = weight(cut_rows(f"{prefix}up_proj.bias", (width,), axis), jnp.float32) if bias else None
        self.down_bias = weight(row_parallel_bias(f"{prefix}down_proj.bias", d, axis), jnp.float32) if bias else None

    def __call__(self, x: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens hidden"]:
        up_bias = None if self.up_bias is None else self.up_bias[...]
        down_bias = None if self.down_bias is None else self.down_bias[...]
        return project(project(x, self.up[...], up_bias, squared=True), self.down[...], down_bias)
