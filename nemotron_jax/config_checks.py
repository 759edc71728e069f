"""Which field values can be a Nemotron-H model: every reason why some cannot, in one list."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nemotron_jax.frozen import thaw

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
LETTER_NAMES = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", MOE: "moe"}
NAME_LETTERS = {
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}
MODEL_TYPES = ("nemotron_h", "nemotron_h_puzzle")
DTYPES = ("bfloat16", "float16", "float32")

# Above this a limit of dt is no limit: float32 ends at 3.4028e38 and bfloat16 at 3.3895e38.
INFINITE_ABOVE = 3e38

# The fields that block_configs may set for one layer: nothing that the stream between the layers depends on.
OVERRIDABLE = {
    MAMBA: ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    ATTENTION: ("num_attention_heads", "num_key_value_heads", "head_dim"),
    MLP: ("intermediate_size",),
    MOE: ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
          "moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor", "n_group", "topk_group",
          "norm_topk_prob"),
}  # fmt: skip

# Sizes without a default: 0 where the pattern does not hold their block kind.
SIZES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "num_attention_heads", "intermediate_size",
         "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
         "moe_shared_expert_intermediate_size")  # fmt: skip


class _Unreadable:
    """The value of a field that was already reported as a fault; equal to nothing else, and no number."""


BAD: Any = _Unreadable()


class ConfigError(ValueError):
    """A configuration that cannot be used. `faults` holds every reason, each naming field, found and accepted."""

    def __init__(self, faults: Sequence[str], where: str = ""):
        self.faults = tuple(dict.fromkeys(faults))
        head = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''} in the configuration"
        super().__init__(f"{head}{' ' + where if where else ''}:" + "".join(f"\n  - {fault}" for fault in self.faults))


def default_head_dim(hidden_size: Any, heads: Any) -> Any:
    if is_int(hidden_size) and is_int(heads) and hidden_size > 0 and heads > 0:
        return hidden_size // heads
    return 0


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite_or_infinite(value: float) -> float:
    if abs(value) > INFINITE_ABOVE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def accepted_overrides(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that one entry of block_configs sets. Null sets nothing."""
    fields = [field for kind in OVERRIDABLE.values() for field in kind]
    return {key: value for key, value in entry.items() if value is not None and key in fields}


def has_kind(values: Mapping[str, Any], letter: str) -> bool:
    patterns = (values["hybrid_override_pattern"], values["mtp_hybrid_override_pattern"])
    return any(isinstance(pattern, str) and letter in pattern for pattern in patterns)


class _Check:
    """Collects the faults of one set of values. A value that was reported is not used in further checks."""

    def __init__(self, values: Mapping[str, Any], place: str = ""):
        self.values = values
        self.place = place
        self.faults: list[str] = []

    def fault(self, name: str, accepted: str) -> None:
        value = self.values[name]
        found = "0 or nothing" if name in SIZES and value == 0 and value is not False else repr(thaw(value))
        self.faults.append(f"{name}: found {found}{self.place}; accepted: {accepted}")

    def where(self, name: str, good: bool, accepted: str) -> bool:
        if self.values[name] is BAD:
            return False
        if not good:
            self.fault(name, accepted)
        return good

    def positive(self, *names: str) -> bool:
        good = [is_int(self.values[name]) and 0 < self.values[name] < 2**31 for name in names]
        return all([self.where(name, ok, "a positive integer") for name, ok in zip(names, good, strict=True)])

    def boolean(self, *names: str) -> None:
        for name in names:
            self.where(name, isinstance(self.values[name], bool), "true or false")

    def one_of(self, name: str, options: Sequence[Any], why: str = "") -> None:
        value = self.values[name]
        good = any(value == option and isinstance(value, type(option)) for option in options)
        self.where(name, good, " or ".join(map(repr, options)) + why)

    def number(self, name: str, good: Any, accepted: str) -> None:
        value = self.values[name]
        self.where(name, is_number(value) and abs(value) < INFINITE_ABOVE and good(value), accepted)


