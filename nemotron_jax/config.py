"""The configuration of a Nemotron-H model: one frozen value, whatever spelling it was read from.

`NemotronHConfig` uses Hugging Face's field names. It is hashable (so it can be a static argument of `jax.jit`), it is
checked when it is made, and it keeps what it does not understand, so that reading and writing loses nothing. This module
is plain Python: importing it does not import jax.

Layer kinds are letters: ``M`` Mamba-2, ``*`` attention, ``-`` dense MLP, ``E`` mixture of experts.

**Spellings that are read**

=========================  =============================================================================================
meaning                    keys, in any combination; two that disagree are refused
=========================  =============================================================================================
list of layers             ``hybrid_override_pattern`` / ``hybrid_layer_pattern`` (letters), ``layers_block_type`` /
                           ``layer_types`` (names, old: mamba, attention; new: linear_attention, full_attention; moe; mlp),
                           the ``block_type`` of each of ``block_configs``. Null or empty means absent.
separators                 ``|`` (pipeline stages) is dropped. ``/`` starts a multi-token-prediction step, as Megatron
                           writes it: ``M-M*/*E/*E`` is the model ``M-M*`` with two steps of ``*E`` (all steps alike).
MTP layers                 ``mtp_hybrid_override_pattern``, ``mtp_layers_block_type``, ``mtp_block_configs``, or ``/``; with
                           steps but none of these: ``*E``, as transformers does. ``num_nextn_predict_layers`` absent
                           means as many steps as ``/`` parts, so usually 0; with 0 steps the list is kept, unused.
number of layers           ``num_hidden_layers`` may be absent or null; if given it must equal the length of the list
norm epsilon               ``layer_norm_epsilon``, ``norm_eps``, ``rms_norm_eps`` (transformers reads only the first and
                           silently takes 1e-5 for a file that has only another; here every one counts)
attention head size        ``head_dim``, ``attention_head_dim``; null: hidden_size // num_attention_heads
limits of dt               ``time_step_limit`` / ``mamba_dt_limit``: absent, [a, b], bare ``Infinity``, "Infinity",
                           {"__float__": "Infinity"}; anything above 3e38 (such as 1e308) is infinity
Mamba                      ``n_groups`` ``conv_kernel`` ``chunk_size`` ``use_conv_bias`` or ``mamba_n_groups`` ``mamba_d_conv``
                           ``mamba_chunk_size`` ``mamba_conv_bias``
dtype                      ``dtype``, ``torch_dtype``; with or without ``torch.``; absent: bfloat16
experts                    ``n_routed_experts``, ``num_local_experts``; ``moe_latent_size`` null or 0: no latent
per-layer values           ``block_configs`` / ``mtp_block_configs`` (Puzzle), ``intermediate_size`` as a list, one per MLP
wrappers                   VL and Omni files nest the language model in ``llm_config`` / ``text_config``; the language
                           model is read, the rest is kept in `wrapper`
=========================  =============================================================================================

**What is refused, kept or honoured, compared with PyTorch (transformers 5.24)**

=============================  ==========================================  ===========================================
key                            transformers                                here
=============================  ==========================================  ===========================================
mlp_bias (dense), use_bias     honoured                                    honoured
mlp_bias with experts          on shared experts only, not on routed ones  refused: the two readings differ
attention_bias true            ignored: projections have no bias           refused where there is attention
sliding_window not null        ignored                                     refused where there is attention
n_shared_experts other than 1  ignored; other programs multiply or drop    refused
other activations              honoured                                    refused: only relu2 and silu were released
residual_in_fp32               ignored                                     honoured, as the hub's own code does
time_step_limit                ignored, replaced by [time_step_min, inf)   honoured, as the hub's own code does
tie_word_embeddings            ignored (a random head)                     honoured
block_configs                  ignored                                     honoured; a key without meaning here refused
rope_theta, partial_rotary_    ignored: there are no positions             ignored, kept
factor, rope_scaling null
rope_scaling, rope_parameters  ignored                                     refused if they ask for more than the default
position_embedding_type,       unknown                                     refused if they ask for positions, QK norm or
use_rope, qk norms, soft caps                                              soft capping
mamba_proj_bias                ignored: use_bias decides                   ignored, kept
expand, time_step_min/max/     used for initial values only                ignored, kept (the inner size is
floor/rank, dropouts                                                       mamba_num_heads * mamba_head_dim)
quantization_config            needs its own quantiser                     kept; the weight reader decides
any other key                  kept                                        kept in `extra`
=============================  ==========================================  ===========================================
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
LETTER_NAMES = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", MOE: "moe"}
_NAME_LETTERS = {
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
_INFINITE_ABOVE = 3e38
# Written instead of infinity when a limit must be named: valid JSON, and torch.clamp takes it in float32 and bfloat16.
_LARGEST_BFLOAT16 = 3.3895313892515355e38

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
_MTP_PATTERN_KEYS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
_WRAPPER_KEYS = ("llm_config", "text_config", "language_config")
# What a wrapper may say on behalf of the language model it holds.
_FROM_WRAPPER = ("pad_token_id", "bos_token_id", "eos_token_id", "quantization_config")
_WRAPPER_NOTE = "wrapped_by"

# The fields that block_configs may set for one layer: nothing that the stream between the layers depends on.
OVERRIDABLE = {
    MAMBA: ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    ATTENTION: ("num_attention_heads", "num_key_value_heads", "head_dim"),
    MLP: ("intermediate_size",),
    MOE: ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
          "moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor", "n_group", "topk_group",
          "norm_topk_prob"),
}  # fmt: skip

_BAD: Any = type("Unreadable", (), {"__repr__": lambda self: "unreadable"})()  # a value already reported as a fault


class ConfigError(ValueError):
    """A configuration that cannot be used. `faults` holds every reason, each naming field, found and accepted."""

    def __init__(self, faults: Sequence[str], where: str = ""):
        self.faults = tuple(dict.fromkeys(faults))
        head = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''} in the configuration"
        super().__init__(f"{head}{' ' + where if where else ''}:" + "".join(f"\n  - {fault}" for fault in self.faults))


class FrozenMapping(Mapping[str, Any]):
    """An immutable, hashable mapping of JSON values: lists become tuples, mappings FrozenMappings.

    A float that JSON cannot write is held as {"__float__": "Infinity" | "-Infinity" | "NaN"}, so that equal stays equal.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, Any] = {}):  # noqa: B006 - never changed
        self._items = {str(key): freeze(value) for key, value in items.items()}
        self._hash: int | None = None

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._items == other._items if isinstance(other, FrozenMapping) else NotImplemented

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self._items),)


