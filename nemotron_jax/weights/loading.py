"""``load``: from a folder to a model on a mesh, with every tensor of the file accounted for."""

import contextlib
import functools
import logging
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.files import reason
from nemotron_jax.parameters import planned_bytes
from nemotron_jax.presets import PRESETS
from nemotron_jax.runtime import NemotronH
from nemotron_jax.sharding import ShardingRules
from nemotron_jax.weights.atomic import recover
from nemotron_jax.weights.conversion_cache import Entry, cache_folder, source_name
from nemotron_jax.weights.held import Origin
from nemotron_jax.weights.held import verify as compare_bytes
from nemotron_jax.weights.hub import download, is_hub_id
from nemotron_jax.weights.orbax import OrbaxCheckpoint, is_orbax
from nemotron_jax.weights.progress import progress_bar
from nemotron_jax.weights.quantized import open_plain_or_quantized
from nemotron_jax.weights.source import FLOATS, Source, listed

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
    mtp: bool = False,
    progress: bool | None = None,
    verify: bool = False,
    revision: str | None = None,
    conversion_cache: bool | str | Path | None = None,
) -> NemotronH:
    """Load a checkpoint into a model on ``mesh``; each device receives only its slices.

    Host memory stays below ``parameters.READ_AHEAD`` (512 MiB) plus this process's shares of the largest parameter,
    device memory at the shards; no collective runs, and each process reads only the bytes that its devices hold.

    Args:
      path: folder in Hugging Face layout or written by ``save`` or ``convert``, or a hub id; None: the model shipped
        with the package.
      mesh: axes ``data`` and ``tensor``; default one device.
      rules: which logical axes are cut.
      dtype: of matrices and activations; default the checkpoint's.
      fusion: fusion plan.
      mtp: also load the multi-token-prediction layers.
      progress: a progress bar on stderr; default where stderr is a terminal.
      verify: read everything again afterwards and compare it with what the devices hold, byte for byte. With a
        conversion cache it is the source that is read for this.
      revision: of a hub id: branch, tag or commit.
      conversion_cache: keep the conversion to Orbax layout, quantised weights dequantised, and restore it as long as
        the source has not changed: in a folder, or True: in the user's cache folder. None: as the environment
        variable NEMOTRON_JAX_CONVERSION_CACHE says; see :mod:`nemotron_jax.weights.conversion_cache`.

    Raises:
      FileNotFoundError, ValueError: before device memory is used; all missing, unknown and misshapen tensors are named.
      ValueError: while reading, if a file is cut short or cannot be read; or if ``verify`` finds a difference.
    """
    folder = default_model() if path is None else locate(path, revision=revision)
    config = NemotronHConfig.from_json(folder)
    cache = cache_folder(conversion_cache, folder, config)
    with contextlib.ExitStack() as stack:

        def original() -> Source:
            return stack.enter_context(contextlib.closing(open_source(folder, config)))

        model = NemotronH(config, mesh=mesh, rules=rules, dtype=dtype, fusion=fusion, mtp=mtp)
        model.folder = folder
        if cache is None:
            source = original()
        else:
            entry = Entry(cache, source_name(path, folder, revision), folder, config)
            check = functools.partial(check_tensors, model)
            source = stack.enter_context(entry.opened(original, check, progress=progress))
        used = check_tensors(model, source)
        logger.info("loading %s: %d tensors, %.1f MB", folder, len(used), source.bytes(used) / 1e6)
        total = planned_bytes(model.parameters, model.mesh)
        try:
            with progress_bar("loading", total, progress) as bar:
                model.fill(source, bar.update)
            model.origin = Origin(model, folder, source)
            if verify:
                with progress_bar("verifying", total, progress) as bar:
                    compare_bytes(model, source if cache is None else original(), bar.update)
        except OSError as error:
            raise ValueError(f"{source.where} cannot be read: {reason(error)}") from error
    return model


