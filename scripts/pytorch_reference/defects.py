"""Finds out which known defects the installed transformers has, by probing it rather than by its version.

Each probe writes a tiny checkpoint that the defect would show on, loads it the ordinary way, and measures how far the
result is from the float64 oracle (or from what the configuration asks). A repair counts only when the same probe no
longer finds the defect with the repair in place: a release of transformers that the repairs do not fit is noticed.
"""

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from . import repairs, tiny
from .facts import Facts
from .model import Runner, check_weights, file_tensors, load
from .oracle import Oracle

INF = math.inf
TOLERANCE = 1e-3  # float32 rounding on the tiny models stays below 1e-4; the defects are above 1e-2


class Probe:
    """A tiny checkpoint, loaded."""

    def __init__(self, pattern: str, dtype: torch.dtype = torch.float32, seed: int = 7, **config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tiny.write(folder, {"hybrid_override_pattern": pattern, **config}, seed)
            self.facts = Facts.of(folder)
            self.model, _ = load(folder, self.facts, dtype, "cpu")
            self.weights = check_weights(self.model, folder, self.facts)
            self.oracle = Oracle(self.facts, dict(file_tensors(folder)))
        self.run = Runner(self.model)
        self.ids = torch.randint(3, self.facts.vocab_size, (2, 19), generator=torch.Generator().manual_seed(seed))

    def prefill_and_decode_error(self) -> float:
        """Largest error of the logits, of the prompt at once and of its last tokens one by one."""
        expected = self.oracle(self.ids)[0]
        cache, cut = self.run.new_cache(), self.ids.shape[1] - 4
        pieces = [self.run(self.ids[:, :cut], None, cache)]
        pieces += [self.run(self.ids[:, t : t + 1], None, cache, t) for t in range(cut, self.ids.shape[1])]
        errors = [(logits - expected).abs().max() for logits in (self.run(self.ids), torch.cat(pieces, 1))]
        return float(max(errors))


def _clamp(repaired: bool) -> float:
    probe = Probe("M-M*-")
    with repairs.time_step_limit(probe.model, (0.0, INF)) if repaired else contextlib.nullcontext():
        return probe.prefill_and_decode_error()


def _finite_limit(repaired: bool) -> float:
    # time_step_min is put below every time step, so that only the finite limit can make a difference
    probe = Probe("M-M*-", time_step_limit=[0.02, 0.08], time_step_min=1e-9)
    with repairs.time_step_limit(probe.model, (0.02, 0.08)) if repaired else contextlib.nullcontext():
        return probe.prefill_and_decode_error()


def _tie(repaired: bool) -> float:
    probe = Probe("-*-", tie_word_embeddings=True)  # no Mamba block: the time steps cannot disturb
    with repairs.tied_head(probe.model) if repaired else contextlib.nullcontext():
        return float((probe.run(probe.ids) - probe.oracle(probe.ids)[0]).abs().max())


def _residual(repaired: bool) -> float:
    probe = Probe("M-*-", torch.bfloat16, residual_in_fp32=True)
    found = []
    with repairs.float32_residual(probe.model) if repaired else contextlib.nullcontext(), repairs.hooks() as handles:
        for layer in probe.model.model.layers:
            handles.append(layer.register_forward_hook(lambda m, a, out: found.append(out.dtype)))
        probe.run(probe.ids)
    return float(sum(dtype != torch.float32 for dtype in found))


def _pad_leak(repaired: bool) -> float:
    probe = Probe("M-M*-", use_bias=True)
    pads = 5
    padded = torch.cat([torch.zeros(2, pads, dtype=torch.long), probe.ids], 1)
    mask = (torch.arange(padded.shape[1]) >= pads).long().expand_as(padded)
    with repairs.silent_pads(probe.model) if repaired else contextlib.nullcontext():
        return float((probe.run(padded, mask)[:, pads:] - probe.run(probe.ids)).abs().max())


def _no_attention(repaired: bool) -> float:
    probe = Probe("MM-")
    try:
        if repaired:
            probe.run.greedy(probe.ids, 2)
        else:
            with torch.no_grad():
                probe.model(probe.ids, use_cache=True)
    except ValueError:
        return 1.0
    return 0.0


def _reinitialised(repaired: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(folder, tiny.CONFIGS["moe_latent"], 7)
        facts = Facts.of(folder)
        model, _ = load(folder, facts, torch.float32, "cpu")
        if repaired:
            check_weights(model, folder, facts, repair=True)
        return float(len(check_weights(model, folder, facts).differing))


@dataclass(frozen=True)
class Defect:
    name: str
    text: str
    measured: str
    probe: Callable[[bool], float]
    concerns: Callable[[Facts], bool]


KNOWN = (
    Defect("dt_clamp", "dt is clamped to time_step_min in the many-token path, and not at all in the one-token path",
           "largest logit error against float64", _clamp, lambda f: "M" in f.kinds),
    Defect("time_step_limit_ignored", "time_step_limit is not read, finite ones included",
           "largest logit error against float64", _finite_limit,
           lambda f: "M" in f.kinds and f.time_step_limit != (0.0, INF)),
    Defect("tie_ignored", "tie_word_embeddings is not read: the head of a tied checkpoint is random",
           "largest logit error against float64", _tie, lambda f: f.tie_word_embeddings),
    Defect("residual_dtype", "residual_in_fp32 is not read: the stream between the blocks has the model's dtype",
           "blocks whose output is not float32", _residual, lambda f: f.residual_in_fp32),
    Defect("pad_bias_leak", "with use_bias, left padding leaks through in_proj's bias into the convolution",
           "largest logit difference, padded against not", _pad_leak, lambda f: f.use_bias and "M" in f.kinds),
    Defect("no_attention", "a pattern without attention fails as soon as a cache is used",
           "1 where the call raises", _no_attention, lambda f: "*" not in f.kinds),
    Defect("reinitialised_weights", "loading overwrites weights of the file with fresh ones",
           "tensors that differ from the file", _reinitialised, lambda f: True),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What a probe found: ``amount`` as it is, ``amount_repaired`` with the repair (None where none was needed)."""

    name: str
    text: str
    found: bool
    measured: str
    amount: float
    amount_repaired: float | None

    @property
    def repaired(self) -> bool:
        return not self.found or (self.amount_repaired is not None and self.amount_repaired <= TOLERANCE)

    def as_dict(self) -> dict:
        return {**asdict(self), "repaired": self.repaired}


@functools.cache
def find() -> tuple[Finding, ...]:
    """Runs every probe on the CPU (a few seconds)."""
    findings = []
    for defect in KNOWN:
        amount = defect.probe(False)
        found = not amount <= TOLERANCE  # a NaN is a finding
        repaired = defect.probe(True) if found else None
        findings.append(Finding(defect.name, defect.text, found, defect.measured, amount, repaired))
    return tuple(findings)


@contextlib.contextmanager
def repaired(model, facts: Facts, only: set[str] | None = None):
    """Within this context the model computes what its configuration says.

    ``only`` names the defects to repair; the default is all that were found and concern this model.
    """
    if only is None:
        concerned = {defect.name for defect in KNOWN if defect.concerns(facts)}
        only = {finding.name for finding in find() if finding.found} & concerned
    with contextlib.ExitStack() as stack:
        if only & {"dt_clamp", "time_step_limit_ignored"}:
            stack.enter_context(repairs.time_step_limit(model, facts.time_step_limit))
        if "tie_ignored" in only:
            stack.enter_context(repairs.tied_head(model))
        if "residual_dtype" in only:
            stack.enter_context(repairs.float32_residual(model))
        if "pad_bias_leak" in only:
            stack.enter_context(repairs.silent_pads(model))
        yield
