"""Mamba-2 block ("M"): causal convolution, selective state space with scalar decay per head, gated grouped RMSNorm.

Letters (glossary in model.py): b batch, t tokens, m heads, p head_dim, g groups, r heads of a group, e state size.
State of a head: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, output y_t = S_t C_t + D x_t. Many tokens go through
pallas_kernels/chunk_scan, and what is around it through pallas_kernels/causal_conv and gated_norm.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from nemotron_jax.cache import MambaCache, Rows
from nemotron_jax.config import NemotronHConfig
from nemotron_jax.layers.linear import project, weight
from nemotron_jax.sharding import Axis, Layout, Section, cut_rows, rank, row_parallel_bias, sum_over
from pallas_kernels import causal_conv as convolution
from pallas_kernels import gated_norm, mamba_step
from pallas_kernels.chunk_scan import chunk_scan


class Mamba(nnx.Module):
    """Heads and B/C groups cut over the tensor axis, section by section; out_proj leaves a summand on each rank.

    With fewer groups than ranks, neighbouring ranks hold the same group's B and C, and one norm group spans them.
    """

    def __init__(self, config: NemotronHConfig, prefix: str, *, axis: Axis, dtype):
        d, inner, heads = config.hidden_size, config.inner_size, config.mamba_num_heads
        groups, bc = config.n_groups, config.n_groups * config.ssm_state_size
        tp, bc_parts = axis.size, min(config.n_groups, axis.size)

        def in_proj(leaf: str, tail: tuple[int, ...]) -> Layout:
            name = f"{prefix}in_proj.{leaf}"
            sections = (
                Section(name, inner, 0, tp, "z"),
                Section(name, inner, inner, tp, "x"),
                Section(name, bc, 2 * inner, bc_parts, "B"),
                Section(name, bc, 2 * inner + bc, bc_parts, "C"),
                Section(name, heads, 2 * (inner + bc), tp, "dt"),
            )
            return Layout((2 * inner + 2 * bc + heads, *tail), 0, sections, tp)

        def conv1d(leaf: str, tail: tuple[int, ...]) -> Layout:
            name = f"{prefix}conv1d.{leaf}"
            sections = (
                Section(name, inner, 0, tp, "x"),
                Section(name, bc, inner, bc_parts, "B"),
                Section(name, bc, inner + bc, bc_parts, "C"),
            )
            return Layout((inner + 2 * bc, *tail), 0, sections, tp)

        self.axis = axis
        self.heads, self.head_dim, self.state = heads // tp, config.mamba_head_dim, config.ssm_state_size
        self.groups = groups // bc_parts
        self.norm_group = inner // groups  # channels of a norm group over all its ranks
        self.ranks_per_group = max(1, tp // groups)
        self.all_groups = groups
        self.chunk_size, self.time_step_limit, self.eps = (
            config.chunk_size,
            config.time_step_limit,
            config.layer_norm_epsilon,
        )

        self.in_proj = weight(in_proj("weight", (d,)), dtype)
        self.in_bias = weight(in_proj("bias", ()), jnp.float32) if config.use_bias else None
        self.conv = weight(conv1d("weight", (1, config.conv_kernel)), jnp.float32)
        self.conv_bias = weight(conv1d("bias", ()), jnp.float32) if config.use_conv_bias else None
        self.A_log = weight(cut_rows(f"{prefix}A_log", (heads,), axis), jnp.float32)
        self.D = weight(cut_rows(f"{prefix}D", (heads,), axis), jnp.float32)
        self.dt_bias = weight(cut_rows(f"{prefix}dt_bias", (heads,), axis), jnp.float32)
        self.norm = weight(cut_rows(f"{prefix}norm.weight", (inner,), axis), jnp.float32)
        self.out = weight(cut_rows(f"{prefix}out_proj.weight", (d, inner), axis, dim=1), dtype)
        self.out_bias = (
            weight(row_parallel_bias(f"{prefix}out_proj.bias", d, axis), jnp.float32) if config.use_bias else None
        )

    def __call__(
        self, u: Float[Array, "batch tokens hidden"], cache: MambaCache | None, rows: Rows
    ) -> tuple[Float[Array, "batch tokens hidden"], MambaCache]:
        b, t, _ = u.shape
        m, p, g, e = self.heads, self.head_dim, self.groups, self.state
        inner = m * p
        zxbcdt = project(u, self.in_proj[...], None if self.in_bias is None else self.in_bias[...])
        if t == 1 and cache is not None and self.kernel_fault(u.dtype, cache) is None:
            return self.one_token(zxbcdt[:, 0], cache, rows)
        window = None if cache is None else cache.conv
        with jax.named_scope("conv"):
            conv_bias = None if self.conv_bias is None else self.conv_bias[...]
            xbc, conv = causal_conv(zxbcdt, self.conv[...], conv_bias, window, rows, start=inner)
        dt = self.time_step(zxbcdt[..., 2 * inner + 2 * g * e :], rows)
        a, d = -jnp.exp(self.A_log[...]), self.D[...]
        state = None if cache is None else cache.ssm
        with jax.named_scope("ssm"):
            if t != 1 and not rows.every:
                y, state = chunk_scan(xbc, dt, a, d, state, groups=g, head_dim=p, chunk=self.chunk_size)
            else:
                x, b_in, c_in = jnp.split(xbc, (inner, inner + g * e), axis=-1)
                x, b_in, c_in = x.reshape(b, t, g, m // g, p), b_in.reshape(b, t, g, e), c_in.reshape(b, t, g, e)
                dt, a, d = dt.reshape(b, t, g, m // g), a.reshape(g, m // g), d.reshape(g, m // g)
                state = None if state is None else state.reshape(b, g, m // g, p, e)
                one_by_one = every_step if rows.every else step
                y, state = one_by_one(x, dt, a, b_in, c_in, d, state)
        with jax.named_scope("gated_norm"):
            y = self.gated_norm(y.reshape(b, t, inner), zxbcdt)
        dtype = jnp.float32 if cache is None else cache.ssm.dtype
        behind = (b, t) if rows.every else (b,)
        new = MambaCache(conv, state.reshape(*behind, m, p, e).astype(dtype))
        return project(y, self.out[...], None if self.out_bias is None else self.out_bias[...]), new

    def kernel_fault(self, dtype, cache: MambaCache) -> str | None:
        """Why a decode step does not run as one kernel in the program being traced, or None."""
        if self.ranks_per_group > 1:
            return "a norm group spans several ranks"
        return mamba_step.declined(cache.ssm, groups=self.groups, dtype=dtype, window_dtype=cache.conv.dtype)

    def one_token(
        self, zxbcdt: Float[Array, "batch packed"], cache: MambaCache, rows: Rows
    ) -> tuple[Float[Array, "batch 1 hidden"], MambaCache]:
        """What is between the projections, and the output projection, of one new token per row."""
        with jax.named_scope("step"):
            y, conv, ssm = mamba_step.mamba_step(
                zxbcdt,
                cache.conv,
                cache.ssm,
                self.conv[...],
                None if self.conv_bias is None else self.conv_bias[...],
                self.A_log[...],
                self.D[...],
                self.dt_bias[...],
                self.norm[...],
                None if rows.valid is None else rows.new,
                groups=self.groups,
                eps=self.eps,
                time_step_limit=self.time_step_limit,
            )
        out_bias = None if self.out_bias is None else self.out_bias[...]
        return project(y[:, None], self.out[...], out_bias), MambaCache(conv, ssm)

    def time_step(self, dt: Float[Array, "batch tokens heads"], rows: Rows) -> Float[Array, "batch tokens heads"]:
        """softplus(dt + dt_bias) clamped to time_step_limit, in float32; 0 at pads, so that they leave the state as
        it is.
        """
        low, high = self.time_step_limit
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
        dt = jnp.maximum(dt, low) if high == float("inf") else jnp.clip(dt, low, high)
        return dt if rows.valid is None else jnp.where(rows.valid[..., None], dt, 0.0)

    def gated_norm(
        self, y: Float[Array, "batch tokens inner"], zxbcdt: Float[Array, "batch tokens packed"]
    ) -> Float[Array, "batch tokens inner"]:
        """RMSNorm over each group of y * silu(z), times the weight; in float32, returned in the dtype of zxbcdt."""
        if self.ranks_per_group == 1:
            which = None if y.shape[1] > 1 else "reference"
            return gated_norm.gated_norm(
                y, zxbcdt, self.norm[...], groups=self.groups, eps=self.eps, implementation=which
            )
        y = y.astype(jnp.float32) * jax.nn.silu(zxbcdt[..., : y.shape[-1]].astype(jnp.float32))
        # My part of the group's sum goes into that group's place; then every rank takes its own.
        mine = rank(self.axis) // self.ranks_per_group
        place = jax.nn.one_hot(mine, self.all_groups, dtype=jnp.float32)
        squares = sum_over(jnp.sum(jnp.square(y), -1, keepdims=True) * place, self.axis)
        squares = lax.dynamic_slice_in_dim(squares, mine, 1, axis=-1)
        return (y * lax.rsqrt(squares / self.norm_group + self.eps) * self.norm[...]).astype(zxbcdt.dtype)


def causal_conv(
    packed: jax.Array, w: jax.Array, bias: jax.Array | None, window: jax.Array | None, rows: Rows, *, start: int = 0
) -> tuple[jax.Array, jax.Array]:
    """silu(depthwise causal convolution), accumulated in float32; the last tap multiplies the current token.

    Args:
      packed: [batch, tokens, columns]; the raw inputs are its columns from ``start`` on.
      w: [channels, 1, kernel].
      window: [batch, kernel - 1, channels] raw inputs before them (None: zeros).

    Returns:
      ([batch, tokens, channels] in the dtype of packed, the window behind the last real token of each row; with
      ``rows.every`` [batch, tokens, kernel - 1, channels], behind each token).
    """
    b, t, _ = packed.shape
    channels, _, kernel = w.shape
    which = None if t > 1 and not rows.every else "reference"
    y = convolution.causal_conv(packed, w, bias, window, start=start, implementation=which)
    x = packed[..., start : start + channels]
    if window is None:
        window = jnp.zeros((b, kernel - 1, channels), x.dtype)
    window = window.astype(x.dtype)
    past = kernel - 1
    if rows.every:
        inputs = jnp.concatenate([window, x], 1)
        window = jnp.stack([inputs[:, i + 1 : i + kernel] for i in range(t)], axis=1)
    elif rows.valid is None:
        window = x[:, t - past :] if t >= past else jnp.concatenate([window[:, t:], x], 1)
    else:
        window = last(jnp.concatenate([window, x[:, :past]], 1), rows.new, past)
        if t > past:  # rows of many new tokens have nothing of the old window
            window = jnp.where((rows.new > past)[:, None, None], last(x, rows.new - past, past), window)
    return y, window


def last(inputs: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """``count`` tokens of each row from ``start`` [batch] on."""
    index = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    return jnp.take_along_axis(inputs, index[..., None], axis=1)


def step(x, dt, a, b_in, c_in, d, state):
    """One token of the recurrence, in float32.

    Args:
      x: [b, 1, g, r, p]; dt: [b, 1, g, r] (0: the row stands still); a, d: [g, r]; b_in, c_in: [b, 1, g, e].
      state: [b, g, r, p, e] or None (zeros).

    Returns:
      (y [b, 1, g, r, p] float32, state float32).
    """
    x, dt, b_in, c_in = (
        x[:, 0].astype(jnp.float32),
        dt[:, 0],
        b_in[:, 0].astype(jnp.float32),
        c_in[:, 0].astype(jnp.float32),
    )
    new = (dt[..., None] * x)[..., None] * b_in[:, :, None, None, :]
    if state is not None:
        new = state.astype(jnp.float32) * jnp.exp(dt * a)[..., None, None] + new
    y = jnp.sum(new * c_in[:, :, None, None, :], -1) + d[..., None] * x
    return y[:, None], new


def every_step(x, dt, a, b_in, c_in, d, state):
    """A few tokens one by one, by :func:`step`, with the state behind each of them.

    Returns:
      (y [b, t, g, r, p] float32, states [b, t, g, r, p, e] float32).
    """
    found, states = [], []
    for i in range(x.shape[1]):
        here = slice(i, i + 1)
        y, state = step(x[:, here], dt[:, here], a, b_in[:, here], c_in[:, here], d, state)
        found.append(y)
        states.append(state)
    return jnp.concatenate(found, axis=1), jnp.stack(states, axis=1)