def locate(path: str | Path, *, revision: str | None = None) -> Path:
    """The folder that a path, a hub id or the shipped model's name means; ``OWNER/NAME@REVISION`` names a revision too.

    Raises:
      FileNotFoundError, ValueError: if there is none; see :func:`nemotron_jax.weights.hub.download`.
    """
    recover(Path(path))
    if Path(path).exists():
        if revision:
            raise ValueError(f"revision: found {revision!r} with the folder {path}, accepted with a hub id alone")
        return Path(path)
    hub_id, _, named = str(path).partition("@")
    if isinstance(path, str) and is_hub_id(hub_id):
        if revision and named:
            raise ValueError(f"revision: found both {revision!r} and {path}, accepted: one")
        return download(hub_id, revision or named or None)
    if str(path) in PRESETS:
        raise FileNotFoundError(
            f"{path} is a preset: shapes without weights, for inspect, bench and experiment; accepted here: a folder "
            f"that holds weights, or a hub id with these shapes: {', '.join(PRESETS[str(path)].hub_ids)}"
        )
    if str(path) == default_model().name:
        return default_model()
    raise FileNotFoundError(f"{path}: no such folder, and no hub id (OWNER/NAME)")


def open_source(folder: Path, config: NemotronHConfig) -> Source:
    """The tensors of a folder, whatever it holds them in."""
    if is_orbax(folder):
        return OrbaxCheckpoint(folder, config)
    return open_plain_or_quantized(folder, config)


def check_tensors(model: NemotronH, source: Source) -> list[str]:
    """Each parameter from exactly the tensors of the file, each tensor used or listed as skipped.

    Raises:
      ValueError: naming every tensor that is missing, unknown, of another shape, or of a dtype that is no plain float.

    Returns:
      The names used.
    """
    expected = {name: shape for p in model.parameters for name, shape in p.layout.tensors()}
    found = source.tensors
    faults = [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    skipped, unknown = [], []
    for name in found:
        if name not in expected:
            (skipped if may_skip(model.config, found[name].name, model.mtp) else unknown).append(name)
    if model.config.tie_word_embeddings and "lm_head.weight" in unknown and "embeddings.weight" in found:
        if found["lm_head.weight"].shape != found["embeddings.weight"].shape or not np.array_equal(
            source.rows("lm_head.weight"), source.rows("embeddings.weight")
        ):
            faults.append("tie_word_embeddings is true, but lm_head.weight and the embedding differ")
        unknown.remove("lm_head.weight")
        skipped.append("lm_head.weight")
    faults += [f"unknown {found[name].name} {found[name].shape}" for name in unknown]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            terms = _terms(model.config, name)
            faults.append(f"{found[name].name} has shape {found[name].shape}, accepted {shape}{terms}")
        elif name in found and found[name].dtype not in FLOATS:
            faults.append(f"{found[name].name} has dtype {found[name].dtype}, accepted {', '.join(FLOATS)}")
    if faults:
        raise ValueError(f"{source.where} does not fit its config: {listed(faults)}")
    if skipped:
        shown = ", ".join(sorted(skipped)[:3]) + (" ..." if len(skipped) > 3 else "")
        logger.warning("skipped %d tensors that inference does not use: %s", len(skipped), shown)
    return list(expected)


def may_skip(config: NemotronHConfig, name: str, mtp: bool = False) -> bool:
    """Whether inference can do without a tensor of the file (by its name there).

    So it is with drafting layers unless ``mtp``, and with the other towers of a file that wraps a language model.
    """
    if name.startswith("mtp."):
        return not mtp
    return config.wrapper is not None and not name.startswith("language_model.")


def _terms(config: NemotronHConfig, name: str) -> str:
    """How the expected width of a packed projection comes about."""
    inner = f"mamba_num_heads*mamba_head_dim = {config.mamba_num_heads}*{config.mamba_head_dim}"
    groups = f"n_groups*ssm_state_size = {config.n_groups}*{config.ssm_state_size}"
    if ".in_proj." in name:
        return f" (2 * {inner}, + 2 * {groups}, + mamba_num_heads)"
    if ".conv1d." in name:
        return f" ({inner}, + 2 * {groups})"
    return ""