def faults_of(values: Mapping[str, Any]) -> list[str]:
    """Every reason why these field values cannot be a model; empty when they can."""
    check = _Check(values)
    check.one_of("model_type", MODEL_TYPES)
    check.positive("vocab_size", "hidden_size")
    check.number("layer_norm_epsilon", lambda x: x > 0, "a positive number")
    check.boolean("tie_word_embeddings", "residual_in_fp32", "use_conv_bias", "use_bias", "attention_bias", "mlp_bias",
                  "norm_topk_prob")  # fmt: skip
    check.one_of("dtype", DTYPES)
    check.one_of("mamba_ssm_cache_dtype", DTYPES)
    if values["max_position_embeddings"] is not None:
        check.positive("max_position_embeddings")
    _check_tokens(check)
    for name in ("quantization_config", "wrapper"):
        check.where(name, values[name] is None or isinstance(values[name], Mapping), "a mapping or null")
    check.where("extra", isinstance(values["extra"], Mapping), "a mapping")

    _check_pattern(check, "hybrid_override_pattern", "block_configs")
    steps = values["num_nextn_predict_layers"]
    if check.where("num_nextn_predict_layers", is_int(steps) and 0 <= steps < 2**31, "an integer, 0 or more"):
        if steps:
            _check_pattern(check, "mtp_hybrid_override_pattern", "mtp_block_configs")
        else:
            check.where("mtp_hybrid_override_pattern", values["mtp_hybrid_override_pattern"] in ("", BAD),
                        "nothing when num_nextn_predict_layers is 0")  # fmt: skip
            check.where("mtp_block_configs", values["mtp_block_configs"] == (),
                        "nothing when num_nextn_predict_layers is 0")  # fmt: skip
    _check_unused(check)
    if isinstance(values["extra"], Mapping):
        check.faults += _extra_faults(values["extra"], has_kind(values, ATTENTION))
    return list(dict.fromkeys(check.faults))


def _check_unused(check: _Check) -> None:
    """Values of block kinds that the pattern does not hold must at least be of their type."""
    reported = {fault.split(":")[0] for fault in check.faults}
    for name in (*SIZES, "num_key_value_heads", "head_dim", "n_groups", "conv_kernel", "chunk_size",
                 "n_shared_experts", "n_group", "topk_group"):  # fmt: skip
        if name not in reported:
            check.where(name, is_int(check.values[name]) and 0 <= check.values[name] < 2**31, "an integer, 0 or more")
    latent = check.values["moe_latent_size"]
    if "moe_latent_size" not in reported:
        check.where("moe_latent_size", latent is None or (is_int(latent) and latent > 0), "a positive integer or null")
    for name in ("mamba_hidden_act", "mlp_hidden_act"):
        check.where(name, isinstance(check.values[name], str), "a name")
    if "routed_scaling_factor" not in reported:
        check.number("routed_scaling_factor", lambda x: True, "a number")
    if "time_step_limit" not in reported:
        _check_limit(check)


def _check_limit(check: _Check) -> None:
    limit = check.values["time_step_limit"]
    good = isinstance(limit, tuple) and len(limit) == 2 and all(map(is_number, limit))
    good = good and 0 <= limit[0] < INFINITE_ABOVE and limit[0] <= limit[1] and limit[1] > 0
    check.where("time_step_limit", good, "two numbers [low, high], 0 <= low <= high, low finite and high > 0")


def _check_tokens(check: _Check) -> None:
    vocab = check.values["vocab_size"]
    limit = vocab if is_int(vocab) and vocab > 0 else math.inf

    def token(value: Any) -> bool:
        return is_int(value) and 0 <= value < limit

    accepted = f"a token id from 0 to {limit - 1}" if limit is not math.inf else "a token id, 0 or more"
    for name in ("pad_token_id", "bos_token_id"):
        check.where(name, check.values[name] is None or token(check.values[name]), f"{accepted}, or null")
    eos = check.values["eos_token_id"]
    good = eos is None or token(eos) or (isinstance(eos, tuple) and all(map(token, eos)))
    check.where("eos_token_id", good, f"{accepted}, a list of them, or null")


def _check_pattern(check: _Check, pattern_name: str, blocks_name: str) -> None:
    values = check.values
    pattern, blocks = values[pattern_name], values[blocks_name]
    accepted = "a string of the letters M * - E, at least one"
    if not check.where(pattern_name, isinstance(pattern, str) and bool(pattern), accepted):
        return
    if bad := [f"{ch!r} at position {i}" for i, ch in enumerate(pattern) if ch not in LETTER_NAMES]:
        check.faults.append(f"{pattern_name}: found {', '.join(bad)} (counted from 0); accepted: the letters M * - E")
        return
    if blocks is BAD:
        return
    if blocks and len(blocks) != len(pattern):
        layers = len(pattern)
        check.faults.append(f"{blocks_name}: found {len(blocks)} entries; accepted: one for each of {layers} layers")
        return
    done = set()
    for index, letter in enumerate(pattern):
        entry = blocks[index] if blocks else None
        if (letter, entry) in done:
            continue
        done.add((letter, entry))
        place, seen = "", dict(values)
        if entry is not None:
            place = f" (layer {index}, {blocks_name})"
            check.faults += _entry_faults(entry, letter, blocks_name, index)
            overrides = accepted_overrides(entry)
            seen |= overrides
            if seen["moe_latent_size"] == 0:
                seen["moe_latent_size"] = None
            place = place if overrides else ""
        layer = _Check(seen, place)
        _CHECKS[letter](layer)
        check.faults += layer.faults