def freeze(value: Any) -> Any:
    """A hashable copy of a JSON value."""
    if isinstance(value, FrozenMapping):
        return value
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return FrozenMapping({"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"})
    return value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`: dicts and lists, writable as strict JSON."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NemotronHConfig:
    """Everything that the shapes and the mathematics of a Nemotron-H model depend on.

    Sizes of block kinds that the pattern does not hold may be 0 (absent); they are not looked at.

    Raises:
      ConfigError (a ValueError): when made from values that cannot be; it lists every fault.
    """

    hybrid_override_pattern: str
    """One letter per layer: M, *, - or E."""
    vocab_size: int
    hidden_size: int
    """Width of the stream between the layers."""
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = False
    dtype: str = "bfloat16"
    """dtype of the stored weights: bfloat16, float16 or float32."""
    max_position_embeddings: int | None = None
    """Context length the model was trained for, in tokens. The model has no positions: this limits nothing."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    ssm_state_size: int = 0
    n_groups: int = 8
    """Groups that share B and C; heads are split into contiguous groups."""
    conv_kernel: int = 4
    """Taps of the causal convolution, the current token's included."""
    chunk_size: int = 128
    """Tokens per chunk of the chunked scan; changes rounding only."""
    use_conv_bias: bool = True
    use_bias: bool = False
    """Biases on in_proj and out_proj of the Mamba mixers."""
    mamba_hidden_act: str = "silu"
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of dt after the softplus."""
    mamba_ssm_cache_dtype: str = "float32"

    num_attention_heads: int = 0
    num_key_value_heads: int = None  # type: ignore[assignment]  # filled: num_attention_heads
    head_dim: int = None  # type: ignore[assignment]  # filled: hidden_size // num_attention_heads
    attention_bias: bool = False

    intermediate_size: int = 0
    """Width of the dense MLPs."""
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False

    n_routed_experts: int = 0
    n_shared_experts: int = 1
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Width of one routed expert."""
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    """Width that the routed experts work in; None: hidden_size, without projections."""
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    num_nextn_predict_layers: int = 0
    """Multi-token-prediction steps that the checkpoint holds."""
    mtp_hybrid_override_pattern: str = ""
    """Letters of one such step; empty when there is none."""

    block_configs: tuple[FrozenMapping, ...] = ()
    """Per-layer overrides (Puzzle): one mapping per layer, or empty."""
    mtp_block_configs: tuple[FrozenMapping, ...] = ()
    """The same for the layers of one MTP step."""

    model_type: str = "nemotron_h"
    quantization_config: FrozenMapping | None = None
    wrapper: FrozenMapping | None = None
    """The file around the language model: {"key": where it was, "outer": the other keys}; None for a plain one."""
    extra: FrozenMapping = FrozenMapping()
    """Every key that has no field, as it was read."""

    def __post_init__(self):
        if self.num_key_value_heads is None:
            self._fill(num_key_value_heads=self.num_attention_heads)
        if self.head_dim is None:
            self._fill(head_dim=_default_head_dim(self.hidden_size, self.num_attention_heads))
        if isinstance(self.eos_token_id, list | tuple):
            self._fill(eos_token_id=tuple(self.eos_token_id) or None)
        if isinstance(self.time_step_limit, list | tuple):
            self._fill(time_step_limit=tuple(self.time_step_limit))
        if self.moe_latent_size == 0:
            self._fill(moe_latent_size=None)
        for name in ("block_configs", "mtp_block_configs", "quantization_config", "wrapper", "extra"):
            self._fill(**{name: freeze(getattr(self, name))})
        if faults := _faults({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}):
            raise ConfigError(faults)
        self._fill(
            layer_norm_epsilon=float(self.layer_norm_epsilon),
            routed_scaling_factor=float(self.routed_scaling_factor),
            time_step_limit=tuple(_finite_or_infinite(bound) for bound in self.time_step_limit),
        )

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._key == other._key if isinstance(other, NemotronHConfig) else NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        # A cached hash must not travel: strings hash differently in another process.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    # ---------------------------------------------------------------- derived

    @property
    def num_hidden_layers(self) -> int:
        return len(self.hybrid_override_pattern)

    @property
    def inner_size(self) -> int:
        """Channels of a Mamba mixer, mamba_num_heads * mamba_head_dim (`expand` has no part in it)."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.n_groups * self.ssm_state_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end tokens as a tuple, whether the file had none, one or several."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def layers_block_type(self) -> tuple[str, ...]:
        """The names of the layers' kinds: mamba, attention, mlp, moe."""
        return tuple(LETTER_NAMES[letter] for letter in self.hybrid_override_pattern)

    @property
    def num_mtp_layers(self) -> int:
        """Blocks of all MTP steps together, as numbered under ``mtp.layers.``."""
        return self.num_nextn_predict_layers * len(self.mtp_hybrid_override_pattern)

    def layer(self, index: int) -> "NemotronHConfig":
        """The configuration as layer `index` sees it: `self`, unless block_configs sets something for that layer."""
        if not 0 <= index < self.num_hidden_layers:
            raise IndexError(f"layer {index}: the model has layers 0 to {self.num_hidden_layers - 1}")
        return _overridden(self, self.block_configs[index]) if self.block_configs else self

    def mtp_layer(self, index: int) -> "NemotronHConfig":
        """The same for block `index` under ``mtp.layers.``; its letter is the pattern's at index % len(pattern)."""
        if not 0 <= index < self.num_mtp_layers:
            raise IndexError(f"MTP layer {index}: the model has {self.num_mtp_layers} of them, counted from 0")
        position = index % len(self.mtp_hybrid_override_pattern)
        return _overridden(self, self.mtp_block_configs[position]) if self.mtp_block_configs else self

    # ---------------------------------------------------------------- reading and writing

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, where: str = "") -> Self:
        """Reads a configuration in any of the spellings of this module's table.

        Args:
          d: the content of a config.json.
          where: said in the error, such as the file's path.

        Raises:
          ConfigError: listing every fault, with the field, what was found and what is accepted.
        """
        if not isinstance(d, Mapping):
            raise ConfigError([f"found {type(d).__name__}; accepted: a mapping of keys to values"], where)
        faults: list[str] = []
        values = _read(d, faults)
        faults += _faults(values)
        if faults:
            raise ConfigError(faults, where)
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Reads a config.json, or the one in a folder.

        Raises:
          ConfigError: when there is none, it is not JSON, or what it says cannot be.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        where = f"in {file}"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"cannot be read: {error}"], where) from error
        repeated: list[str] = []

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in items:
                if key in found and found[key] != value:
                    repeated.append(f"{key}: found twice, as {found[key]!r} and {value!r}; accepted: one value")
                found[key] = value
            return found

        try:
            d = json.loads(text, object_pairs_hook=pairs)
        except ValueError as error:
            raise ConfigError([f"is not JSON: {error}"], where) from error
        if repeated:
            raise ConfigError(repeated, where)
        return cls.from_dict(d, where=where)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The configuration of a released model, by a name of `PRESETS` or by a hub id that it lists."""
        return cls.from_dict(find_preset(name).config, where=f"in preset {name}")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values that `from_dict` reads back to an equal one, unknown keys included.

        Written so that old and new readers understand it: the pattern as letters with num_hidden_layers (transformers 4
        and 5, vLLM, SGLang and TensorRT-LLM read them; the names that transformers 5 writes itself, older ones do not),
        both names of the head size, all three of the epsilon, ``torch_dtype``. Sizes of absent block kinds (0) are left
        out, and so is an unlimited time_step_limit: infinity is no JSON.
        """
        omitted = {"wrapper", "extra", "dtype", "time_step_limit", "hybrid_override_pattern"}
        d: dict[str, Any] = {
            "architectures": ["NemotronHPuzzleForCausalLM" if "puzzle" in self.model_type else "NemotronHForCausalLM"],
            "model_type": self.model_type,
            "hybrid_override_pattern": self.hybrid_override_pattern,
            "num_hidden_layers": self.num_hidden_layers,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in omitted or (field.name in _SIZES and value == 0):
                continue
            if value is None and field.name not in _WRITTEN_AS_NULL:
                continue
            d[field.name] = thaw(value)
        for name in ("block_configs", "mtp_block_configs"):
            if not d[name]:
                del d[name]
        if not self.num_nextn_predict_layers:
            del d["mtp_hybrid_override_pattern"]
        if not self.num_attention_heads:
            for name in ("num_key_value_heads", "head_dim"):
                if not d[name]:
                    del d[name]
        if "head_dim" in d:
            d["attention_head_dim"] = self.head_dim
        d["norm_eps"] = d["rms_norm_eps"] = self.layer_norm_epsilon
        d["torch_dtype"] = self.dtype
        low, high = self.time_step_limit
        if (low, high) != (0.0, math.inf):
            d["time_step_limit"] = [low, min(high, _LARGEST_BFLOAT16)]
        mtp_keys = (*_MTP_PATTERN_KEYS, "mtp_block_configs") if self.num_nextn_predict_layers else ()
        d |= {key: thaw(value) for key, value in self.extra.items() if key not in mtp_keys}
        if self.wrapper is not None:
            d[_WRAPPER_NOTE] = thaw(self.wrapper)
        return d

    def to_json(self, path: str | Path) -> None:
        """Writes `to_dict` as strict JSON to a file, or as config.json into an existing folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


_SIZES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "num_attention_heads", "intermediate_size",
          "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
          "moe_shared_expert_intermediate_size")  # fmt: skip
# Absent is not the same as null for these: other readers have a default for the missing key.
_WRITTEN_AS_NULL = ("pad_token_id", "bos_token_id", "eos_token_id", "moe_latent_size")
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(NemotronHConfig)
    if field.default is not dataclasses.MISSING
}


def _default_head_dim(hidden_size: Any, heads: Any) -> Any:
    if _is_int(hidden_size) and _is_int(heads) and hidden_size > 0 and heads > 0:
        return hidden_size // heads
    return 0


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite_or_infinite(value: float) -> float:
    if abs(value) > _INFINITE_ABOVE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _accepted_overrides(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that one entry of block_configs sets. Null sets nothing."""
    fields = [field for kind in OVERRIDABLE.values() for field in kind]
    return {key: value for key, value in entry.items() if value is not None and key in fields}


@functools.lru_cache(maxsize=1024)
def _overridden(config: NemotronHConfig, entry: FrozenMapping) -> NemotronHConfig:
    changes = {k: v for k, v in _accepted_overrides(entry).items() if getattr(config, k) != v}
    return dataclasses.replace(config, **changes) if changes else config


# -------------------------------------------------------------------- reading


def _read(d: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Turns one file's keys into field values. What cannot be read becomes `_BAD`, with a fault."""
    d, wrapper = _unwrap(d, faults)
    rest = dict(d)
    values: dict[str, Any] = dict(_DEFAULTS)
    values["wrapper"] = wrapper

    for name, default in _DEFAULTS.items():
        if name in ("extra", "wrapper", "block_configs", "mtp_block_configs", *_PATTERN_KEYS, *_MTP_PATTERN_KEYS):
            continue
        value = _one_value(rest, (name, *_ALIASES.get(name, ())), faults)
        if value is not None:
            values[name] = value
        elif default is None and name in d:
            values[name] = None
    for name in ("vocab_size", "hidden_size"):
        value = rest.pop(name, None)
        values[name] = _BAD if value is None else value
        if value is None:
            faults.append(f"{name}: found nothing; accepted: a positive integer")

    for name in ("dtype", "mamba_ssm_cache_dtype"):
        values[name] = _dtype_name(values[name])
    if values["time_step_limit"] is not _BAD:
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
    values["extra"] = freeze(rest)
    return values


def _unwrap(d: Mapping[str, Any], faults: list[str]) -> tuple[Mapping[str, Any], FrozenMapping | None]:
    """The language model's keys, and what was around them."""
    keys = [key for key in _WRAPPER_KEYS if isinstance(d.get(key), Mapping)]
    if not keys or any(d.get(key) for key in (*_PATTERN_KEYS, "block_configs")):
        inner = dict(d)
        note = inner.pop(_WRAPPER_NOTE, None)
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
        return _BAD
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
    return value if _is_number(value) else None


def _read_limit(value: Any, name: str, faults: list[str]) -> Any:
    accepted = "two numbers [low, high]; high may be Infinity"
    bounds = [_read_float(bound) for bound in value] if isinstance(value, list | tuple) else []
    if len(bounds) != 2 or any(bound is None for bound in bounds):
        faults.append(f"{name}: found {value!r}; accepted: {accepted}")
        return _BAD
    return tuple(_finite_or_infinite(bound) for bound in bounds if bound is not None)


def _read_blocks(value: Any, name: str, faults: list[str]) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
        faults.append(f"{name}: found {value!r:.80}; accepted: a list with one mapping per layer")
        return _BAD
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
        letters = [_NAME_LETTERS.get(item, item if item in LETTER_NAMES else None)
                   if isinstance(item, str) else None for item in value]  # fmt: skip
        bad = [f"{item!r} at position {i}" for i, (item, ch) in enumerate(zip(value, letters, strict=True)) if not ch]
        if bad:
            accepted = ", ".join(_NAME_LETTERS)
            faults.append(f"{name}: found {', '.join(bad)} (counted from 0); accepted: {accepted}, or the letters M * - E")
            return None
        return ["".join(letter for letter in letters if letter)]
    faults.append(f"{name}: found {value!r:.80}; accepted: a string of the letters M * - E, or a list of names")
    return None


def _agreeing(found: dict[str, str], field: str, faults: list[str]) -> Any:
    """The one pattern that all sources give; '' if there is none."""
    if len(set(found.values())) > 1:
        said = " and ".join(f"{value!r} ({name})" for name, value in found.items())
        faults.append(f"{field}: found {said}; accepted: the same layers from each, or only one of them")
        return _BAD
    return next(iter(found.values()), "")


def _block_letters(blocks: Any, name: str, faults: list[str]) -> list[str] | None:
    if blocks is _BAD or not blocks or not any("block_type" in entry for entry in blocks):
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
        faults.append(f"hybrid_override_pattern: found nothing; accepted: letters M * - E, or one of {_PATTERN_KEYS[1:]}")
    values["hybrid_override_pattern"] = pattern if found else _BAD

    layers = rest.pop("num_hidden_layers", None)
    if layers is not None and not (_is_int(layers) and layers > 0):
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
    if steps and _is_int(count) and count != len(steps):
        faults.append(
            f"num_nextn_predict_layers: found {count}, but hybrid_override_pattern has {len(steps)} steps after '/'; "
            "accepted: equal"
        )
    for name in _MTP_PATTERN_KEYS:
        value = rest.pop(name, None)
        if value in (None, "", [], ()):
            continue
        parts = [part for part in _letters(value, name, faults) or () if part]
        found |= {f"{name}, step {i}" if i else name: part for i, part in enumerate(parts)}
        if len(parts) > 1 and _is_int(count) and count != len(parts):
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
    values["intermediate_size"] = _BAD
    if pattern is _BAD:
        return
    if len(widths) != pattern.count(MLP) or values["block_configs"]:
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
        values["head_dim"] = _default_head_dim(values["hidden_size"], heads)
        absent = not any(name in d for name in ("head_dim", *_ALIASES["head_dim"]))
        if absent and values["head_dim"] not in (0, 128) and _has(values, ATTENTION):
            faults.append(
                f"head_dim: found nothing; accepted: a positive integer, or null for hidden_size // num_attention_heads "
                f"= {values['head_dim']} (other programs take 128 when it is missing)"
            )


# -------------------------------------------------------------------- checking


def _has(values: Mapping[str, Any], letter: str) -> bool:
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
        found = "0 or nothing" if name in _SIZES and value == 0 and value is not False else repr(thaw(value))
        self.faults.append(f"{name}: found {found}{self.place}; accepted: {accepted}")

    def where(self, name: str, good: bool, accepted: str) -> bool:
        if self.values[name] is _BAD:
            return False
        if not good:
            self.fault(name, accepted)
        return good

    def positive(self, *names: str) -> bool:
        good = [self.where(n, _is_int(self.values[n]) and self.values[n] > 0, "a positive integer") for n in names]
        return all(good)

    def boolean(self, *names: str) -> None:
        for name in names:
            self.where(name, isinstance(self.values[name], bool), "true or false")

    def one_of(self, name: str, options: Sequence[Any], why: str = "") -> None:
        value = self.values[name]
        good = any(value == option and isinstance(value, type(option)) for option in options)
        self.where(name, good, " or ".join(map(repr, options)) + why)

    def number(self, name: str, good: Any, accepted: str) -> None:
        value = self.values[name]
        self.where(name, _is_number(value) and math.isfinite(value) and good(value), accepted)


def _faults(values: Mapping[str, Any]) -> list[str]:
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

    _check_pattern(check, "hybrid_override_pattern", "block_configs", needed=True)
    steps = values["num_nextn_predict_layers"]
    if check.where("num_nextn_predict_layers", _is_int(steps) and steps >= 0, "an integer, 0 or more"):
        if steps:
            _check_pattern(check, "mtp_hybrid_override_pattern", "mtp_block_configs", needed=True)
        else:
            check.where("mtp_hybrid_override_pattern", values["mtp_hybrid_override_pattern"] in ("", _BAD),
                        "nothing when num_nextn_predict_layers is 0")  # fmt: skip
            check.where("mtp_block_configs", values["mtp_block_configs"] == (),
                        "nothing when num_nextn_predict_layers is 0")  # fmt: skip
    _check_unused(check)
    if isinstance(values["extra"], Mapping):
        check.faults += _extra_faults(values["extra"], _has(values, ATTENTION))
    return list(dict.fromkeys(check.faults))


def _check_unused(check: _Check) -> None:
    """Values of block kinds that the pattern does not hold must at least be of their type."""
    reported = {fault.split(":")[0] for fault in check.faults}
    for name in (*_SIZES, "num_key_value_heads", "head_dim", "n_groups", "conv_kernel", "chunk_size",
                 "n_shared_experts", "n_group", "topk_group"):  # fmt: skip
        if name not in reported:
            check.where(name, _is_int(check.values[name]) and check.values[name] >= 0, "an integer, 0 or more")
    latent = check.values["moe_latent_size"]
    if "moe_latent_size" not in reported:
        check.where("moe_latent_size", latent is None or (_is_int(latent) and latent > 0), "a positive integer or null")
    for name in ("mamba_hidden_act", "mlp_hidden_act"):
        check.where(name, isinstance(check.values[name], str), "a name")
    if "routed_scaling_factor" not in reported:
        check.number("routed_scaling_factor", lambda x: True, "a number")
    if "time_step_limit" not in reported:
        _check_limit(check)


def _check_limit(check: _Check) -> None:
    limit = check.values["time_step_limit"]
    good = isinstance(limit, tuple) and len(limit) == 2 and all(map(_is_number, limit))
    good = good and 0 <= limit[0] < _INFINITE_ABOVE and limit[0] <= limit[1] and limit[1] > 0
    check.where("time_step_limit", good, "two numbers [low, high], 0 <= low <= high, low finite and high > 0")


def _check_tokens(check: _Check) -> None:
    vocab = check.values["vocab_size"]
    limit = vocab if _is_int(vocab) and vocab > 0 else math.inf

    def token(value: Any) -> bool:
        return _is_int(value) and 0 <= value < limit

    accepted = f"a token id from 0 to {limit - 1}" if limit is not math.inf else "a token id, 0 or more"
    for name in ("pad_token_id", "bos_token_id"):
        check.where(name, check.values[name] is None or token(check.values[name]), f"{accepted}, or null")
    eos = check.values["eos_token_id"]
    good = eos is None or token(eos) or (isinstance(eos, tuple) and all(map(token, eos)))
    check.where("eos_token_id", good, f"{accepted}, a list of them, or null")


def _check_pattern(check: _Check, pattern_name: str, blocks_name: str, *, needed: bool) -> None:
    values = check.values
    pattern, blocks = values[pattern_name], values[blocks_name]
    accepted = "a string of the letters M * - E, at least one"
    if not check.where(pattern_name, isinstance(pattern, str) and bool(pattern), accepted):
        return
    if bad := [f"{ch!r} at position {i}" for i, ch in enumerate(pattern) if ch not in LETTER_NAMES]:
        check.faults.append(f"{pattern_name}: found {', '.join(bad)} (counted from 0); accepted: the letters M * - E")
        return
    if blocks is _BAD:
        return
    if blocks and len(blocks) != len(pattern):
        check.faults.append(f"{blocks_name}: found {len(blocks)} entries; accepted: one for each of {len(pattern)} layers")
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
            overrides = _accepted_overrides(entry)
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
    if kind is not None and _NAME_LETTERS.get(kind) != letter:
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
        check.fault("n_group", f"a divisor of n_routed_experts {v['n_routed_experts']}, with two experts or more in each group")
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
            faults.append(f"{key}: found {thaw(value)!r}; accepted: null or rope_type 'default', there are no positions")
    return faults


# -------------------------------------------------------------------- presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A released model. Its numbers are the published ones where there are any."""

    name: str
    hub_ids: tuple[str, ...]
    """Checkpoints on the Hugging Face hub with these shapes."""
    read: bool
    """Whether `config` was read as the released file; otherwise it was put together from `source`."""
    source: str
    parameters: int
    """MTP included."""
    tensors: int
    config: FrozenMapping
    """What `NemotronHConfig.from_dict` is given, in the spelling of the released file where it was read."""


def _load_presets() -> Mapping[str, Preset]:
    presets = {}
    for file in (Path(__file__).parent / "presets").glob("*.json"):
        d = json.loads(file.read_text(encoding="utf-8"))
        presets[file.stem] = Preset(**d | {"hub_ids": tuple(d["hub_ids"]), "config": freeze(d["config"])})
    return dict(sorted(presets.items(), key=lambda item: item[1].parameters))


PRESETS: Mapping[str, Preset] = _load_presets()


def find_preset(name: str) -> Preset:
    """The preset of that name, or the one that lists that hub id (letter case does not matter)."""
    for preset in PRESETS.values():
        if name.lower() == preset.name or name.lower() in (hub_id.lower() for hub_id in preset.hub_ids):
            return preset
    raise ValueError(f"preset: found {name!r}; accepted: {', '.join(PRESETS)}, or a hub id of one of these")
