"""Reads a Nemotron-H ``config.json`` on its own account, so that what transformers made of it can be checked."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}

# field -> other spellings, in the order of preference; the field itself comes first
ALIASES = {
    "head_dim": ("attention_head_dim",),
    "layer_norm_epsilon": ("norm_eps", "rms_norm_eps"),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "chunk_size": ("mamba_chunk_size",),
    "use_conv_bias": ("mamba_conv_bias",),
    "time_step_limit": ("mamba_dt_limit",),
}


def letters(spec: str | list[str]) -> str:
    """One of ``M * - E`` for each layer, from a pattern string or a list of names."""
    if isinstance(spec, str):
        return "".join(c for c in spec if c in "M*-E")
    return "".join(LETTERS[name] for name in spec)


def limit_value(value) -> float:
    """A bound of time_step_limit: JSON's Infinity, transformers' tagged one, and 1e308 all mean infinity."""
    value = float(value["__float__"] if isinstance(value, dict) else value)
    return math.inf if value > 3e38 else value


@dataclass(frozen=True)
class Facts:
    """The fields that decide what a model computes, under the names of ``config.json``."""

    kinds: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    ssm_state_size: int = 0
    n_groups: int = 1
    conv_kernel: int = 4
    chunk_size: int = 128
    use_conv_bias: bool = True
    use_bias: bool = False
    mlp_bias: bool = False
    intermediate_size: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = False
    num_nextn_predict_layers: int = 0
    mtp_kinds: str = ""

    @classmethod
    def read(cls, config: dict) -> "Facts":
        config = config.get("llm_config") or config.get("text_config") or config
        found = {}
        for field in fields(cls):
            for name in (field.name, *ALIASES.get(field.name, ())):
                if config.get(name) is not None:
                    found[field.name] = config[name]
                    break
        spec = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
        if not spec:
            raise ValueError("config.json names no layers: layers_block_type and hybrid_override_pattern are absent")
        found["kinds"] = letters(spec)
        mtp = config.get("mtp_layers_block_type") or config.get("mtp_hybrid_override_pattern") or ""
        found["mtp_kinds"] = letters(mtp)
        if "time_step_limit" in found:
            found["time_step_limit"] = tuple(limit_value(x) for x in found["time_step_limit"])
        found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
        return cls(**found)

    @classmethod
    def of(cls, folder: str | Path) -> "Facts":
        return cls.read(json.loads((Path(folder) / "config.json").read_text()))
