"""The CUDA path's roundings, in plain PyTorch: what the variant ``kernel`` of a bfloat16 reference is made with.

mamba-ssm and causal-conv1d round at other places than transformers' PyTorch code. Time steps, decays, sums, the
convolution with its activation, the gated norm and the SSM state are float32 there; the operands of the matrix
products inside the scan are rounded to the model's dtype, and each result is rounded once. Both ways are valid:
an implementation is judged against float64, beside these two.

The functions have the signatures of those they stand in for.
"""

import contextlib

import torch
import torch.nn.functional as F
from transformers.models.nemotron_h import modeling_nemotron_h as hf

INF = float("inf")


def time_steps(dt, dt_bias, softplus, limit):
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    return (F.softplus(dt) if softplus else dt).clamp(*limit)


def chunk_scan(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
               dt_limit=(0.0, INF), return_final_states=False, **_):  # fmt: skip
    dtype, heads = hidden_states.dtype, hidden_states.shape[2]

    def rounded(x):
        return x.to(dtype).float()

    x = hidden_states.float()
    B, C = (t.float().repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    dt = time_steps(dt, dt_bias, dt_softplus, dt_limit)
    log_decay = dt * A.float()
    batch, length, _, width = x.shape
    state = x.new_zeros(batch, heads, width, B.shape[-1]) if initial_states is None else initial_states.float()
    outputs = []
    for start in range(0, length, chunk_size):
        part = slice(start, min(start + chunk_size, length))
        xs, Bs, Cs, dts = x[:, part], B[:, part], C[:, part], dt[:, part]
        total = log_decay[:, part].cumsum(1)  # (b, l, h): decay from the chunk's start, in the logarithm
        past = torch.einsum("blhn,bhpn->blhp", Cs, rounded(state)) * total.exp()[..., None]
        between = (total[:, :, None] - total[:, None]).clamp(max=0).exp()  # (b, l, s, h)
        causal = torch.ones(between.shape[1:3], dtype=torch.bool, device=x.device).tril()[..., None]
        scores = torch.einsum("blhn,bshn->blsh", Cs, Bs) * between * dts[:, None]
        now = torch.einsum("blsh,bshp->blhp", rounded(scores.masked_fill(~causal, 0)), xs)
        outputs.append(past + now)
        arriving = rounded(Bs * ((total[:, -1:] - total).clamp(max=0).exp() * dts)[..., None])
        state = state * total[:, -1].exp()[..., None, None] + torch.einsum("blhp,blhn->bhpn", xs, arriving)
    y = torch.cat(outputs, 1)
    if D is not None:
        y = y + x * D.float()[:, None]
    return (y.to(dtype), state) if return_final_states else y.to(dtype)


def state_update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None,
                 dt_limit=(0.0, INF), **_):  # fmt: skip
    x, heads = hidden_states.float(), hidden_states.shape[1]
    B, C = (t.float().repeat_interleave(heads // t.shape[1], 1)[:, :, None] for t in (B, C))
    dt = time_steps(dt, dt_bias, dt_softplus, dt_limit)[..., None]
    new = state.float() * torch.exp(dt * A.float()) + dt * B * x[..., None]
    state.copy_(new)
    y = (new * C).sum(-1)
    if D is not None:
        y = y + x * D.float()
    return y.to(hidden_states.dtype)


def _convolve(x, weight, bias):
    bias = None if bias is None else bias.float()
    return F.silu(F.conv1d(x.float(), weight.float()[:, None], bias, groups=x.shape[1]))


def conv1d(hidden_states, weight, bias=None, activation=None, **_):
    padded = F.pad(hidden_states, (weight.shape[-1] - 1, 0))
    return _convolve(padded, weight, bias).to(hidden_states.dtype)


def conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None, **_):
    joined = torch.cat([conv_state, hidden_states], -1)
    conv_state.copy_(joined[..., -conv_state.shape[-1] :])
    return _convolve(joined, weight, bias)[..., -hidden_states.shape[-1] :].to(hidden_states.dtype)


def gated_norm(self, hidden_states, gate=None):
    x = hidden_states.float()
    if gate is not None:
        x = x * F.silu(gate.float())
    grouped = x.unflatten(-1, (-1, self.group_size))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return (grouped.flatten(-2) * self.weight.float()).to(hidden_states.dtype)


@contextlib.contextmanager
def cuda_rounding(limit: tuple[float, float]):
    """Mamba blocks round as the CUDA kernels do, and clamp time steps to ``limit``, within this context."""
    stand_ins = {
        (hf, "mamba2_chunk_scan"): lambda *a, **kw: chunk_scan(*a, **{**kw, "dt_limit": limit}),
        (hf, "mamba2_selective_state_update"): lambda *a, **kw: state_update(*a, **{**kw, "dt_limit": limit}),
        (hf, "causal_conv1d_fn"): conv1d,
        (hf, "causal_conv1d_update"): conv1d_update,
        (hf.NemotronHRMSNormGated, "forward"): gated_norm,
    }
    originals = {where: getattr(*where) for where in stand_ins}
    try:
        for (owner, name), function in stand_ins.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)
