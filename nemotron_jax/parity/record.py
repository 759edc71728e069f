"""Our side of a comparison: the arrays that ``scripts/dump_pytorch_reference.py`` writes, under the same names."""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_jax import processes
from nemotron_jax.cache_layout import states
from nemotron_jax.parity.metrics import log_softmax, two_best
from nemotron_jax.parity.reference import EXPERTS, STATES, STREAM
from nemotron_jax.runtime import NemotronH, Output
from nemotron_jax.sharding import DATA, axis_size

logger = logging.getLogger("nemotron_jax")

HELDOUT_TOKENS = 4096  # tokens of held-out text per forward pass
ALL = (
    *STREAM,
    *STATES,
    *EXPERTS,
    "logits",
    "full_logits",
    "greedy_logits",
    "pad_logits",
    "pad_greedy_logits",
    "heldout_nats",
)


def host(x: jax.Array, rows: int, dim: int = 0) -> np.ndarray:
    """The first ``rows`` rows on the host; narrow floats as float32, which holds them exactly."""
    value = np.asarray(processes.host(x))
    if value.dtype == jnp.bfloat16 or value.dtype == np.float16:
        value = value.astype(np.float32)
    return value[(slice(None),) * dim + (slice(rows),)]


def filled(model: NemotronH, ids: np.ndarray) -> np.ndarray:
    """``ids`` with its last row repeated until the data axis divides the batch."""
    extra = -len(ids) % axis_size(model.mesh, DATA)
    return np.concatenate([ids, np.repeat(ids[-1:], extra, axis=0)]) if extra else ids


def record(
    model: NemotronH, inputs: Mapping[str, np.ndarray], wanted: Collection[str] = ALL, *, new_tokens: int = 32
) -> dict[str, np.ndarray]:
    """Run the model and keep what ``wanted`` names.

    Args:
      model: with weights.
      inputs: ``ids`` (B, T), and where wanted ``pad_ids``, ``pad_mask`` (R, T), ``heldout_ids`` (W, L + 1). ``greedy``
        (B, N) and ``pad_greedy`` (R, N) are the tokens to go on with; without them the model's own choice is taken.
      wanted: names of the reference file's arrays.
      new_tokens: how many greedy tokens, where they are not given.

    Returns:
      The inputs and the arrays, by name. ``full_logits`` comes from one forward pass over prompt and continuation,
      ``greedy_logits`` from one cached step per token, so both paths are there to be compared.
    """
    wanted = set(wanted)
    found: dict[str, np.ndarray] = {
        k: np.asarray(v) for k, v in inputs.items() if k in ("ids", "pad_ids", "pad_mask", "heldout_ids")
    }
    continued = bool(wanted & {"full_logits", "greedy_logits"})
    if wanted & {*STREAM, *STATES, *EXPERTS, "logits", "full_logits", "greedy_logits"}:
        ids = found["ids"]
        n = inputs["greedy"].shape[1] if "greedy" in inputs else new_tokens
        capture = bool(wanted & {*STREAM, *EXPERTS})
        batch, tokens = ids.shape
        full = filled(model, ids)
        cache = model.new_cache(len(full), tokens + n) if continued or wanted & set(STATES) else None
        out = model(full, cache, hidden_states=capture)
        found |= _prompt_arrays(model, out, batch, tokens, wanted)
        if continued:
            found |= _greedy(model, out, found["ids"], None, inputs.get("greedy"), n, "")
        if "full_logits" in wanted:
            whole = np.concatenate([ids, found["greedy"]], 1)
            found["full_logits"] = host(model(filled(model, whole)).logits, batch)
    if wanted & {"pad_logits", "pad_greedy_logits"} and "pad_ids" in found:
        ids, mask = found["pad_ids"], found["pad_mask"].astype(bool)
        n = inputs["pad_greedy"].shape[1] if "pad_greedy" in inputs else new_tokens
        full, full_mask = filled(model, ids), filled(model, mask)
        out = model(full, model.new_cache(len(full), ids.shape[1] + n), mask=full_mask)
        found["pad_logits"] = host(out.logits, len(ids))
        if "pad_greedy_logits" in wanted:
            found |= _greedy(model, out, ids, mask, inputs.get("pad_greedy"), n, "pad_")
    if "heldout_nats" in wanted and "heldout_ids" in found:
        found["heldout_nats"] = np.asarray(heldout_loss(model, found["heldout_ids"]), np.float64)
    return {name: value for name, value in found.items() if name not in ALL or name in wanted}


