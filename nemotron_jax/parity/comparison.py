"""``compare``: every array of a reference against ours, what that says of each layer, and whether it will do."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemotron_jax.fusion import KINDS
from nemotron_jax.parity import metrics
from nemotron_jax.parity.metrics import Difference, Distributions, Experts, difference
from nemotron_jax.parity.record import describe, record
from nemotron_jax.parity.reference import HELDOUT, INPUTS, LOGITS, STATES, STREAM, VARIANTS, Reference, read_reference
from nemotron_jax.runtime import NemotronH

logger = logging.getLogger("nemotron_jax")

TOLERANCE = 1e-4  # float32: largest absolute difference of logits, layers and states
TIE = 2e-4  # a greedy token counts as either of the two best where they are closer than this
HELDOUT_TOLERANCE = {"float32": 1e-4, "narrow": 2e-3}  # nats per token
NARROW_FACTOR = 1.05  # narrow dtypes: relative rms error against float64, over the larger of PyTorch's variants


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One line of the per-layer table.

    Attributes:
      layer: 0-based block; -1 the embedding; the number of blocks: the final norm.
      kind: in words.
      stream: difference of the residual stream behind it (None where the reference has none).
      mixer: difference of the block's own contribution.
      states: name -> difference of the states that the block leaves after the prompt.
    """

    layer: int
    kind: str
    stream: Difference | None = None
    mixer: Difference | None = None
    states: Mapping[str, Difference] = dataclasses.field(default_factory=dict)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of anything that belongs to the block."""
        return max((d.max_abs for d in (self.stream, self.mixer, *self.states.values()) if d is not None), default=0.0)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Our greedy choices on the stored tokens.

    Attributes:
      matches, total: how many count as the stored ones, of how many.
      ties: how many stored margins are below the tie rule's limit.
      divergence: array name -> per row, the first position where our choice is not the stored token (None: none).
    """

    matches: int = 0
    total: int = 0
    ties: int = 0
    divergence: Mapping[str, tuple[int | None, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class NarrowRule:
    """The rule for bfloat16 and float16: relative rms error against float64 over the whole case.

    Attributes:
      ours: our error in one forward pass over prompt and greedy tokens.
      pytorch: variant -> its error, over the positions whose prefix is the oracle's.
      limit: 1.05 times the larger of ``fixed`` and ``kernel``.
      steps: the same errors where the greedy tokens came from cached steps, ours under ``ours``. Judged
        alike.
    """

    ours: float
    pytorch: Mapping[str, float]
    limit: float
    steps: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.ours <= self.limit and self.steps.get("ours", 0.0) <= self.steps_limit

    @property
    def steps_limit(self) -> float:
        return NARROW_FACTOR * max((self.steps[v] for v in ("fixed", "kernel") if v in self.steps), default=math.inf)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
      source, variant: the reference.
      run: what ran on our side (dtype, mesh, fusion, plan, versions).
      tolerance: largest absolute difference accepted; None where the narrow rule, or none, applies.
      arrays: name -> difference, of everything compared.
      layers: the per-layer table.
      within_tolerance: the verdict; None where no rule applies.
      first_layer_beyond_tolerance: 0-based block, -1 embedding, number of blocks: final norm, None: none.
      greedy: greedy tokens, teacher forced.
      distributions: next-token distributions, by array.
      experts: chosen experts; None where there are none to compare.
      heldout: (ours, the reference's) loss on held-out text in nats per token; None where the reference has none.
      narrow: the rule for narrow dtypes; None where it does not apply.
      skipped: names that the reference does not hold, or that ours does not.
      unknown: names in the reference's file that nothing here reads.
      problems: why the comparison failed, in words; empty where it did not.
    """

    source: str
    variant: str
    run: Mapping[str, Any]
    tolerance: float | None
    arrays: Mapping[str, Difference]
    layers: tuple[LayerRow, ...]
    within_tolerance: bool | None
    first_layer_beyond_tolerance: int | None
    greedy: Greedy
    distributions: Mapping[str, Distributions]
    experts: Experts | None
    heldout: tuple[float, float] | None
    narrow: NarrowRule | None
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed (``within_tolerance`` may be None)."""
        return not self.problems

    @property
    def max_abs_logit_error(self) -> float | None:
        """Over every array of logits that was compared; None where there is none."""
        return max((self.arrays[name].max_abs for name in LOGITS if name in self.arrays), default=None)

    @property
    def relative_rms_logit_error(self) -> float | None:
        """Of ``full_logits`` where the reference has them, else of the first array of logits that it has."""
        for name in ("full_logits", *LOGITS):
            if name in self.arrays:
                return self.arrays[name].relative_rms
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON does not know become None."""
        d = dataclasses.asdict
        heldout = None
        if self.heldout is not None:
            heldout = {
                "nats": self.heldout[0],
                "reference": self.heldout[1],
                "difference": self.heldout[0] - self.heldout[1],
            }
        result = {
            "reference": self.source,
            "variant": self.variant,
            **self.run,
            "tolerance": self.tolerance,
            "within_tolerance": self.within_tolerance,
            "max_abs_logit_error": self.max_abs_logit_error,
            "relative_rms_logit_error": self.relative_rms_logit_error,
            "greedy_matches": self.greedy.matches,
            "greedy_total": self.greedy.total,
            "greedy_ties": self.greedy.ties,
            "greedy_divergence": {k: list(v) for k, v in self.greedy.divergence.items()},
            "first_layer_beyond_tolerance": self.first_layer_beyond_tolerance,
            "arrays": {name: d(value) for name, value in self.arrays.items()},
            "layers": [d(row) for row in self.layers],
            "distributions": {name: d(value) for name, value in self.distributions.items()},
            "experts": None if self.experts is None else d(self.experts),
            "heldout": heldout,
            "narrow": None if self.narrow is None else d(self.narrow),
            "skipped": list(self.skipped),
            "unknown": list(self.unknown),
            "problems": list(self.problems),
        }
        return _plain(result)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def compare(
    ours: "NemotronH | str | Path | Mapping[str, np.ndarray]",
    reference: "str | Path | Mapping[str, np.ndarray] | Reference",
    *,
    variant: str = "fixed",
    tolerance: float | None = None,
) -> Comparison:
    """Compare a model (which is run), or a saved run, with a reference.

    Args:
      ours: a model with weights; or a run saved by ``save_run``, as a path or as arrays.
      reference: what ``scripts/dump_pytorch_reference.py`` or ``save_run`` wrote.
      variant: of the reference's computations, which one to compare with.
      tolerance: largest absolute difference of logits, layers and states. By default 1e-4 where both sides are float32;
        narrower ones are judged against the reference's float64 oracle, or not at all without one.

    Raises:
      ValueError: for a reference that does not fit the model.
    """
    if not isinstance(reference, Reference):
        reference = read_reference(reference, variant)
    if isinstance(ours, NemotronH):
        check_fit(ours, reference)
        found = record(ours, reference.arrays, set(reference.arrays))
        run = describe(ours, reference.arrays) if "ids" in reference else {}
    else:
        mine = read_reference(ours, variant)
        found, run = dict(mine.arrays), dict(mine.report)
        for name in INPUTS:
            if name in mine and name in reference and not np.array_equal(mine[name], reference[name]):
                raise ValueError(
                    f"{name}: {mine.source} and {reference.source} ran other tokens; only runs of the same ones compare"
                )
    return compare_arrays(found, reference, run, tolerance=tolerance)


def check_fit(model: NemotronH, reference: Reference) -> None:
    """Refuse a reference that was not written from a model of this shape, naming every array that does not fit."""
    config, faults = model.config, []
    for name in ("ids", "pad_ids", "greedy", "pad_greedy", "heldout_ids"):
        a = reference.arrays.get(name)
        if a is not None and a.size and not (0 <= a.min() and a.max() < config.vocab_size):
            faults.append(
                f"{name}: found ids {a.min()} to {a.max()}, accepted 0 to {config.vocab_size - 1} (vocab_size)"
            )
    pattern = config.hybrid_override_pattern
    expected = {"layer": {0: len(pattern), -1: config.hidden_size}, "mixer": {0: len(pattern), -1: config.hidden_size}}
    expected |= {name: {-1: config.hidden_size} for name in ("embed", "final")}
    expected |= {name: {-1: config.vocab_size} for name in LOGITS}
    expected |= {name: {0: pattern.count("M")} for name in ("conv", "ssm")}
    expected |= {name: {0: pattern.count("*")} for name in ("k", "v")}
    expected |= {"topk_idx": {0: pattern.count("E")}}
    for name, sizes in expected.items():
        for dim, size in sizes.items():
            if name in reference and reference[name].shape[dim] != size:
                faults.append(f"{name}: found {reference[name].shape[dim]} at dimension {dim}, accepted {size}")
    if faults:
        raise ValueError(f"{reference.source} was not written from this model: " + "; ".join(faults))


def compare_arrays(
    found: Mapping[str, np.ndarray], reference: Reference, run: Mapping[str, Any], *, tolerance: float | None = None
) -> Comparison:
    """The comparison itself, of two sets of arrays.

    Args:
      found: our arrays.
      reference: theirs.
      run: what ran on our side; ``dtype`` and ``pattern`` are read here.
      tolerance: as in :func:`compare`.
    """
    dtype = str(run.get("dtype", "float32"))
    narrow = dtype != "float32" or _is_narrow(reference)
    if tolerance is None and not narrow:
        tolerance = TOLERANCE
    absent = [n for n in (*STREAM, *LOGITS, *STATES, "topk_idx") if n in reference and n not in found]
    pairs = {n: _pair(n, found, reference) for n in (*STREAM, *STATES, *LOGITS) if n in found and n in reference}
    arrays = {name: difference(*pair) for name, pair in pairs.items()}
    pattern = str(run.get("pattern") or reference.report.get("pattern") or "")
    layers = _layers(pairs, pattern)
    logits = {name: tuple(x.reshape(-1, x.shape[-1]) for x in pair) for name, pair in pairs.items() if name in LOGITS}
    distributions = {
        name: value for name, pair in logits.items() if (value := metrics.distributions(*pair)) is not None
    }
    chosen = (
        metrics.experts(dict(found), dict(reference.arrays))
        if "topk_idx" in found and "topk_idx" in reference
        else None
    )
    greedy = _greedy(found, reference)
    heldout = None
    if all(name in reference for name in HELDOUT) and "heldout_nats" in found:
        heldout = float(found["heldout_nats"]), float(reference["heldout_nats"])
    rule = _narrow_rule(found, reference) if narrow else None

    problems, within, first = [], None, None
    if tolerance is not None:
        beyond = {name: d.max_abs for name, d in arrays.items() if not d.max_abs <= tolerance}
        within = not beyond if arrays else None
        first = next((row.layer for row in layers if not row.max_abs <= tolerance), None)
        problems += [f"{name} is off by {value:.3g}, accepted {tolerance:g}" for name, value in beyond.items()]
        if greedy.matches < greedy.total and not narrow:
            problems.append(f"{greedy.total - greedy.matches} of {greedy.total} greedy tokens differ")
    elif rule is not None:
        within = rule.holds
        if not within:
            problems.append(f"relative rms error {rule.ours:.4g} against float64, accepted {rule.limit:.4g}")
            if "ours" in rule.steps:
                problems.append(f"the same of cached steps: {rule.steps['ours']:.4g}, accepted {rule.steps_limit:.4g}")
    if heldout is not None and tolerance != math.inf:
        accepted = HELDOUT_TOLERANCE["narrow" if narrow else "float32"]
        if not abs(heldout[0] - heldout[1]) <= accepted:
            problems.append(
                f"held-out loss {heldout[0]:.6f}, the reference's {heldout[1]:.6f}, accepted within {accepted:g}"
            )
    return Comparison(
        reference.source, reference.variant, dict(run), tolerance, arrays, layers, within, first, greedy, distributions,
        chosen, heldout, rule, (*reference.skipped, *absent), reference.unknown, tuple(problems),
    )  # fmt: skip


def _pair(name: str, found: Mapping[str, np.ndarray], reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """The parts of both sides that mean something."""
    a, b = found[name], reference[name]
    if name == "conv":  # a reference may keep more of the past than the next token needs
        width = min(a.shape[-1], b.shape[-1])
        a, b = a[..., a.shape[-1] - width :], b[..., b.shape[-1] - width :]
    elif name == "pad_logits":
        real = reference["pad_mask"].astype(bool)
        a, b = a[real], b[real]
    if a.shape != b.shape:
        raise ValueError(f"{name}: found shape {b.shape} in {reference.source}, accepted {a.shape}")
    return a, b


def _layers(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], pattern: str) -> tuple[LayerRow, ...]:
    """From the embedding to the final norm."""
    rows = []
    if "embed" in pairs:
        rows.append(LayerRow(-1, "embedding", difference(*pairs["embed"])))
    count = max((len(pairs[n][0]) for n in ("layer", "mixer") if n in pairs), default=len(pattern))
    if not len(pattern) == count:
        pattern = "?" * count
    seen = {"M": 0, "*": 0}
    for i, kind in enumerate(pattern):
        parts = {n: difference(pairs[n][0][i], pairs[n][1][i]) for n in ("layer", "mixer") if n in pairs}
        states: dict[str, Difference] = {}
        if kind in seen:
            names = ("conv", "ssm") if kind == "M" else ("k", "v")
            states = {n: difference(pairs[n][0][seen[kind]], pairs[n][1][seen[kind]]) for n in names if n in pairs}
            seen[kind] += 1
        rows.append(LayerRow(i, KINDS.get(kind, "unknown"), parts.get("layer"), parts.get("mixer"), states))
    if "final" in pairs:
        rows.append(LayerRow(count, "final norm", difference(*pairs["final"])))
    return tuple(rows)


def _greedy(found: Mapping[str, np.ndarray], reference: Reference) -> Greedy:
    matches = total = ties = 0
    divergence = {}
    for name in ("greedy", "pad_greedy"):
        logits = f"{name}_logits"
        if name not in reference or logits not in found:
            continue
        stored, choice = reference[name], found[logits].argmax(-1)
        best = margin = None
        if logits in reference:
            best, margin = metrics.two_best(reference[logits])
        elif name == "greedy" and "full_logits" in reference:
            t = reference["ids"].shape[1]
            best, margin = metrics.two_best(reference["full_logits"][:, t - 1 : t - 1 + stored.shape[1]])
        if f"{name}_margin" in reference:
            margin = reference[f"{name}_margin"]
        good = metrics.greedy_matches(choice, stored, margin, best, TIE)
        good &= np.isfinite(found[logits]).all(-1)
        matches, total = matches + int(good.sum()), total + good.size
        ties += 0 if margin is None else int((margin < TIE).sum())
        differs = choice != stored
        divergence[name] = tuple(int(row.argmax()) if row.any() else None for row in differs)
    return Greedy(matches, total, ties, divergence)


def _is_narrow(reference: Reference) -> bool:
    """Whether a narrow dtype computed the reference: its writer says so, or all activations are bfloat16 values."""
    if reference.report.get("dtype"):
        return reference.report["dtype"] != "float32"
    kept = [reference[name] for name in ("embed", "layer", "mixer") if name in reference]
    if len(kept) < 2 or any(a.dtype != np.float32 for a in kept):
        return False
    return all(not (np.ascontiguousarray(a).view(np.uint32) & 0xFFFF).any() for a in kept)


def _narrow_rule(found: Mapping[str, np.ndarray], reference: Reference) -> NarrowRule | None:
    """Errors of ours and of PyTorch's variants against the float64 oracle, which follows ``fixed``'s greedy tokens."""
    oracle = reference.arrays.get("oracle/logits")
    if oracle is None or "full_logits" not in found:
        return None
    names = ("greedy", "full_logits", "logits", "greedy_logits")
    sides = {v: {n: reference.others[f"{v}/{n}"] for n in names if f"{v}/{n}" in reference.others} for v in VARIANTS}
    sides[reference.variant] = reference.only(names)
    tokens = sides["fixed"].get("greedy")
    if tokens is None:
        return None
    prompt = oracle.shape[1] - tokens.shape[1]

    def error(logits: np.ndarray, greedy: np.ndarray) -> float:
        follows = np.cumprod(greedy == tokens, axis=1).astype(bool)  # a row means the same until its tokens part
        same = np.concatenate([np.ones((len(tokens), prompt), bool), follows], 1)[:, : logits.shape[1]]
        return difference(logits[same], oracle[:, : logits.shape[1]][same]).relative_rms

    def stepped(side: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([side["logits"], side["greedy_logits"][:, 1:]], 1)

    errors = {
        v: error(side["full_logits"], side["greedy"])
        for v, side in sides.items()
        if {"full_logits", "greedy"} <= set(side)
    }
    steps = {
        v: error(stepped(side), side["greedy"])
        for v, side in (*sides.items(), ("ours", found))
        if set(names) <= set(side)
    }
    judged = [errors[v] for v in ("fixed", "kernel") if v in errors]
    if not judged:
        return None
    return NarrowRule(error(found["full_logits"], found["greedy"]), errors, NARROW_FACTOR * max(judged), steps)
