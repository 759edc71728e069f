"""Small random models for tests: every dimension differs from every other, so that a mixed-up axis shows."""

import functools

import jax
import numpy as np

from nemotron_jax import NemotronH, NemotronHConfig, ShardingRules, make_mesh

BASE = dict(
    vocab_size=96,
    hidden_size=40,
    intermediate_size=56,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=12,
    mamba_num_heads=16,
    mamba_head_dim=6,
    ssm_state_size=10,
    n_groups=8,
    conv_kernel=4,
    chunk_size=8,
    layer_norm_epsilon=1e-5,
    max_position_embeddings=4096,
    hybrid_override_pattern="M*-",
    dtype="float32",
)
# What a block of experts needs besides, and with latent experts.
EXPERTS = dict(
    n_routed_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=48,
    routed_scaling_factor=2.5,
)
LATENT_EXPERTS = dict(EXPERTS, moe_latent_size=20)


def config(**overrides) -> NemotronHConfig:
    values = {**BASE, **overrides}
    values.setdefault("num_hidden_layers", len(values["hybrid_override_pattern"]))
    return NemotronHConfig.from_dict({"model_type": "nemotron_h", **values})


def model(
    tensor: int = 1, data: int = 1, *, fusion: str = "none", seed: int = 0, rules=None, dtype=None, **overrides
) -> NemotronH:
    """A random model; the same seed gives the same model on every mesh. Models are kept, so equal calls share
    programs.
    """
    return _model(tensor, data, fusion, seed, rules, dtype, tuple(sorted(overrides.items())))


@functools.lru_cache(maxsize=64)
def _model(tensor, data, fusion, seed, rules, dtype, overrides):
    return NemotronH(
        config(**dict(overrides)),
        mesh=make_mesh(tensor, data),
        rules=rules or ShardingRules(),
        fusion=fusion,
        dtype=dtype,
        rngs=seed,
    )


def tokens(seed: int, *shape: int, vocab: int = BASE["vocab_size"]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, shape, np.int32)


def close(found, expected, tolerance: float = 2e-5) -> None:
    """Largest absolute difference within tolerance; NaN and a difference in shape fail."""
    found, expected = np.asarray(jax.device_get(found)), np.asarray(jax.device_get(expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    worst = np.max(np.abs(found.astype(np.float64) - expected.astype(np.float64)), initial=0.0)
    assert worst <= tolerance, f"largest difference {worst:.3g}, tolerance {tolerance:.3g}"