def _prompt_arrays(model: NemotronH, out: Output, batch: int, tokens: int, wanted: set[str]) -> dict[str, np.ndarray]:
    found = {"logits": host(out.logits, batch)}
    hidden = out.hidden_states
    if hidden is not None:
        found |= {
            "embed": host(hidden.embed, batch),
            "layer": host(hidden.layers, batch, 1),
            "final": host(hidden.final, batch),
        }
        if hidden.mixers is not None:
            found["mixer"] = host(hidden.mixers, batch, 1)
        if hidden.experts is not None:
            for name, value in zip(EXPERTS, hidden.experts, strict=True):
                value = host(value, batch, 1)
                found[name] = value.reshape(value.shape[0], batch * tokens, *value.shape[3:])
    if wanted & set(STATES):
        found |= {name: host(value, batch, 1) for name, value in states(model, out.cache, tokens).items()}
    return found


def _greedy(model, out: Output, ids, mask, forced, n: int, prefix: str) -> dict[str, np.ndarray]:
    """One cached step per token behind ``out``, on ``forced`` tokens or on the model's own choice."""
    batch = len(ids)
    last = np.full(batch, ids.shape[1] - 1) if mask is None else ids.shape[1] - 1 - mask[:, ::-1].argmax(1)
    logits = [host(out.logits, batch)[np.arange(batch), last]]
    tokens = []
    cache = out.cache
    for i in range(n):
        tokens.append(
            np.asarray(forced[:, i], np.int32) if forced is not None else logits[-1].argmax(-1).astype(np.int32)
        )
        if i + 1 < n:
            out = model(filled(model, tokens[-1][:, None]), cache)
            cache = out.cache
            logits.append(host(out.logits, batch)[:, 0])
    if not n:
        return {
            f"{prefix}greedy": np.zeros((batch, 0), np.int32),
            f"{prefix}greedy_logits": np.zeros((batch, 0, logits[0].shape[-1]), np.float32),
        }
    stacked = np.stack(logits, 1)
    return {
        f"{prefix}greedy": np.stack(tokens, 1),
        f"{prefix}greedy_logits": stacked,
        f"{prefix}greedy_margin": two_best(stacked)[1],
    }


def heldout_loss(model: NemotronH, windows: np.ndarray) -> float:
    """Mean loss in nats of tokens 1.. of each window, given the tokens before it in the window.

    Args:
      windows: [windows, tokens + 1] ids.
    """
    rows = max(1, HELDOUT_TOKENS // windows.shape[1])
    rows += -rows % axis_size(model.mesh, DATA)
    total, count = 0.0, 0
    for start in range(0, len(windows), rows):
        part = windows[start : start + rows]
        full = np.concatenate([part, np.repeat(part[-1:], rows - len(part), axis=0)])
        logits = host(model(full[:, :-1]).logits, len(part))
        losses = np.take_along_axis(log_softmax(logits), part[:, 1:, None].astype(np.int64), -1)
        total -= float(losses.sum())
        count += losses.size
    return total / count if count else float("nan")


def describe(model: NemotronH, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What ran, to be stored with the arrays."""
    batch, tokens = inputs["ids"].shape
    plan = model.plan(len(filled(model, inputs["ids"])), tokens)
    return {
        "writer": "nemotron_jax",
        "pattern": model.config.hybrid_override_pattern,
        "dtype": str(model.dtype),
        "mesh": dict(model.mesh.shape),
        "fusion": model.fusion,
        "plan": plan.letters,
        "fused_boundaries": plan.fused_boundaries,
        "versions": {"jax": jax.__version__},
        "device": model.mesh.devices.flat[0].device_kind,
        "prompt": [batch, tokens],
    }


def save_run(path: str | Path, arrays: Mapping[str, np.ndarray], report: Mapping[str, Any]) -> None:
    """Write a run as a reference that later runs can be compared with. The file appears whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        everything: dict[str, Any] = {**arrays, "report": np.asarray(json.dumps(dict(report)))}
        np.savez_compressed(file, **everything)
    partial.replace(path)
