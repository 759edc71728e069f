"""A sharding experiment as a file: read, checked with all faults at once, and expanded into runs.

Every list is swept. Keys at the top are the defaults of every ``[[run]]``, which may name its own.
"""

import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_jax.sharding import ShardingRules
from nemotron_jax.targets import parse

WHAT = ("decode", "prefill")
DTYPES = ("float32", "bfloat16", "float16")
DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "mesh": {"tensor": 1},
    "plan": "auto",
    "rules": {},
    "what": "decode",
    "batch": 1,
    "tokens": 1,
    "layers": 0,
}
PLAIN = {"devices": "", "steps": [32, 160], "repeats": 5, "seed": 0}  # not swept
USAGE = """accepted: model (required), dtype, mesh = {tensor, data}, plan, rules, what = decode | prefill, batch,
tokens (decode: tokens in the cache; prefill: tokens of the prompt), layers (0: all), each a value or a list to sweep;
and devices = "h200:8", steps = [short, long], repeats, seed, one value each"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One point of an experiment.

    Attributes:
      model: preset, folder or hub id.
      layers: only the first so many blocks (0: all).
      dtype: of matrices and activations.
      tensor, data: the mesh.
      plan: fusion plan.
      rules: overrides of the logical-axis table.
      what: ``decode``: one step behind ``tokens`` tokens; ``prefill``: a prompt of ``tokens`` tokens.
      batch: rows over the whole mesh.
      tokens: see ``what``.
      devices: ``h200:8`` to compile for those; empty: run on what is here.
      steps: lengths of the timed loop.
      repeats: timed calls of each.
      seed: of random weights.
    """

    model: str
    layers: int
    dtype: str
    tensor: int
    data: int
    plan: str
    rules: Mapping[str, str]
    what: str
    batch: int
    tokens: int
    devices: str = ""
    steps: tuple[int, int] = (32, 160)
    repeats: int = 5
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """Plain values, as results files hold them."""
        return dataclasses.asdict(self) | {"rules": dict(self.rules), "steps": list(self.steps)}

    @property
    def key(self) -> str:
        """Short and stable: equal settings give the same key in every process."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def new_tokens(self) -> int:
        """Tokens of each row in one step."""
        return 1 if self.what == "decode" else self.tokens

    @property
    def context(self) -> int:
        """Tokens of each row before it."""
        return self.tokens if self.what == "decode" else 0

    def title(self) -> str:
        """In words, on one line."""
        rules = " ".join(f"{k}={v}" for k, v in self.rules.items())
        return (
            f"{self.model} {self.dtype} data {self.data} x tensor {self.tensor} {self.plan} {self.what} "
            f"{self.batch} x {self.tokens}" + (f" {rules}" if rules else "")
        )


def read_spec(path: str | Path) -> list[Run]:
    """The runs of a TOML file, in its order, without repeats.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not TOML, or faults in it; all are listed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no experiment file {path}")
    try:
        return expand(tomllib.loads(path.read_text(encoding="utf-8")), where=str(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: no TOML: {error}") from error


def expand(spec: Mapping[str, Any], where: str = "experiment") -> list[Run]:
    """The runs of a specification."""
    faults: list[str] = []
    top = {key: value for key, value in spec.items() if key != "run"}
    known = {"model", *DEFAULTS, *PLAIN}
    faults += [f"unknown key {key!r}" for key in top if key not in known]
    tables = spec.get("run", [{}])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, Mapping) for t in tables):
        raise ValueError(f"{where}: run: found {tables!r}, accepted tables [[run]]")
    runs: dict[str, Run] = {}
    for i, table in enumerate(tables):
        place = f"run {i + 1}: " if "run" in spec else ""
        faults += [f"{place}unknown key {key!r}" for key in table if key not in known]
        merged = {**DEFAULTS, **PLAIN, **top, **table}
        if "model" not in merged:
            faults.append(f"{place}model is missing")
            continue
        local = _faults(merged)
        faults += [place + fault for fault in local]
        if not local:
            for run in _sweep(merged):
                runs.setdefault(run.key, run)
    if faults:
        raise ValueError(f"{where}: " + "; ".join(dict.fromkeys(faults)) + f" ({USAGE})")
    return list(runs.values())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _faults(table: Mapping[str, Any]) -> list[str]:
    faults = []

    def each(key: str, good: Any, accepted: str) -> None:
        values = _list(table[key])
        bad = [v for v in values if not good(v)] if values else ["nothing"]
        faults.extend(f"{key}: found {v!r}, accepted {accepted}" for v in bad)

    def count(low: int):
        return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low

    def mesh(v: Any) -> bool:
        return isinstance(v, Mapping) and not set(v) - {"tensor", "data"} and all(count(1)(n) for n in v.values())

    each("model", lambda v: isinstance(v, str) and v, "a preset, folder or hub id")
    each("dtype", lambda v: v in DTYPES, " | ".join(DTYPES))
    each("mesh", mesh, "{tensor = N, data = N}")
    each("plan", lambda v: isinstance(v, str), "a fusion plan")
    each("what", lambda v: v in WHAT, " | ".join(WHAT))
    each("batch", count(1), "1 or more")
    each("tokens", count(1), "1 or more")
    each("layers", count(0), "0 (all) or more")
    for rules in _list(table["rules"]):
        try:
            ShardingRules.from_dict(dict(rules))
        except (ValueError, TypeError) as error:
            faults.append(f"rules: {error}")
    for key, low in (("repeats", 1), ("seed", 0)):
        if not count(low)(table[key]):
            faults.append(f"{key}: found {table[key]!r}, accepted {low} or more")
    steps = table["steps"]
    if not (isinstance(steps, list) and len(steps) == 2 and all(count(1)(n) for n in steps) and steps[0] < steps[1]):
        faults.append(f"steps: found {steps!r}, accepted [short, long]")
    elif steps[1] % steps[0]:
        faults.append(f"steps: found {steps!r}, accepted a long loop that is a multiple of the short one")
    if table["devices"]:
        try:
            parse(table["devices"])
        except (ValueError, TypeError) as error:
            faults.append(str(error))
    return faults


def _sweep(table: Mapping[str, Any]):
    swept = [
        _list(table[key]) for key in ("model", "layers", "dtype", "mesh", "rules", "what", "batch", "tokens", "plan")
    ]
    for model, layers, dtype, mesh, rules, what, batch, tokens, plan in itertools.product(*swept):
        yield Run(
            model, layers, dtype, mesh.get("tensor", 1), mesh.get("data", 1), plan, dict(rules), what, batch, tokens,
            table["devices"], (table["steps"][0], table["steps"][1]), table["repeats"], table["seed"],
        )  # fmt: skip
