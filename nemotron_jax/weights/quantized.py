"""Quantised checkpoints as ModelOpt writes them, seen as bfloat16.

=====================  ==========================================================================================
algorithm              a weight (out, in) and what belongs to it
=====================  ==========================================================================================
FP8                    ``weight`` float8_e4m3fn (out, in), ``weight_scale`` float32, one number
NVFP4, W4A16_NVFP4     ``weight`` uint8 (out, in / 2): two codes a byte, the even input in the low four bits; bit 3 of
a code
                       is the sign, the others choose one of 0 .5 1 1.5 2 3 4 6. ``weight_scale`` float8_e4m3fn
                       (out, in / 16), ``weight_scale_2`` float32, one number
MIXED_PRECISION        each module has one of these, or none
=====================  ==========================================================================================

A weight is the product of its factors in float32, from left to right, rounded once to bfloat16. ``input_scale`` (of
activations) and ``k_scale``, ``v_scale`` (of a KV cache) are not weights: they are left out. Any other algorithm is
refused by name.
"""

import dataclasses
import fnmatch
import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.frozen import thaw
from nemotron_jax.parameters import Cut
from nemotron_jax.weights.huggingface import Checkpoint
from nemotron_jax.weights.source import FLOATS, Source, Tensor, listed

logger = logging.getLogger("nemotron_jax")

FILE = "hf_quant_config.json"
WEIGHT_FORMATS = {"FP8": "FP8", "NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4"}
GROUP = 16  # inputs that share one of NVFP4's scales
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")
_CACHE_SCALES = (".k_scale", ".v_scale")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What a checkpoint says about its quantisation.

    Attributes:
      where: the file that says so.
      algorithm: of every module that is not left out; MIXED_PRECISION: of each its own.
      layers: {module: algorithm} where each has its own.
      excluded: patterns of module names that are not quantised.
    """

    where: str
    algorithm: str
    layers: Mapping[str, str]
    excluded: tuple[str, ...]

    def format_of(self, module: str, canonical: str) -> str | None:
        """How a module's weight is to be stored: a value of WEIGHT_FORMATS; None: plain; "": nothing is said."""
        if any(fnmatch.fnmatchcase(module, p) or fnmatch.fnmatchcase(canonical, p) for p in self.excluded):
            return None
        if self.algorithm != "MIXED_PRECISION":
            return WEIGHT_FORMATS[self.algorithm]
        if not self.layers:
            return ""
        found = self.layers.get(module) or self.layers.get(canonical)
        return WEIGHT_FORMATS[found] if found else None


def read_scheme(folder: Path, config: NemotronHConfig) -> Scheme | None:
    """The quantisation that ``hf_quant_config.json`` or config.json declares; None where there is none.

    Raises:
      ValueError: naming a method or algorithm that is not known, or if the two files disagree.
    """
    found = []
    file = folder / FILE
    if file.is_file():
        try:
            d = json.loads(file.read_text(encoding="utf-8"))
            found.append(_scheme(str(file), d.get("quantization", d)))
        except (ValueError, AttributeError, TypeError) as error:
            if isinstance(error, UnknownScheme):
                raise
            raise ValueError(f"{file} cannot be read: {error!r}") from error
    if config.quantization_config is not None:
        d = thaw(config.quantization_config)
        where = f"{folder / 'config.json'}: quantization_config"
        method = d.get("quant_method", "modelopt")
        if method != "modelopt":
            raise UnknownScheme(
                f"{where}: found quant_method {method!r}, accepted 'modelopt' ({', '.join(WEIGHT_FORMATS)})"
            )
        found.append(_scheme(where, d))
    if len(found) == 2 and found[0] and found[1] and found[0].algorithm != found[1].algorithm:
        raise ValueError(
            f"{found[0].where} says {found[0].algorithm}, {found[1].where} says {found[1].algorithm}; accepted: one"
        )
    return next((scheme for scheme in found if scheme), None)


class UnknownScheme(ValueError):
    """A quantisation that is not read here."""


