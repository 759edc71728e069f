"""Counting what a program exchanges: collectives by operation, as operands, with their bytes; and kernels by name.

XLA merges independent collectives into one with several operands, so operands are what a plan can promise. A collective
in a function counts once per call of it, one in a loop's body once (``in_loops`` says how many those are).
"""

import collections
import dataclasses
import math
import re
from typing import Any

import jax

from nemotron_jax.fusion import FusionPlan
from nemotron_jax.runtime import NemotronH

# As HLO names them; StableHLO has underscores.
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a program holds.

    Attributes:
      collectives: operation -> operands.
      bytes: operation -> bytes of its results on one device.
      kernels: target of a custom call -> calls.
      in_loops: operation -> how many of its operands stand in a loop's body, and so run more often than counted.
      source: ``lowered`` (StableHLO) or ``compiled`` (optimised HLO).
    """

    collectives: dict[str, int]
    bytes: dict[str, int]
    kernels: dict[str, int]
    in_loops: dict[str, int]
    source: str


class _Tally:
    def __init__(self) -> None:
        self.operands: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.in_loops: collections.Counter[str] = collections.Counter()

    def add(self, other: "_Tally", loop: bool = False) -> None:
        for name in ("operands", "bytes", "kernels", "in_loops"):
            getattr(self, name).update(getattr(other, name))
        if loop:
            self.in_loops.update(other.operands - other.in_loops)

    def counts(self, source: str) -> Counts:
        return Counts(dict(self.operands), dict(self.bytes), dict(self.kernels), dict(self.in_loops), source)


def count_lowered(lowered: jax.stages.Lowered) -> Counts:
    """Of a program before compilation, by walking its StableHLO: independent of the backend's optimisations."""
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    known: dict[str, _Tally] = {}

    def of_function(name: str) -> _Tally:
        if name not in known:
            known[name] = _of_regions(functions[name].operation)
        return known[name]

    def _of_regions(op: Any) -> _Tally:
        tally = _Tally()
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    of_operation(inner.operation, tally)
        return tally

    def of_operation(op: Any, tally: _Tally) -> None:
        name = op.name.removeprefix("stablehlo.").replace("_", "-")
        if op.name == "func.call":
            tally.add(of_function(op.attributes["callee"].value))
        elif name in OPERATIONS:
            tally.operands[name] += len(op.operands)
            tally.bytes[name] += sum(_tensor_bytes(str(result.type)) for result in op.results)
        elif op.name == "stablehlo.custom_call":
            tally.kernels[op.attributes["call_target_name"].value] += 1
        elif len(op.regions):
            tally.add(_of_regions(op), loop=op.name == "stablehlo.while")

    return of_function("main").counts("lowered")


_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def _dtype_bytes(name: str) -> int:
    """Of an element type as (Stable)HLO spells it: f32, bf16, s32, i1, ui8, f8E4M3FN, ..."""
    if name in ("pred", "i1"):
        return 1
    if match := re.match(r"[a-z]+(\d+)", name):
        return max(1, int(match[1]) // 8)
    return 0


def _tensor_bytes(type_text: str) -> int:
    match = _TENSOR.match(type_text)
    if match is None:
        return 0
    return math.prod(int(n) for n in match[1].split("x") if n) * _dtype_bytes(match[2])


_HLO_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_HLO_OP = re.compile(r" (" + "|".join(OPERATIONS) + r"|custom-call|while)(-start)?\(")


def count_compiled(compiled: jax.stages.Compiled) -> Counts:
    """Of the optimised program."""
    return count_hlo(compiled.as_text() or "")


def count_hlo(text: str) -> Counts:
    """Of a module's text."""
    tally, bodies, where = _Tally(), set(re.findall(r"body=%?([\w.\-]+)", text)), ""
    per_computation: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in text.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            where = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0].split("(", 1)[0]
        match = _HLO_LINE.match(line)
        if match is None or (op := _HLO_OP.search(" " + match[1])) is None:
            continue
        rest = " " + match[1]
        if op[1] == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', rest)
            tally.kernels[target[1] if target else "?"] += 1
        elif op[1] != "while":
            operands = _operands(rest[op.end() :])
            results = _SHAPE.findall(rest[: op.start()])
            if op[2]:  # a start's result holds its operands too
                results = results[len(results) // 2 :]
            tally.operands[op[1]] += operands
            tally.bytes[op[1]] += sum(
                math.prod(int(n) for n in shape.split(",") if n) * _dtype_bytes(dtype) for dtype, shape in results
            )
            per_computation[where][op[1]] += operands
    for name in bodies:
        tally.in_loops.update(per_computation.get(name, {}))
    return tally.counts("compiled")


def _operands(text: str) -> int:
    """How many arguments stand before the parenthesis that closes the list."""
    depth, count, empty = 0, 1, True
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                return 0 if empty else count
            depth -= 1
        elif char == "," and depth == 0:
            count += 1
        empty = empty and char.isspace()
    return count


def promised(model: NemotronH, plan: FusionPlan) -> dict[str, int]:
    """What a plan promises for one greedy step: what ``collectives`` of the program must be.

    One all-reduce for each boundary that is reduced at once or through ``psum``, one all-gather for ``gather``, none
    for the kernels that read their peers' memory; one all-reduce for an embedding cut over the vocabulary, and one
    all-gather for the best token of a head cut so; one small all-reduce per Mamba block where a norm group spans
    several ranks.
    """
    if model.axis.size == 1:
        return {}
    pattern, rules = model.config.hybrid_override_pattern, model.rules
    reduced = sum(
        b.implementation in ("eager", "psum") and rules.cuts(kind)
        for b, kind in zip(plan.boundaries, pattern, strict=True)
    )
    spans = bool(rules.mamba_heads) and model.axis.size > model.config.n_groups
    counts = {
        "all-reduce": reduced + bool(rules.vocab) + (pattern.count("M") if spans else 0),
        "all-gather": sum(b.implementation == "gather" for b in plan.boundaries) + bool(rules.vocab),
    }
    return {name: n for name, n in counts.items() if n}
