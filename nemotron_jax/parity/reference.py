"""What a PyTorch reference (or a saved run of our own) holds: names, shapes, and which variant of them is read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

INPUTS = ("ids", "pad_ids", "pad_mask")
LOGITS = ("logits", "full_logits", "greedy_logits", "pad_logits", "pad_greedy_logits")
STREAM = ("embed", "layer", "mixer", "final")
STATES = ("conv", "ssm", "k", "v")
EXPERTS = ("topk_idx", "topk_w", "topk_gap")
GREEDY = ("greedy", "greedy_margin", "pad_greedy")
HELDOUT = ("heldout_ids", "heldout_nats")
ORACLE = ("oracle/logits",)
# In the file for other purposes: no array of the model to compare, or one that only another tool reads.
OTHER = ("report", "pad_greedy_margin", "oracle/conv", "oracle/ssm", "oracle/mtp_logits")
KNOWN = (*INPUTS, *STREAM, *LOGITS, *STATES, *EXPERTS, *GREEDY, *HELDOUT, *ORACLE)
VARIANTS = ("hf", "fixed", "kernel")


@dataclasses.dataclass(frozen=True)
class Reference:
    """The arrays of one variant.

    Attributes:
      source: where they came from, for messages.
      variant: which variant was asked for.
      arrays: by name without the variant's prefix.
      skipped: names that a reference may hold and this one does not.
      unknown: names in the file that nothing here reads, without those of other variants.
      others: arrays of other variants, by their full name.
      report: what the writer noted (pattern, dtype, versions, ...).
    """

    source: str
    variant: str
    arrays: Mapping[str, np.ndarray]
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]
    others: Mapping[str, np.ndarray]
    report: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def only(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {name: self.arrays[name] for name in names if name in self.arrays}


def read_reference(source: "str | Path | Mapping[str, np.ndarray]", variant: str = "fixed") -> Reference:
    """Read a reference. Of each name, the one with the variant's prefix comes before the bare one.

    Args:
      source: an .npz file, or its arrays by name.
      variant: which computation to compare with: ``hf`` as installed, ``fixed``, ``kernel``.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not an .npz; no array of this variant; ids absent; shapes that contradict each other. All at once.
    """
    if isinstance(source, Mapping):
        name, raw = "arrays", dict(source)
    else:
        name = str(source)
        if not Path(source).is_file():
            raise FileNotFoundError(f"no reference file {name}")
        try:
            with np.load(source, allow_pickle=False) as file:
                raw = {key: file[key] for key in file.files}
        except Exception as error:
            # NumPy takes whatever it does not know for pickled data, and advises to allow that.
            reason = "" if "pickle" in str(error) else f" ({error})"
            raise ValueError(f"{name}: found a file that is no .npz{reason}, accepted an .npz of arrays") from error
    prefixes = sorted({key.partition("/")[0] for key in raw if "/" in key} - {"oracle"})
    arrays: dict[str, np.ndarray] = {}
    for key in KNOWN:
        for candidate in (f"{variant}/{key}", key):
            if candidate in raw:
                arrays[key] = raw[candidate]
                break
    if not set(arrays) & set((*STREAM, *LOGITS, *STATES, *HELDOUT, "greedy", "topk_idx", "pad_greedy")):
        raise ValueError(f"{name}: holds nothing of variant {variant!r}; accepted variants here: {prefixes or 'none'}")
    used = {f"{variant}/{key}" for key in KNOWN} | set(KNOWN) | set(OTHER) | {f"{variant}/{key}" for key in OTHER}
    others = {key: value for key, value in raw.items() if key not in used and key.partition("/")[0] in prefixes}
    unknown = tuple(key for key in raw if key not in used and key not in others)
    unknown += tuple(key for key in others if key.startswith(f"{variant}/"))
    skipped = tuple(key for key in KNOWN if key not in arrays)
    report = json.loads(str(raw["report"])) if "report" in raw else {}
    faults = _faults(arrays)
    if faults:
        raise ValueError(f"{name} (variant {variant!r}): " + "; ".join(faults))
    return Reference(name, variant, arrays, skipped, unknown, others, report)


def _faults(arrays: dict[str, np.ndarray]) -> list[str]:
    """Contradictions between the arrays, each in words."""
    faults = []
    ids, pads = arrays.get("ids"), arrays.get("pad_ids")
    for name in ("ids", "pad_ids", "pad_mask", "greedy", "pad_greedy", "heldout_ids"):
        a = arrays.get(name)
        if a is not None and (a.ndim != 2 or a.dtype.kind not in "iub"):
            faults.append(f"{name}: found {a.dtype}{a.shape}, accepted integers of two dimensions")
    prompt = (*STREAM, "logits", "full_logits", *STATES, "topk_idx", "greedy")
    needs = [name for name in prompt if name in arrays]
    if needs and ids is None:
        faults.append(f"ids is missing, which {', '.join(needs)} were computed from")
    if "pad_logits" in arrays or "pad_greedy" in arrays:
        if pads is None or "pad_mask" not in arrays:
            faults.append("pad_ids or pad_mask is missing, which the pad_* arrays were computed from")
        elif pads.shape != arrays["pad_mask"].shape:
            faults.append(f"pad_mask: found shape {arrays['pad_mask'].shape}, accepted that of pad_ids, {pads.shape}")
        elif pads.ndim == 2 and not arrays["pad_mask"].astype(bool).any(1).all():
            faults.append("pad_mask: found a row without a token, accepted at least one in each")
    for name, of in (("full_logits", "greedy"), ("greedy_logits", "greedy"), ("pad_greedy_logits", "pad_greedy")):
        if name in arrays and of not in arrays:
            faults.append(f"{of} is missing, the tokens that {name} continues with")
    if ("heldout_ids" in arrays) != ("heldout_nats" in arrays):
        faults.append("heldout_ids and heldout_nats: found one of them, accepted both or none")
    if faults or ids is None:
        return faults
    batch, tokens = ids.shape
    new = arrays["greedy"].shape[1] if "greedy" in arrays else 0
    expected = {"embed": (batch, tokens), "final": (batch, tokens), "logits": (batch, tokens)}
    expected |= {
        "full_logits": (batch, tokens + new),
        "greedy": (batch, new),
        "greedy_logits": (batch, new),
        "greedy_margin": (batch, new),
    }
    for name, shape in expected.items():
        if name in arrays and arrays[name].shape[:2] != shape:
            faults.append(f"{name}: found shape {arrays[name].shape}, accepted {shape} first, from ids and greedy")
    for name in ("layer", "mixer"):
        if name in arrays and arrays[name].shape[1:3] != (batch, tokens):
            faults.append(f"{name}: found shape {arrays[name].shape}, accepted [layers, {batch}, {tokens}, hidden]")
    return faults
