"""A checkpoint in transformers: loading, checking its weights against the file, and running it."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

from .facts import Facts

PREFIX = re.compile(r"^(language_model\.)?(backbone|model)\.")
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight$")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def file_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, one at a time, by its name without the prefix (``layers.0.mixer.D``)."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: the files {missing} are missing")
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():
                tensor = file.get_tensor(key)
                if tensor.dtype not in FLOATS:
                    raise ValueError(f"{key} is {tensor.dtype}: quantised checkpoints must be converted to bf16 first")
                yield PREFIX.sub("", key).removeprefix("language_model.").replace("embedding.w", "embeddings.w"), tensor


def load(folder: str | Path, facts: Facts, dtype: torch.dtype, device: str, repair_config: bool = True):
    """The model as transformers loads it.

    ``repair_config`` gives transformers the values that it would not read from this spelling of the configuration.
    Returns the model and the fields that differed: {field: (what transformers read, what the file says)}.
    """
    config = NemotronHConfig.from_pretrained(folder)
    misread = {}
    for name in ("layer_norm_epsilon", "head_dim", "num_key_value_heads", "n_groups", "conv_kernel", "chunk_size"):
        theirs, ours = getattr(config, name), getattr(facts, name)
        if theirs != ours:
            misread[name] = (theirs, ours)
            if repair_config:
                setattr(config, name, ours)
    if repair_config:
        config.time_step_limit = facts.time_step_limit  # 1e308 would make torch.clamp raise
    where = {"device_map": "auto"} if device == "auto" else {}
    model = NemotronHForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **where).eval()
    return (model if where else model.to(device)), misread


@dataclass
class WeightCheck:
    """How the loaded weights compare with the file, byte for byte in the loaded dtype."""

    equal: int = 0
    differing: list[str] = field(default_factory=list)
    not_in_file: list[str] = field(default_factory=list)
    not_in_model: list[str] = field(default_factory=list)
    skipped: int = 0  # mtp.*, which transformers has no module for

    @property
    def clean(self) -> bool:
        return not (self.differing or self.not_in_file or self.not_in_model)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


@torch.no_grad()
def check_weights(model, folder: str | Path, facts: Facts, repair: bool = False) -> WeightCheck:
    """Compares every loaded tensor with the file; with ``repair``, copies the file's value where they differ."""
    targets = {PREFIX.sub("", name): t for name, t in (*model.named_parameters(), *model.named_buffers())}
    seen, check = set(), WeightCheck()
    for name, tensor in file_tensors(folder):
        if name.startswith("mtp."):
            check.skipped += 1
            continue
        expert = EXPERT.match(name)
        if name in targets:
            target, key = targets[name], name
        elif expert and f"{expert[1]}.{expert[3]}" in targets:
            key = f"{expert[1]}.{expert[3]}"
            target = targets[key][int(expert[2])]
        else:
            check.not_in_model.append(name)
            continue
        seen.add(key)
        wanted = tensor.to(device=target.device, dtype=target.dtype)
        if same_bytes(target.data, wanted):
            check.equal += 1
        else:
            check.differing.append(name)
            if repair and target.shape == wanted.shape:
                target.data.copy_(wanted)
    check.not_in_file = sorted(set(targets) - seen)
    # A tied checkpoint has one matrix for both: what the head holds is checked as a tie.
    if facts.tie_word_embeddings and "lm_head.weight" in check.not_in_file:
        if same_bytes(targets["lm_head.weight"].data, targets["embeddings.weight"].data):
            check.not_in_file.remove("lm_head.weight")
            check.equal += 1
    return check


_CACHE_ARGUMENT = next(
    name for name in ("cache", "past_key_values") if name in inspect.signature(NemotronHForCausalLM.forward).parameters
)


class Runner:
    """Calls a model as its users would, but for the masks and positions of patterns without attention."""

    def __init__(self, model) -> None:
        self.model = model
        kinds = Facts.read(model.config.to_dict()).kinds
        self.has_attention = "*" in kinds
        self.device = model.get_input_embeddings().weight.device

    def new_cache(self):
        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def __call__(self, ids, mask=None, cache=None, past: int = 0) -> torch.Tensor:
        """Logits (B, T, V) float32. ``mask`` covers past and new tokens; ``past`` counts the tokens in the cache."""
        ids = ids.to(self.device)
        arguments = {"input_ids": ids, "use_cache": cache is not None, _CACHE_ARGUMENT: cache, "return_dict": True}
        if mask is not None:
            mask = mask.to(self.device)
        if self.has_attention:
            arguments["attention_mask"] = mask
        else:
            # transformers asks its cache for a length that only attention layers know: say it all explicitly.
            padded = mask is not None and ids.shape[1] > 1 and not bool(mask.all())
            recurrent = mask[:, -ids.shape[1] :] if padded else None
            arguments["attention_mask"] = {"full_attention": None, "linear_attention": recurrent}
            arguments["position_ids"] = torch.arange(past, past + ids.shape[1], device=self.device)[None]
        return self.model(**arguments).logits

    def greedy(self, ids, steps: int, mask=None):
        """Prefill and ``steps`` greedy tokens: tokens (B, N), the logits that chose them (B, N, V), prefill logits."""
        cache = self.new_cache()
        prefill = self(ids, mask, cache)
        chosen, logits, last, past = [], [], prefill[:, -1], ids.shape[1]
        for step in range(steps):
            logits.append(last)
            chosen.append(last.argmax(-1))
            if step + 1 < steps:
                if mask is not None:
                    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                last = self(chosen[-1][:, None], mask, cache, past)[:, -1]
                past += 1
        return torch.stack(chosen, 1), torch.stack(logits, 1), prefill
