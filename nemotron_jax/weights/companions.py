"""The small files beside the weights: config, tokenizer, generation defaults, licence. They travel along."""

import json
import logging
import shutil
from pathlib import Path

from nemotron_jax.config import NemotronHConfig

logger = logging.getLogger("nemotron_jax")

MANIFEST = "nemotron_jax.json"  # makes a folder one of ours
_LARGEST = 256 << 20  # bytes; a larger file is not a small file whatever it is called
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".index.json")
_QUANTIZATION = "hf_quant_config.json"


def carry(source: Path | None, target: Path, config: NemotronHConfig, *, dequantized: bool = False) -> None:
    """Copy the small files of a checkpoint; the weights and their index are written anew.

    Args:
      source: the checkpoint's folder; None or a folder that is gone: only a config.json is written, from ``config``.
      target: where to.
      config: the model's configuration.
      dequantized: the weights are no longer quantised: what says so is left out.
    """
    if source is None or not source.is_dir():
        if source is not None:
            logger.warning("%s is gone: only config.json is written beside the weights, no tokenizer", source)
        config.to_json(target / "config.json")
        return
    for file in sorted(source.iterdir()):
        name = file.name
        if (
            name == MANIFEST
            or name.startswith(".")
            or name.endswith(_WEIGHTS)
            or (dequantized and name == _QUANTIZATION)
        ):
            continue
        if file.is_file() and file.stat().st_size <= _LARGEST:
            shutil.copyfile(file, target / name)
    if dequantized:
        values = json.loads((target / "config.json").read_text(encoding="utf-8"))
        for holder in (values, values.get("llm_config"), values.get("text_config")):
            if isinstance(holder, dict):
                holder.pop("quantization_config", None)
        (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
