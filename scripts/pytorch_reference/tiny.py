"""Tiny checkpoints with random weights in Hugging Face layout. Needs NumPy and safetensors only.

The weights are drawn so that nothing hides a fault: every bias, norm, D, A and router bias is far from its usual
initial value, and the time steps of the Mamba heads reach far below ``time_step_min``, as in trained models.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from .facts import Facts

BASE = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "torch_dtype": "float32",
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False,
    "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "mlp_bias": False,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "residual_in_fp32": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
}  # fmt: skip

# What the live comparison runs: each covers what the others leave out.
CONFIGS = {
    "dense_g8_plain": dict(hybrid_override_pattern="M-M*-M-", n_groups=8, mamba_num_heads=16, num_attention_heads=8,
                           use_conv_bias=False),
    "dense_bias_tied": dict(hybrid_override_pattern="M-*M-", use_bias=True, mlp_bias=True, tie_word_embeddings=True,
                            time_step_limit=[0.01, 0.2]),
    "mamba_heavy_conv3": dict(hybrid_override_pattern="MMM-MM*M", n_groups=4, conv_kernel=3, chunk_size=5,
                              time_step_limit=[0.0, 1e308]),
    "moe_latent": dict(layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"],
                       n_groups=8, mamba_num_heads=16, num_attention_heads=8, n_routed_experts=16,
                       num_experts_per_tok=4, moe_latent_size=24, routed_scaling_factor=5.0),
}  # fmt: skip


def shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint and its shape, under the names of the hub."""
    f, out = facts, {}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = (rows, columns)
        if bias:
            out[f"{name}.bias"] = (rows,)

    hidden, inner = f.hidden_size, f.mamba_num_heads * f.mamba_head_dim
    conv = inner + 2 * f.n_groups * f.ssm_state_size
    linear("backbone.embeddings", f.vocab_size, hidden)
    for i, kind in enumerate(f.kinds):
        out[f"backbone.layers.{i}.norm.weight"] = (hidden,)
        p = f"backbone.layers.{i}.mixer."
        if kind == "M":
            linear(p + "in_proj", inner + conv + f.mamba_num_heads, hidden, f.use_bias)
            linear(p + "out_proj", hidden, inner, f.use_bias)
            out[p + "conv1d.weight"] = (conv, 1, f.conv_kernel)
            if f.use_conv_bias:
                out[p + "conv1d.bias"] = (conv,)
            out.update({p + name: (f.mamba_num_heads,) for name in ("A_log", "D", "dt_bias")})
            out[p + "norm.weight"] = (inner,)
        elif kind == "*":
            linear(p + "q_proj", f.num_attention_heads * f.head_dim, hidden)
            linear(p + "k_proj", f.num_key_value_heads * f.head_dim, hidden)
            linear(p + "v_proj", f.num_key_value_heads * f.head_dim, hidden)
            linear(p + "o_proj", hidden, f.num_attention_heads * f.head_dim)
        elif kind == "-":
            linear(p + "up_proj", f.intermediate_size, hidden, f.mlp_bias)
            linear(p + "down_proj", hidden, f.intermediate_size, f.mlp_bias)
        else:
            width = f.moe_latent_size or hidden
            linear(p + "gate", f.n_routed_experts, hidden)
            out[p + "gate.e_score_correction_bias"] = (f.n_routed_experts,)
            for e in range(f.n_routed_experts):
                linear(f"{p}experts.{e}.up_proj", f.moe_intermediate_size, width)
                linear(f"{p}experts.{e}.down_proj", width, f.moe_intermediate_size)
            linear(p + "shared_experts.up_proj", f.moe_shared_expert_intermediate_size, hidden, f.mlp_bias)
            linear(p + "shared_experts.down_proj", hidden, f.moe_shared_expert_intermediate_size, f.mlp_bias)
            if f.moe_latent_size:
                linear(p + "fc1_latent_proj", width, hidden, f.mlp_bias)
                linear(p + "fc2_latent_proj", hidden, width, f.mlp_bias)
    out["backbone.norm_f.weight"] = (hidden,)
    if not f.tie_word_embeddings:
        linear("lm_head", f.vocab_size, hidden)
    return out


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A float32 value for the tensor ``name``; each name has its own random stream."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        value = np.log(rng.uniform(0.5, 16.0, shape))
    elif leaf == "dt_bias":  # the inverse of softplus, of time steps spread evenly in the logarithm
        step = np.exp(rng.uniform(np.log(1e-5), np.log(0.5), shape))
        value = step + np.log(-np.expm1(-step))
    elif leaf == "D":
        value = 1 + 0.5 * normal
    elif leaf == "e_score_correction_bias":
        value = 0.2 * normal
    elif leaf == "bias":
        value = 0.25 * normal
    elif ".norm" in f".{name}" and leaf == "weight" and len(shape) == 1:
        value = np.clip(1 + 0.3 * normal, 0.2, 2.5)
    elif name.endswith(("embeddings.weight", "conv1d.weight")):
        value = 0.5 * normal
    else:  # matrices; a head with gain 2 spreads the logits enough to make greedy choices clear
        value = normal * (2.0 if name.startswith("lm_head") else 1.0) / np.sqrt(shape[-1])
    return value.astype(np.float32)


def write(folder: str | Path, config: dict, seed: int) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` for BASE updated with ``config``; returns the folder."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **config}
    if "hybrid_override_pattern" in config:
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
    tensors = {name: draw(name, shape, seed) for name, shape in shapes(Facts.read(config)).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