def _scheme(where: str, d: Mapping[str, Any]) -> Scheme | None:
    algorithm = d.get("quant_algo")
    groups = d.get("config_groups") or {}
    if algorithm is None and groups:
        algorithm = "MIXED_PRECISION"
    cache = d.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise UnknownScheme(f"{where}: found kv_cache_quant_algo {cache!r}, accepted null or 'FP8'")
    if algorithm is None:
        return None
    if algorithm not in (*WEIGHT_FORMATS, "MIXED_PRECISION"):
        raise UnknownScheme(
            f"{where}: found quant_algo {algorithm!r}, accepted {', '.join(WEIGHT_FORMATS)}, MIXED_PRECISION"
        )
    sizes = {d.get("group_size")}
    layers: dict[str, str] = {}
    for module, entry in (d.get("quantized_layers") or {}).items():
        own = entry.get("quant_algo")
        if own not in WEIGHT_FORMATS:
            raise UnknownScheme(f"{where}: found quant_algo {own!r} of {module}, accepted {', '.join(WEIGHT_FORMATS)}")
        layers[module] = own
        sizes.add(entry.get("group_size"))
    for name, group in groups.items():
        weights = group.get("weights") or {}
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type", "float") != "float" or (bits, size) not in ((8, None), (4, GROUP)):
            raise UnknownScheme(
                f"{where}: {name} has weights of {weights}, accepted float of 8 bits, or of 4 in groups of {GROUP}"
            )
    if wrong := sizes - {None, GROUP, 0}:
        raise UnknownScheme(f"{where}: found group_size {sorted(map(str, wrong))}, accepted {GROUP}")
    excluded = (*(d.get("exclude_modules") or ()), *(d.get("ignore") or ()))
    return Scheme(where, algorithm, layers, tuple(excluded))


def open_plain_or_quantized(folder: Path, config: NemotronHConfig) -> Source:
    """The tensors of a folder in Hugging Face layout, quantised ones as bfloat16.

    Raises:
      ValueError: for an unknown scheme; for quantised tensors that no file speaks of; for a weight whose scales are
        missing, or of another dtype or shape; for scales without a weight. All faults are listed.
    """
    scheme = read_scheme(folder, config)
    checkpoint = Checkpoint(folder)
    packed = [t for name, t in checkpoint.tensors.items() if name.endswith(".weight") and t.dtype not in FLOATS]
    if scheme is None:
        if any(t.dtype.startswith("F8") for t in packed) or any(
            name.endswith(".weight_scale") for name in checkpoint.tensors
        ):
            example = (
                packed[0] if packed else next(t for n, t in checkpoint.tensors.items() if n.endswith(".weight_scale"))
            )
            found = f"quantised tensors such as {example.name} ({example.dtype})"
            raise UnknownScheme(
                f"{checkpoint.where} holds {found}, but neither its config.json nor {FILE} names the scheme; "
                f"accepted: ModelOpt's {', '.join(WEIGHT_FORMATS)}"
            )
        return checkpoint
    return Dequantized(checkpoint, scheme)


