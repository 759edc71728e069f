"""Which tensors a Nemotron-H checkpoint holds, from its configuration alone: names, shapes, counts of parameters.

The names are those of the Hugging Face hub, where a matrix is stored (outputs, inputs) and each expert has its own two.
No array is made, so the 550B model costs no more than a dictionary.
"""

import math

from nemotron_jax.config import ATTENTION, MAMBA, MLP, MOE, NemotronHConfig

Shape = tuple[int, ...]


def checkpoint_shapes(config: NemotronHConfig, *, mtp: bool = True, prefix: str = "backbone.") -> dict[str, Shape]:
    """Every tensor of a checkpoint, in the order in which the model uses them.

    Args:
      config: the model's configuration. Per-layer overrides count, a tied head has no tensor.
      mtp: whether to list the multi-token-prediction layers (``mtp.layers.N.``) that the configuration says are there.
      prefix: what stands before ``embeddings``, ``layers`` and ``norm_f``. Some checkpoints write ``model.`` (Puzzle)
        or ``language_model.backbone.`` (VL, Omni; their ``lm_head`` is under ``language_model.`` too, ``mtp`` is not).

    Returns:
      {tensor name: shape}.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    outer = "language_model." if prefix.startswith("language_model.") else ""
    shapes: dict[str, Shape] = {f"{prefix}embeddings.weight": (vocab, hidden)}
    for index, kind in enumerate(config.hybrid_override_pattern):
        shapes |= _under(f"{prefix}layers.{index}.", block_shapes(config.layer(index), kind))
    shapes[f"{prefix}norm_f.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[f"{outer}lm_head.weight"] = (vocab, hidden)
    if mtp:
        pattern = config.mtp_hybrid_override_pattern
        for index in range(config.num_mtp_layers):
            position = index % len(pattern)
            layer = block_shapes(config.mtp_layer(index), pattern[position])
            if position == 0:
                layer |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
            if position == len(pattern) - 1:
                layer["final_layernorm.weight"] = (hidden,)
            shapes |= _under(f"mtp.layers.{index}.", layer)
    return shapes


def block_shapes(config: NemotronHConfig, kind: str) -> dict[str, Shape]:
    """The tensors of one block: ``norm.weight`` and ``mixer.*``.

    Args:
      config: the configuration as that layer sees it (`NemotronHConfig.layer`).
      kind: the block's letter.
    """
    return {"norm.weight": (config.hidden_size,)} | _under("mixer.", _MIXERS[kind](config))


def parameter_count(config: NemotronHConfig, *, mtp: bool = True) -> int:
    """Numbers in a checkpoint, those of stored MTP layers included unless `mtp` is false."""
    return sum(map(math.prod, checkpoint_shapes(config, mtp=mtp).values()))


def active_parameter_count(config: NemotronHConfig) -> int:
    """Parameters that one token of the model itself meets: all but MTP and the routed experts not chosen for it.

    The embedding table and the head count in full, as in published figures such as "12B active".
    """
    idle = 0
    for index, kind in enumerate(config.hybrid_override_pattern):
        if kind == MOE:
            layer = config.layer(index)
            unchosen = layer.n_routed_experts - layer.num_experts_per_tok
            idle += unchosen * sum(map(math.prod, _expert(layer).values()))
    return parameter_count(config, mtp=False) - idle


def _under(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {prefix + name: shape for name, shape in shapes.items()}


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def _mamba(config: NemotronHConfig) -> dict[str, Shape]:
    hidden, heads, inner, conv = config.hidden_size, config.mamba_num_heads, config.inner_size, config.conv_dim
    return (
        # Rows: z (the gate), then x, B and C, which pass the convolution, then dt.
        _linear("in_proj", inner + conv + heads, hidden, config.use_bias)
        | {"conv1d.weight": (conv, 1, config.conv_kernel)}
        | ({"conv1d.bias": (conv,)} if config.use_conv_bias else {})
        | {name: (heads,) for name in ("A_log", "D", "dt_bias")}
        | {"norm.weight": (inner,)}
        | _linear("out_proj", hidden, inner, config.use_bias)
    )


def _attention(config: NemotronHConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return (
        _linear("q_proj", queries, hidden, False)
        | _linear("k_proj", keys, hidden, False)
        | _linear("v_proj", keys, hidden, False)
        | _linear("o_proj", hidden, queries, False)
    )


def _mlp(config: NemotronHConfig) -> dict[str, Shape]:
    return _linear("up_proj", config.intermediate_size, config.hidden_size, config.mlp_bias) | _linear(
        "down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias
    )


def _expert(config: NemotronHConfig) -> dict[str, Shape]:
    width, inputs = config.moe_intermediate_size, config.moe_latent_size or config.hidden_size
    return {"up_proj.weight": (width, inputs), "down_proj.weight": (inputs, width)}


def _moe(config: NemotronHConfig) -> dict[str, Shape]:
    hidden, experts = config.hidden_size, config.n_routed_experts
    shared = config.moe_shared_expert_intermediate_size
    shapes: dict[str, Shape] = {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        shapes |= _under(f"experts.{expert}.", _expert(config))
    # The shared expert sees the full width, whatever the routed ones work in.
    shapes |= {"shared_experts.up_proj.weight": (shared, hidden), "shared_experts.down_proj.weight": (hidden, shared)}
    if config.moe_latent_size:
        shapes |= _linear("fc1_latent_proj", config.moe_latent_size, hidden, False)
        shapes |= _linear("fc2_latent_proj", hidden, config.moe_latent_size, False)
    return shapes


_MIXERS = {MAMBA: _mamba, ATTENTION: _attention, MLP: _mlp, MOE: _moe}