def _entry_faults(entry: Mapping[str, Any], letter: str, blocks_name: str, index: int) -> list[str]:
    faults = []
    kind = entry.get("block_type")
    if kind is not None and NAME_LETTERS.get(kind, kind) != letter:
        faults.append(f"{blocks_name}[{index}].block_type: found {kind!r}; accepted: a name of {LETTER_NAMES[letter]}")
    for key, value in entry.items():
        if key not in ("block_type", *OVERRIDABLE[letter]) and value is not None:
            faults.append(
                f"{blocks_name}[{index}].{key}: found {thaw(value)!r}; accepted for {LETTER_NAMES[letter]} layers: "
                f"{', '.join(OVERRIDABLE[letter])}"
            )
    return faults


def _check_mamba(check: _Check) -> None:
    v = check.values
    heads = check.positive("mamba_num_heads")
    groups = check.positive("n_groups")
    check.positive("mamba_head_dim", "ssm_state_size", "conv_kernel", "chunk_size")
    if heads and groups:
        check.where("n_groups", v["mamba_num_heads"] % v["n_groups"] == 0,
                    f"a divisor of mamba_num_heads {v['mamba_num_heads']}")  # fmt: skip
    check.one_of("mamba_hidden_act", ("silu", "swish"))
    _check_limit(check)


def _check_attention(check: _Check) -> None:
    v = check.values
    heads = check.positive("num_attention_heads")
    # Filled from num_attention_heads when absent: then one fault is enough.
    groups = v["num_key_value_heads"] != 0 if not heads else check.positive("num_key_value_heads")
    if heads or v["head_dim"] != 0:
        check.positive("head_dim")
    if heads and groups:
        check.where("num_key_value_heads", v["num_attention_heads"] % v["num_key_value_heads"] == 0,
                    f"a divisor of num_attention_heads {v['num_attention_heads']}")  # fmt: skip
    check.where("attention_bias", v["attention_bias"] is not True, "false: the attention of this family has no biases")


def _check_mlp(check: _Check) -> None:
    check.positive("intermediate_size")
    check.one_of("mlp_hidden_act", ("relu2",))


def _check_moe(check: _Check) -> None:
    v = check.values
    experts = check.positive("n_routed_experts")
    chosen = check.positive("num_experts_per_tok")
    check.positive("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    if v["moe_latent_size"] is not None:
        check.positive("moe_latent_size")
    check.one_of("n_shared_experts", (1,), " (other programs disagree about other numbers)")
    check.one_of("mlp_hidden_act", ("relu2",))
    check.where("mlp_bias", v["mlp_bias"] is not True, "false where there are experts: they have no biases")
    check.number("routed_scaling_factor", lambda x: x > 0, "a positive number")
    groups = check.positive("n_group")
    kept = check.positive("topk_group")
    if experts and chosen and v["num_experts_per_tok"] > v["n_routed_experts"]:
        check.fault("num_experts_per_tok", f"at most n_routed_experts {v['n_routed_experts']}")
        chosen = False
    if groups and kept and v["topk_group"] > v["n_group"]:
        check.fault("topk_group", f"at most n_group {v['n_group']}")
        kept = False
    if not (experts and groups):
        return
    size, left = divmod(v["n_routed_experts"], v["n_group"])
    if left or (v["n_group"] > 1 and size < 2):
        check.fault("n_group", f"a divisor of n_routed_experts {v['n_routed_experts']}, groups of two experts or more")
    elif chosen and kept and v["num_experts_per_tok"] > size * v["topk_group"]:
        check.fault("num_experts_per_tok", f"at most {size * v['topk_group']}, the experts in topk_group groups")


_CHECKS = {MAMBA: _check_mamba, ATTENTION: _check_attention, MLP: _check_mlp, MOE: _check_moe}

# Keys that this family does not have. With one of the harmless values they change nothing; with another the model that
# the file describes is not the one computed here.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "none", "nope", "no_pos", ""),
    "use_rope": (None, False),
    "use_rotary": (None, False),
    "use_qk_norm": (None, False),
    "qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
}


def _extra_faults(extra: Mapping[str, Any], attention: bool) -> list[str]:
    faults = []
    window = extra.get("sliding_window")
    if attention and window is not None:
        faults.append(f"sliding_window: found {thaw(window)!r}; accepted: null, the attention sees every earlier token")
    for key, harmless in _HARMLESS.items():
        if extra.get(key) not in harmless:
            accepted = " or ".join(repr(value) for value in harmless if value is not None) or "null"
            faults.append(f"{key}: found {thaw(extra[key])!r}; accepted: nothing or {accepted}")
    for key in ("rope_scaling", "rope_parameters"):
        value = extra.get(key)
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, Mapping) else None
        if attention and value is not None and kind != "default":
            faults.append(f"{key}: found {thaw(value)!r}; accepted: null or rope_type 'default' (no positions)")
    return faults
