"""Nemotron-H in float64, written from the equations: no chunks, no caches, one token after the other.

It shares no code with transformers, and judges both transformers (the probes in ``defects.py``) and, stored in a
reference file, the rounding of everybody's bfloat16. For small models: a layer costs T sequential steps.
"""

import torch
import torch.nn.functional as F

from .facts import Facts


def left_padding_to_zero(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else x * mask[..., None]


class Oracle:
    """``tensors`` by hub name without its prefix (``layers.0.mixer.D``); they are widened to float64."""

    def __init__(self, facts: Facts, tensors: dict[str, torch.Tensor]) -> None:
        self.facts = facts
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str, groups: int = 1) -> torch.Tensor:
        grouped = x.unflatten(-1, (groups, -1))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.facts.layer_norm_epsilon)
        return (grouped * scale).flatten(-2) * self.tensors[f"{name}.weight"]

    def mamba(self, u, name, mask):
        """Returns the output, the convolution state (B, channels, K) and the SSM state (B, h, p, n)."""
        f = self.facts
        batch, length, _ = u.shape
        inner, shared = f.mamba_num_heads * f.mamba_head_dim, f.n_groups * f.ssm_state_size
        # A pad must look like the nothing before a sequence: in_proj's bias would otherwise enter the convolution.
        projected = left_padding_to_zero(self.linear(left_padding_to_zero(u, mask), f"{name}.in_proj"), mask)
        gate, channels, dt = projected.split([inner, inner + 2 * shared, f.mamba_num_heads], -1)

        history = F.pad(channels, (0, 0, f.conv_kernel, 0))  # K zeros before the first token
        taps = self.tensors[f"{name}.conv1d.weight"][:, 0]
        mixed = sum(history[:, k + 1 : k + 1 + length] * taps[:, k] for k in range(f.conv_kernel))
        if f.use_conv_bias:
            mixed = mixed + self.tensors[f"{name}.conv1d.bias"]
        x, B, C = left_padding_to_zero(F.silu(mixed), mask).split([inner, shared, shared], -1)

        per_group = f.mamba_num_heads // f.n_groups
        x = x.unflatten(-1, (f.mamba_num_heads, f.mamba_head_dim))
        B = B.unflatten(-1, (f.n_groups, -1)).repeat_interleave(per_group, 2)
        C = C.unflatten(-1, (f.n_groups, -1)).repeat_interleave(per_group, 2)
        step = F.softplus(dt + self.tensors[f"{name}.dt_bias"], threshold=60).clamp(*f.time_step_limit)
        decay = torch.exp(-step * self.tensors[f"{name}.A_log"].exp())
        skip = self.tensors[f"{name}.D"][:, None]
        state = u.new_zeros(batch, f.mamba_num_heads, f.mamba_head_dim, f.ssm_state_size)
        outputs = []
        for t in range(length):
            added = torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], B[:, t])
            state = state * decay[:, t, :, None, None] + added
            outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + skip * x[:, t])
        y = torch.stack(outputs, 1).flatten(-2) * F.silu(gate)
        y = self.linear(self.norm(y, f"{name}.norm", f.n_groups), f"{name}.out_proj")
        return y, history[:, -f.conv_kernel :].transpose(1, 2), state

    def attention(self, x, name, mask):
        f = self.facts
        q, k, v = (self.linear(x, f"{name}.{p}_proj").unflatten(-1, (-1, f.head_dim)).transpose(1, 2) for p in "qkv")
        repeat = f.num_attention_heads // f.num_key_value_heads
        scores = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) / f.head_dim**0.5
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            visible = visible & (mask[:, None, None, :] > 0)
        # Finite, so that the row of a pad (which sees nothing) stays finite too.
        weights = scores.masked_fill(~visible, -1e300).softmax(-1)
        out = weights @ v.repeat_interleave(repeat, 1)
        return self.linear(out.transpose(1, 2).flatten(-2), f"{name}.o_proj")

    def mlp(self, x, name):
        return self.linear(self.linear(x, f"{name}.up_proj").relu().square(), f"{name}.down_proj")

    def moe(self, x, name):
        f = self.facts
        flat = x.flatten(0, -2)
        scores = torch.sigmoid(F.linear(flat, self.tensors[f"{name}.gate.weight"]))
        choice = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
        if f.n_group > 1:
            groups = choice.unflatten(-1, (f.n_group, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(f.topk_group, -1).indices
            allowed = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter_(-1, best, True)
            choice = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        chosen = choice.topk(f.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        if f.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * f.routed_scaling_factor
        inputs = self.linear(flat, f"{name}.fc1_latent_proj") if f.moe_latent_size else flat
        routed = torch.zeros_like(inputs)
        for expert in range(f.n_routed_experts):
            token, slot = torch.where(chosen == expert)
            if len(token):
                routed[token] += weights[token, slot, None] * self.mlp(inputs[token], f"{name}.experts.{expert}")
        if f.moe_latent_size:
            routed = self.linear(routed, f"{name}.fc2_latent_proj")
        return routed.view_as(x) + self.mlp(x, f"{name}.shared_experts")

    def mix(self, kind, x, name, mask):
        return {"*": lambda: self.attention(x, name, mask), "-": lambda: self.mlp(x, name),
                "E": lambda: self.moe(x, name)}[kind]()  # fmt: skip

    def head(self, x):
        return F.linear(x, self.tensors.get("lm_head.weight", self.tensors["embeddings.weight"]))

    @torch.no_grad()
    def __call__(self, ids, mask=None):
        """ids (B, T), mask (B, T) of ones behind zeros -> logits, final norm output, conv states, SSM states."""
        mask = None if mask is None else mask.double()
        x = self.tensors["embeddings.weight"][ids]
        conv, ssm = [], []
        for i, kind in enumerate(self.facts.kinds):
            normed = self.norm(x, f"layers.{i}.norm")
            if kind == "M":
                y, conv_state, ssm_state = self.mamba(normed, f"layers.{i}.mixer", mask)
                conv.append(conv_state)
                ssm.append(ssm_state)
            else:
                y = self.mix(kind, normed, f"layers.{i}.mixer", mask)
            x = x + y
        final = self.norm(x, "norm_f")
        return self.head(final), final, conv, ssm

    @torch.no_grad()
    def mtp(self, ids, final):
        """The first prediction step's draft logits for token t+2, from token t+1 and the final output at t."""
        both = [self.norm(self.tensors["embeddings.weight"][ids[:, 1:]], "mtp.layers.0.enorm"),
                self.norm(final[:, :-1], "mtp.layers.0.hnorm")]  # fmt: skip
        x = self.linear(torch.cat(both, -1), "mtp.layers.0.eh_proj")
        for j, kind in enumerate(self.facts.mtp_kinds):
            x = x + self.mix(kind, self.norm(x, f"mtp.layers.{j}.norm"), f"mtp.layers.{j}.mixer", None)
        return self.head(self.norm(x, f"mtp.layers.{len(self.facts.mtp_kinds) - 1}.final_layernorm"))
