"""Reads the keys of a config.json, in any of the spellings of `nemotron_jax.config`'s table, into field values."""

from collections.abc import Mapping
from typing import Any

from nemotron_jax.config_checks import (
    ATTENTION,
    BAD,
    LETTER_NAMES,
    MLP,
    MOE,
    NAME_LETTERS,
    default_head_dim,
    finite_or_infinite,
    has_kind,
    is_int,
    is_number,
)
from nemotron_jax.frozen import FrozenMapping, freeze

_ALIASES = {
    "layer_norm_epsilon": ("norm_eps", "rms_norm_eps"),
    "head_dim": ("attention_head_dim",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "chunk_size": ("mamba_chunk_size",),
    "use_conv_bias": ("mamba_conv_bias",),
    "time_step_limit": ("mamba_dt_limit",),
    "dtype": ("torch_dtype",),
    "n_routed_experts": ("num_local_experts",),
}
_PATTERN_KEYS = ("hybrid_override_pattern", "hybrid_layer_pattern", "layers_block_type", "layer_types")
MTP_PATTERN_KEYS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
_WRAPPER_KEYS = ("llm_config", "text_config", "language_config")
# What a wrapper may say on behalf of the language model it holds.
_FROM_WRAPPER = ("pad_token_id", "bos_token_id", "eos_token_id", "quantization_config")
WRAPPER_NOTE = "wrapped_by"


def read_fields(d: Mapping[str, Any], defaults: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Turns one file's keys into field values.

    Args:
      d: the file's content.
      defaults: the fields that have a default.
      faults: gets one line for every value that cannot be read; the field then holds `BAD`.

    Returns:
      A value for every field.
    """
    d, wrapper = _unwrap(d, faults)
    rest = dict(d)
    values: dict[str, Any] = dict(defaults)
    values["wrapper"] = wrapper

    for name, default in defaults.items():
        if name in ("extra", "wrapper", "block_configs", "mtp_block_configs", *_PATTERN_KEYS, *MTP_PATTERN_KEYS):
            continue
        value = _one_value(rest, (name, *_ALIASES.get(name, ())), faults)
        if value is not None:
            values[name] = value
        elif default is None and name in d:
            values[name] = None
    for name in ("vocab_size", "hidden_size"):
        value = rest.pop(name, None)
        values[name] = BAD if value is None else value
        if value is None:
            faults.append(f"{name}: found nothing; accepted: a positive integer")

    for name in ("dtype", "mamba_ssm_cache_dtype"):
        values[name] = _dtype_name(values[name])
    if values["time_step_limit"] is not BAD:
        values["time_step_limit"] = _read_limit(values["time_step_limit"], "time_step_limit", faults)
    if isinstance(values["eos_token_id"], list):
        values["eos_token_id"] = tuple(values["eos_token_id"]) or None
    if values["moe_latent_size"] == 0:
        values["moe_latent_size"] = None

    values["block_configs"] = _read_blocks(rest.pop("block_configs", None), "block_configs", faults)
    parts = _read_layers(rest, values, faults)
    _read_mtp(rest, values, parts, stated=d.get("num_nextn_predict_layers") is not None, faults=faults)
    _read_widths(values, faults)
    _read_attention_sizes(d, values, faults)
    if freeze(rest.get("architectures")) == freeze(architectures(values["model_type"])):
        del rest["architectures"]  # written from model_type again
    values["extra"] = freeze(rest)
    return values


def architectures(model_type: Any) -> list[str]:
    """What a config.json of that type says under `architectures`."""
    return ["NemotronHPuzzleForCausalLM" if model_type == "nemotron_h_puzzle" else "NemotronHForCausalLM"]


def _unwrap(d: Mapping[str, Any], faults: list[str]) -> tuple[Mapping[str, Any], FrozenMapping | None]:
    """The language model's keys, and what was around them."""
    keys = [key for key in _WRAPPER_KEYS if isinstance(d.get(key), Mapping)]
    if not keys or any(d.get(key) for key in (*_PATTERN_KEYS, "block_configs")):
        inner = dict(d)
        note = inner.pop(WRAPPER_NOTE, None)
        return inner, freeze(note)
    if len(keys) > 1:
        faults.append(f"{' and '.join(keys)}: found {len(keys)} language models; accepted: one")
    inner = dict(d[keys[0]])
    outer = {key: value for key, value in d.items() if key != keys[0]}
    for key in _FROM_WRAPPER:
        if inner.get(key) is None and outer.get(key) is not None:
            inner[key] = outer[key]
    dtype_keys = ("dtype", *_ALIASES["dtype"])
    if all(inner.get(key) is None for key in dtype_keys):
        inner |= {key: outer[key] for key in dtype_keys if outer.get(key) is not None}
    return inner, freeze({"key": keys[0], "outer": outer})


def _one_value(rest: dict[str, Any], names: tuple[str, ...], faults: list[str]) -> Any:
    """Takes one value out of `rest` that may be there under several names. None: absent or null everywhere."""
    found = {name: rest.pop(name) for name in names if name in rest}
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        return None
    compared = [_dtype_name(value) if "dtype" in name else value for name, value in found.items()]
    if any(value != compared[0] for value in compared[1:]):
        said = " and ".join(f"{name} {value!r}" for name, value in found.items())
        faults.append(f"{names[0]}: found {said}; accepted: one value, under one name or the same under each")
        return BAD
    return next(iter(found.values()))


def _dtype_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.removeprefix("torch.")
    return {"float": "float32", "half": "float16", "auto": "float32"}.get(value, value)


def _read_float(value: Any) -> float | None:
    """A float in any of the spellings that JSON files use for infinity; None if it is none."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if is_number(value) else None


def _read_limit(value: Any, name: str, faults: list[str]) -> Any:
    accepted = "two numbers [low, high]; high may be Infinity"
    bounds = [_read_float(bound) for bound in value] if isinstance(value, list | tuple) else []
    if len(bounds) != 2 or any(bound is None for bound in bounds):
        faults.append(f"{name}: found {value!r}; accepted: {accepted}")
        return BAD
    return tuple(finite_or_infinite(bound) for bound in bounds if bound is not None)


def _read_blocks(value: Any, name: str, faults: list[str]) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
        faults.append(f"{name}: found {value!r:.80}; accepted: a list with one mapping per layer")
        return BAD
    return tuple(map(FrozenMapping, value))


def _letters(value: Any, name: str, faults: list[str]) -> list[str] | None:
    """Reads a pattern: the parts between '/' as strings of letters, or None after reporting a fault."""
    if isinstance(value, str):
        parts, bad = [""], []
        for position, letter in enumerate(value):
            if letter == "/":
                parts.append("")
            elif letter in LETTER_NAMES:
                parts[-1] += letter
            elif letter != "|":
                bad.append(f"{letter!r} at position {position}")
        if bad:
            faults.append(f"{name}: found {', '.join(bad)} (counted from 0); accepted: the letters M * - E, and | /")
        return None if bad else parts
    if isinstance(value, list | tuple):
        letters = [NAME_LETTERS.get(item, item if item in LETTER_NAMES else None)
                   if isinstance(item, str) else None for item in value]  # fmt: skip
        bad = [f"{item!r} at position {i}" for i, (item, ch) in enumerate(zip(value, letters, strict=True)) if not ch]
        if bad:
            accepted = f"{', '.join(NAME_LETTERS)}, or the letters M * - E"
            faults.append(f"{name}: found {', '.join(bad)} (counted from 0); accepted: {accepted}")
            return None
        return ["".join(letter for letter in letters if letter)]
    faults.append(f"{name}: found {value!r:.80}; accepted: a string of the letters M * - E, or a list of names")
    return None


def _agreeing(found: dict[str, str], field: str, faults: list[str]) -> Any:
    """The one pattern that all sources give; '' if there is none."""
    if len(set(found.values())) > 1:
        said = " and ".join(f"{value!r} ({name})" for name, value in found.items())
        faults.append(f"{field}: found {said}; accepted: the same layers from each, or only one of them")
        return BAD
    return next(iter(found.values()), "")


def _block_letters(blocks: Any, name: str, faults: list[str]) -> list[str] | None:
    if blocks is BAD or not blocks or not any("block_type" in entry for entry in blocks):
        return None
    return _letters([entry.get("block_type") for entry in blocks], f"block_type of {name}", faults)


def _read_layers(rest: dict[str, Any], values: dict[str, Any], faults: list[str]) -> list[str]:
    """Fills the pattern from whatever names it. Returns the MTP steps that followed it after '/'."""
    before = len(faults)
    found: dict[str, str] = {}
    steps: list[str] = []
    for name in _PATTERN_KEYS:
        value = rest.pop(name, None)
        if value in (None, "", [], ()):
            continue
        if parts := _letters(value, name, faults):
            found[name] = parts[0]
            steps = [part for part in parts[1:] if part] or steps
    if parts := _block_letters(values["block_configs"], "block_configs", faults):
        found["block_configs"] = parts[0]
    pattern = _agreeing(found, "hybrid_override_pattern", faults)
    if not found and len(faults) == before:
        others = ", ".join(_PATTERN_KEYS[1:])
        faults.append(f"hybrid_override_pattern: found nothing; accepted: letters M * - E, or one of {others}")
    values["hybrid_override_pattern"] = pattern if found else BAD

    layers = rest.pop("num_hidden_layers", None)
    if layers is not None and not (is_int(layers) and layers > 0):
        faults.append(f"num_hidden_layers: found {layers!r}; accepted: a positive integer, null or nothing")
    elif layers is not None and isinstance(pattern, str) and found and layers != len(pattern):
        faults.append(
            f"num_hidden_layers: found {layers}, but {' and '.join(found)} has {len(pattern)} layers; accepted: equal"
        )
    return steps


def _read_mtp(
    rest: dict[str, Any], values: dict[str, Any], steps: list[str], *, stated: bool, faults: list[str]
) -> None:
    """Fills the MTP fields. `steps` came with the main pattern; `stated`: the file gives a number of steps."""
    if not stated:
        values["num_nextn_predict_layers"] = len(steps)
    count = values["num_nextn_predict_layers"]
    if count == 0 and not steps:
        return  # a list without steps (transformers 5 always writes one) says nothing: it stays in `extra`
    found = {f"hybrid_override_pattern, step {i}": step for i, step in enumerate(steps)}
    if steps and is_int(count) and count != len(steps):
        faults.append(
            f"num_nextn_predict_layers: found {count}, but hybrid_override_pattern has {len(steps)} steps after '/'; "
            "accepted: equal"
        )
    for name in MTP_PATTERN_KEYS:
        value = rest.pop(name, None)
        if value in (None, "", [], ()):
            continue
        parts = [part for part in _letters(value, name, faults) or () if part]
        found |= {f"{name}, step {i}" if i else name: part for i, part in enumerate(parts)}
        if len(parts) > 1 and is_int(count) and count != len(parts):
            faults.append(
                f"num_nextn_predict_layers: found {count}, but {name} has {len(parts)} steps; accepted: equal"
            )
    blocks = _read_blocks(rest.pop("mtp_block_configs", None), "mtp_block_configs", faults)
    if parts := _block_letters(blocks, "mtp_block_configs", faults):
        found["mtp_block_configs"] = parts[0]
    values["mtp_block_configs"] = blocks
    values["mtp_hybrid_override_pattern"] = _agreeing(found, "mtp_hybrid_override_pattern", faults) or ATTENTION + MOE


def _read_widths(values: dict[str, Any], faults: list[str]) -> None:
    """intermediate_size may be a list with one width, or one per dense MLP."""
    widths, pattern = values["intermediate_size"], values["hybrid_override_pattern"]
    if not isinstance(widths, list | tuple):
        return
    widths = list(widths)
    if len(set(map(repr, widths))) == 1:
        values["intermediate_size"] = widths[0]
        return
    values["intermediate_size"] = BAD
    if pattern is BAD:
        return
    if not widths or len(widths) != pattern.count(MLP) or values["block_configs"]:
        faults.append(
            f"intermediate_size: found a list of {len(widths)}; accepted: one width, or one per '-' layer "
            f"({pattern.count(MLP)}) without block_configs"
        )
        return
    values["intermediate_size"] = widths[0]
    left = iter(widths)
    values["block_configs"] = tuple(
        FrozenMapping({"block_type": LETTER_NAMES[ch]} | ({"intermediate_size": next(left)} if ch == MLP else {}))
        for ch in pattern
    )


def _read_attention_sizes(d: Mapping[str, Any], values: dict[str, Any], faults: list[str]) -> None:
    heads = values["num_attention_heads"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values["head_dim"] is None:
        values["head_dim"] = default_head_dim(values["hidden_size"], heads)
        absent = not any(name in d for name in ("head_dim", *_ALIASES["head_dim"]))
        if absent and values["head_dim"] not in (0, 128) and has_kind(values, ATTENTION):
            faults.append(
                "head_dim: found nothing; accepted: a positive integer; null means hidden_size // num_attention_heads, "
                f"here {values['head_dim']} (other programs take 128 when it is missing)"
            )
