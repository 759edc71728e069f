"""The configuration of a Nemotron-H model: one frozen value, whatever spelling it was read from.

`NemotronHConfig` uses Hugging Face's field names. It is hashable (so it can be a static argument of `jax.jit`), it is
checked when it is made, and it keeps what it does not understand, so that reading and writing loses nothing. Plain
Python: nothing here imports jax. `config_reading` has the spellings, `config_checks` what is refused.

Layer kinds are letters: ``M`` Mamba-2, ``*`` attention, ``-`` dense MLP, ``E`` mixture of experts.

**Spellings that are read**

=========================  =============================================================================================
meaning                    keys, in any combination; two that disagree are refused
=========================  =============================================================================================
list of layers             ``hybrid_override_pattern`` / ``hybrid_layer_pattern`` (letters), ``layers_block_type`` /
                           ``layer_types`` (names, old: mamba, attention; new: linear_attention, full_attention; moe,
                           mlp), the ``block_type`` of each of ``block_configs``. Null or empty means absent.
separators                 ``|`` (pipeline stages) is dropped. ``/`` starts a multi-token-prediction step, as Megatron
                           writes it: ``M-M*/*E/*E`` is the model ``M-M*`` with two steps of ``*E`` (all steps alike).
MTP layers                 ``mtp_hybrid_override_pattern``, ``mtp_layers_block_type``, ``mtp_block_configs``, or ``/``;
                           with steps but none of these: ``*E``, as transformers does. Without
                           ``num_nextn_predict_layers`` there are as many steps as ``/`` parts, so usually none; with no
                           steps the list is kept, unused.
number of layers           ``num_hidden_layers`` may be absent or null; if given it must equal the length of the list
norm epsilon               ``layer_norm_epsilon``, ``norm_eps``, ``rms_norm_eps`` (transformers reads only the first and
                           silently takes 1e-5 for a file that has only another; here every one counts)
attention head size        ``head_dim``, ``attention_head_dim``; null: hidden_size // num_attention_heads
limits of dt               ``time_step_limit`` / ``mamba_dt_limit``: absent, [a, b], bare ``Infinity``, "Infinity",
                           {"__float__": "Infinity"}; anything above 3e38 (such as 1e308) is infinity
Mamba                      ``n_groups`` ``conv_kernel`` ``chunk_size`` ``use_conv_bias`` or ``mamba_n_groups``
                           ``mamba_d_conv`` ``mamba_chunk_size`` ``mamba_conv_bias``
dtype                      ``dtype``, ``torch_dtype``; with or without ``torch.``; absent: bfloat16
experts                    ``n_routed_experts``, ``num_local_experts``; ``moe_latent_size`` null or 0: no latent
per-layer values           ``block_configs`` / ``mtp_block_configs`` (Puzzle); ``intermediate_size`` as a list
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from nemotron_jax.config_checks import (
    ATTENTION,
    LETTER_NAMES,
    MAMBA,
    MLP,
    MOE,
    SIZES,
    ConfigError,
    accepted_overrides,
    default_head_dim,
    faults_of,
    finite_or_infinite,
)
from nemotron_jax.config_reading import MTP_PATTERN_KEYS, WRAPPER_NOTE, architectures, read_fields
from nemotron_jax.frozen import FrozenMapping, freeze, thaw
from nemotron_jax.presets import PRESETS, Preset, find_preset

__all__ = [
    "ATTENTION", "LETTER_NAMES", "MAMBA", "MLP", "MOE", "PRESETS", "ConfigError", "FrozenMapping", "NemotronHConfig",
    "Preset", "find_preset",
]  # fmt: skip

# Written instead of infinity when a limit must be named: valid JSON, and torch.clamp takes it in float32 and bfloat16.
_LARGEST_BFLOAT16 = 3.3895313892515355e38


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
            self._fill(head_dim=default_head_dim(self.hidden_size, self.num_attention_heads))
        if isinstance(self.eos_token_id, list | tuple):
            self._fill(eos_token_id=tuple(self.eos_token_id) or None)
        if isinstance(self.time_step_limit, list | tuple):
            self._fill(time_step_limit=tuple(self.time_step_limit))
        if self.moe_latent_size == 0:
            self._fill(moe_latent_size=None)
        for name in ("block_configs", "mtp_block_configs", "quantization_config", "wrapper", "extra"):
            self._fill(**{name: freeze(getattr(self, name))})
        if faults := faults_of({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}):
            raise ConfigError(faults)
        self._fill(
            layer_norm_epsilon=float(self.layer_norm_epsilon),
            routed_scaling_factor=float(self.routed_scaling_factor),
            time_step_limit=tuple(finite_or_infinite(bound) for bound in self.time_step_limit),
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
        values = read_fields(d, _DEFAULTS, faults)
        faults += faults_of(values)
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
        except FileNotFoundError as error:
            fault = "cannot be read: there is none; accepted: the folder of a checkpoint, which has one, or the file"
            raise ConfigError([fault], where) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"cannot be read: {getattr(error, 'strerror', None) or error}"], where) from error
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
            "architectures": architectures(self.model_type),
            "model_type": self.model_type,
            "hybrid_override_pattern": self.hybrid_override_pattern,
            "num_hidden_layers": self.num_hidden_layers,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in omitted or (field.name in SIZES and value == 0):
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
        mtp_keys = (*MTP_PATTERN_KEYS, "mtp_block_configs") if self.num_nextn_predict_layers else ()
        d |= {key: thaw(value) for key, value in self.extra.items() if key not in mtp_keys}
        if self.wrapper is not None:
            d[WRAPPER_NOTE] = thaw(self.wrapper)
        return d

    def to_json(self, path: str | Path) -> None:
        """Writes `to_dict` as strict JSON to a file, or as config.json into an existing folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


# Absent is not the same as null for these: other readers have a default for the missing key.
_WRITTEN_AS_NULL = ("pad_token_id", "bos_token_id", "eos_token_id", "moe_latent_size")
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(NemotronHConfig)
    if field.default is not dataclasses.MISSING
}


@functools.lru_cache(maxsize=1024)
def _overridden(config: NemotronHConfig, entry: FrozenMapping) -> NemotronHConfig:
    changes = {k: v for k, v in accepted_overrides(entry).items() if getattr(config, k) != v}
    return dataclasses.replace(config, **changes) if changes else config