class Dequantized(Source):
    """A quantised checkpoint seen through its scales. Cuts may fall anywhere, also inside a group of 16."""

    quantized = True

    def __init__(self, inner: Checkpoint, scheme: Scheme):
        self.inner, self.scheme, self.where = inner, scheme, inner.where
        self.metadata = inner.metadata
        self.tensors: dict[str, Tensor] = {}
        self._formats: dict[str, str] = {}
        faults: list[str] = []
        left_out = 0
        for name, t in inner.tensors.items():
            if name.endswith(_CACHE_SCALES):
                left_out += 1
                continue
            if name.endswith(_SCALES):
                weight = name.rpartition(".")[0] + ".weight"
                if weight not in inner.tensors or inner.tensors[weight].dtype in FLOATS:
                    faults.append(f"{t.name} has no quantised weight")
                left_out += name.endswith(".input_scale")
                continue
            self.tensors[name] = t
            if t.dtype in FLOATS or not name.endswith(".weight"):
                continue
            found = {"F8_E4M3": "FP8", "U8": "NVFP4"}.get(t.dtype)
            if found is None:
                continue  # an integer or other float8 tensor: refused where dtypes are checked
            module, canonical = t.name.removesuffix(".weight"), name.removesuffix(".weight")
            declared = scheme.format_of(module, canonical)
            if declared not in (found, ""):
                faults.append(f"{t.name} is stored as {found}, {scheme.where} says {declared or 'not quantised'}")
            missing = len(faults)
            self._check_scales(name, t, found, faults)
            if len(faults) == missing:
                self._formats[name] = found
                shape = t.shape if found == "FP8" else (t.shape[0], 2 * t.shape[1])
                self.tensors[name] = dataclasses.replace(t, dtype="BF16", shape=shape)
        if faults:
            raise ValueError(f"{self.where}: {listed(faults)}")
        kinds = ", ".join(f"{list(self._formats.values()).count(k)} {k}" for k in sorted(set(self._formats.values())))
        logger.warning(
            "%s: %s tensors are dequantised to bfloat16; %d scales that are no weights are skipped",
            self.where,
            kinds,
            left_out,
        )

    def _check_scales(self, name: str, t: Tensor, found: str, faults: list[str]) -> None:
        if len(t.shape) != 2 or (found == "NVFP4" and 2 * t.shape[1] % GROUP):
            faults.append(
                f"{t.name} has shape {t.shape}, accepted (out, in)"
                + (f", in a multiple of {GROUP}" if found == "NVFP4" else "")
            )
            return
        needed: dict[str, tuple[str, tuple[int, ...]]] = {"_scale": ("F32", ())}
        if found == "NVFP4":
            needed = {"_scale": ("F8_E4M3", (t.shape[0], 2 * t.shape[1] // GROUP)), "_scale_2": ("F32", ())}
        for suffix, (dtype, shape) in needed.items():
            scale = self.inner.tensors.get(name + suffix)
            if scale is None:
                faults.append(f"missing {t.name}{suffix}: a quantised weight means nothing without it")
            elif scale.dtype != dtype or (scale.shape if shape else scale.shape not in ((), (1,)) or ()) != shape:
                faults.append(f"{scale.name} is {scale.dtype} {scale.shape}, accepted {dtype} {shape}")

    def read_block(self, name: str, dim: int, lo: int, hi: int, cuts: Sequence[Cut]) -> None:
        if name not in self._formats:
            self.inner.read_block(name, dim, lo, hi, cuts)
            return
        codes = self._rows(name, lo, hi)
        if self._formats[name] == "FP8":
            values = self._fp8_values(name)[codes]
        else:
            groups = self._rows(f"{name}_scale", lo, hi).astype(np.uint16) << 4
            index = np.empty((*codes.shape, 2), np.uint16)
            index[..., 0], index[..., 1] = codes & 15, codes >> 4
            index = index.reshape(hi - lo, -1, GROUP)
            index |= groups[:, :, None]
            values = self._nvfp4_values(name)[index].reshape(hi - lo, -1)
        if dim == 0:
            (cut,) = cuts
            cut.out[lo - cut.start : hi - cut.start] = values
        else:
            for cut in cuts:
                cut.out[lo:hi] = values[:, cut.start : cut.stop]

    def _rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        return self.inner.rows(name, lo, hi).view(np.uint8)

    def _factor(self, name: str) -> np.float32:
        value = self.inner.rows(name).reshape(())[()]
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"{self.where}: {self.inner.tensors[name].name} is {value}, accepted a finite number from 0 on"
            )
        return np.float32(value)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - lives as long as the file is read
    def _fp8_values(self, name: str) -> np.ndarray:
        """The 256 values of a tensor's codes, bfloat16."""
        return (_e4m3() * self._factor(f"{name}_scale")).astype(ml_dtypes.bfloat16)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - as above
    def _nvfp4_values(self, name: str) -> np.ndarray:
        """The values of (scale code, weight code) pairs, bfloat16, at 16 * scale code + weight code."""
        weights = np.concatenate([E2M1, -E2M1])
        products = weights[None, :] * _e4m3()[:, None]  # exact: six bits
        return (products * self._factor(f"{name}_scale_2")).astype(ml_dtypes.bfloat16).reshape(-1)

    def close(self) -> None:
        self.inner.close()
        self._fp8_values.cache_clear()
        self._nvfp4_values.cache_clear()


@functools.cache
def _e4m3() -> np.ndarray:
    """The float32 values of the 256 codes."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
