"""Runs one variant of a model and collects what a port is compared with."""

import contextlib
from collections.abc import Callable

import numpy as np
import torch

from . import repairs
from .facts import Facts
from .model import Runner
from .oracle import Oracle

GROUPS = ("layers", "mixers", "experts", "states", "greedy", "full", "pad")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float32 on the host; bfloat16 and float16 values stay exact."""
    return tensor.detach().float().cpu().numpy()


def to_ids(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().astype(np.int32)


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def _capture(model, groups: set[str]) -> tuple[dict[str, list], contextlib.AbstractContextManager]:
    """Hooks that put what the blocks compute into lists, as NumPy arrays so that no device memory is held."""
    found: dict[str, list] = {"embed": [], "layer": [], "mixer": [], "final": [], "router": []}

    @contextlib.contextmanager
    def attached():
        with repairs.hooks() as handles:

            def keep(module, name: str, convert: Callable = lambda out: to_numpy(_first(out))):
                handles.append(module.register_forward_hook(lambda m, args, out: found[name].append(convert(out))))

            keep(model.model.embeddings, "embed")
            keep(model.model.norm_f, "final")
            for layer in model.model.layers:
                if "layers" in groups:
                    keep(layer, "layer")
                if "mixers" in groups:
                    keep(layer.mixer, "mixer")
                if "experts" in groups and layer.block_type == "moe":
                    bias = layer.mixer.gate.e_score_correction_bias
                    keep(layer.mixer.gate, "router", lambda out, bias=bias: (*(t.cpu() for t in out), bias.cpu()))
            yield

    return found, attached()


def _experts(routers: list, facts: Facts) -> dict[str, np.ndarray]:
    """The chosen experts in ascending order, their weights in the same order, and how close the choice was.

    The gap is between the score of the last expert chosen and of the first one left out. It exists where experts are
    not chosen by group, and where one is left out.
    """
    out: dict[str, list] = {"topk_idx": [], "topk_w": [], "topk_gap": []}
    chosen_count = facts.num_experts_per_tok
    for logits, weights, chosen, bias in routers:
        order = chosen.argsort(-1)
        out["topk_idx"].append(to_ids(chosen.gather(-1, order)))
        out["topk_w"].append(to_numpy(weights.gather(-1, order)))
        if facts.n_group == 1 and chosen_count < facts.n_routed_experts:
            best = (logits.sigmoid() + bias).topk(chosen_count + 1, -1).values
            out["topk_gap"].append(to_numpy(best[:, -2] - best[:, -1]))
    return {name: np.stack(value) for name, value in out.items() if value}


def _state(entry) -> torch.Tensor:
    """A cache layer's state: a tensor, or a list of them of which this model has one."""
    return entry if isinstance(entry, torch.Tensor) else entry[0]


def _states(run: Runner, ids: torch.Tensor, facts: Facts) -> dict[str, np.ndarray]:
    """What the cache holds after the prompt."""
    cache = run.new_cache()
    run(ids, None, cache)
    out: dict[str, list] = {"conv": [], "ssm": [], "k": [], "v": []}
    for layer, kind in zip(cache.layers, facts.kinds, strict=True):
        if kind == "M":
            out["conv"].append(to_numpy(_state(layer.conv_states)))
            out["ssm"].append(to_numpy(_state(layer.recurrent_states)))
        elif kind == "*":
            out["k"].append(to_numpy(layer.keys))
            out["v"].append(to_numpy(layer.values))
    return {name: np.stack(value) for name, value in out.items() if value}


def run_variant(model, facts: Facts, inputs: dict[str, torch.Tensor], groups: set[str], steps: int):
    """Everything that the chosen groups ask for, by array name without the variant, and how consistent it is.

    inputs: ``ids`` (B, T), and ``pad_ids``, ``pad_mask`` (R, T) left-padded. Returns (arrays, consistency).
    """
    run, ids = Runner(model), inputs["ids"]
    arrays: dict[str, np.ndarray] = {}
    consistency: dict[str, float | int | str] = {}
    found, attached = _capture(model, groups)
    with attached:
        logits = run(ids)
    arrays["logits"] = to_numpy(logits)
    arrays["embed"], arrays["final"] = found["embed"][0], found["final"][0]
    for name in ("layer", "mixer"):
        if found[name]:
            arrays[name] = np.stack(found[name])
    if found["router"]:
        arrays.update(_experts(found["router"], facts))
    if "states" in groups:
        arrays.update(_states(run, ids, facts))
    if "greedy" in groups:
        tokens, chosen_by, prefill = run.greedy(ids, steps)
        best = chosen_by.topk(2, -1).values
        arrays["greedy"], arrays["greedy_logits"] = to_ids(tokens), to_numpy(chosen_by)
        arrays["greedy_margin"] = to_numpy(best[..., 0] - best[..., 1])
        consistency["prefill_against_no_cache"] = float((prefill - logits).abs().max())
        if "full" in groups:
            full = run(torch.cat([ids.to(tokens.device), tokens], 1))
            arrays["full_logits"] = to_numpy(full)
            start = ids.shape[1] - 1
            consistency["decode_against_full"] = float((chosen_by - full[:, start : start + steps]).abs().max())
    if "pad" in groups:
        tokens, chosen_by, prefill = run.greedy(inputs["pad_ids"], steps, inputs["pad_mask"])
        arrays["pad_logits"] = to_numpy(prefill)
        arrays["pad_greedy"], arrays["pad_greedy_logits"] = to_ids(tokens), to_numpy(chosen_by)
    bad = sorted(name for name, value in arrays.items() if value.dtype.kind == "f" and not np.isfinite(value).all())
    if bad:
        consistency["not_finite"] = ", ".join(bad)
    return arrays, consistency


def run_oracle(facts: Facts, tensors: dict[str, torch.Tensor], ids: torch.Tensor, greedy: torch.Tensor | None):
    """float64: logits over the prompt and the greedy tokens, states after the prompt, and MTP's draft logits."""
    oracle = Oracle(facts, tensors)
    whole = ids if greedy is None else torch.cat([ids, greedy], 1)
    logits, final, _, _ = oracle(whole)
    _, _, conv, ssm = oracle(ids)
    arrays = {"logits": logits.numpy()}
    if ssm:
        arrays |= {"conv": torch.stack(conv).numpy(), "ssm": torch.stack(ssm).numpy()}
    if facts.num_nextn_predict_layers and "mtp.layers.0.eh_proj.weight" in oracle.tensors:
        arrays["mtp_logits"] = oracle.mtp(whole, final).numpy()
    return arrays
