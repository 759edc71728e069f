"""``load``: from a folder to a model on a mesh, with every tensor of the file accounted for."""

import logging
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import ShardingRules
from nemotron_jax.weights.huggingface import FLOATS, Checkpoint

logger = logging.getLogger("nemotron_jax")


def default_model() -> Path:
    """The small trained model that the package ships."""
    return Path(str(resources.files("nemotron_jax") / "models" / "tiny-nemotron-h"))


def load(
    path: str | Path | None = None,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    dtype: Any = None,
    fusion: str = "auto",
    progress: bool | None = None,
) -> NemotronH:
    """Load a checkpoint into a model on ``mesh``; each device receives only its slices.

    Args:
      path: folder in Hugging Face layout; None: the model shipped with the package.
      mesh: axes ``data`` and ``tensor``; default one device.
      rules: which logical axes are cut.
      dtype: of matrices and activations; default the checkpoint's.
      fusion: fusion plan.
      progress: a progress bar on stderr; default where stderr is a terminal.

    Raises:
      FileNotFoundError, ValueError: before device memory is used; all missing, unknown and misshapen tensors are named.
    """
    folder = default_model() if path is None else Path(path)
    config = NemotronHConfig.from_json(folder)
    checkpoint = Checkpoint(folder)
    model = NemotronH(config, mesh=mesh, rules=rules, dtype=dtype, fusion=fusion)
    model.folder = folder
    used = check_tensors(model, checkpoint)
    total = sum(int(np.prod(p.layout.global_shape)) * jnp.dtype(p.dtype).itemsize for p in model.parameters)
    logger.info("loading %s: %d tensors, %.1f MB", folder, len(used), checkpoint.bytes(used) / 1e6)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading", file=sys.stderr, disable=None if progress is None else not progress
    ) as bar:
        model.fill(checkpoint, bar.update)
    return model


def check_tensors(model: NemotronH, checkpoint: Checkpoint) -> set[str]:
    """Each parameter from exactly the tensors of the file, each tensor used or listed as skipped; returns the names used.

    Raises:
      ValueError: naming every tensor that is missing, unknown, of another shape, or of a dtype that is no plain float.
    """
    expected = {name: shape for p in model.parameters for name, shape in p.layout.tensors()}
    found = checkpoint.tensors
    faults = [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    skipped = [name for name in found if name.startswith("mtp.")]
    unknown = [name for name in found if name not in expected and not name.startswith("mtp.")]
    if model.config.tie_word_embeddings and "lm_head.weight" in unknown and "embeddings.weight" in found:
        if not np.array_equal(checkpoint.raw("lm_head.weight"), checkpoint.raw("embeddings.weight")):
            faults.append("tie_word_embeddings is true, but lm_head.weight and the embedding differ")
        unknown.remove("lm_head.weight")
        skipped.append("lm_head.weight")
    faults += [f"unknown {checkpoint.names[name]} {found[name].shape}" for name in unknown]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            faults.append(f"{checkpoint.names[name]} has shape {found[name].shape}, accepted {shape}{_terms(model.config, name)}")
        elif name in found and found[name].dtype not in FLOATS:
            faults.append(f"{checkpoint.names[name]} has dtype {found[name].dtype}, accepted {', '.join(FLOATS)}")
    if faults:
        shown = faults if len(faults) <= 20 else [*faults[:20], f"and {len(faults) - 20} more"]
        raise ValueError(f"checkpoint {checkpoint.folder} does not fit its config: " + "; ".join(shown))
    if skipped:
        logger.warning("skipped %d tensors that inference does not use: %s", len(skipped), ", ".join(sorted(skipped)[:3]) + (" ..." if len(skipped) > 3 else ""))
    return set(expected)


def _terms(config: NemotronHConfig, name: str) -> str:
    """How the expected width of a packed projection comes about."""
    inner = f"mamba_num_heads*mamba_head_dim = {config.mamba_num_heads}*{config.mamba_head_dim}"
    groups = f"n_groups*ssm_state_size = {config.n_groups}*{config.ssm_state_size}"
    if ".in_proj." in name:
        return f" (2 * {inner}, + 2 * {groups}, + mamba_num_heads)"
    if ".conv1d." in name:
        return f" ({inner}, + 2 * {groups})"
    return ""
