"""Checkpoints by hub id: downloaded into Hugging Face's own cache, and nothing but what is needed.

The environment decides, as for every program that uses the hub: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import json
import logging
import re
from pathlib import Path

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.weights.huggingface import INDEX
from nemotron_jax.weights.quantized import read_scheme

logger = logging.getLogger("nemotron_jax")

# Config, tokenizer, chat template, generation defaults, the index; no code and no weights in other formats.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a string has the form OWNER/NAME."""
    return bool(_ID.fullmatch(name)) and ".." not in name and not name.endswith(".")


def download(hub_id: str, revision: str | None = None) -> Path:
    """The folder of a hub checkpoint in the local cache; what is missing there is downloaded.

    The small files come first: a config that cannot be, or an unknown quantisation, is refused before the weights are
    fetched.

    Args:
      hub_id: OWNER/NAME.
      revision: branch, tag or commit; default the main branch.

    Raises:
      FileNotFoundError: if the hub has no such model or revision, or is out of reach and the cache does not hold it.
      ValueError: if access is refused, or the model is none that can be loaded.
    """
    small = _snapshot(hub_id, revision, list(SMALL_FILES))
    config = NemotronHConfig.from_json(small)
    read_scheme(small, config)
    logger.info("downloading the weights of %s", hub_id)
    folder = _snapshot(hub_id, revision, [*SMALL_FILES, *_weight_files(small)])
    if folder != small:
        logger.warning("%s changed while it was downloaded; the newer one is used", hub_id)
    return folder


def _weight_files(folder: Path) -> list[str]:
    """The files that the index lists; where there is none, every safetensors file at the top."""
    index = folder / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no safetensors index: {error!r}") from error


def _snapshot(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub  # late: it reads the environment when it is imported
    from huggingface_hub import constants, errors

    what = f"hub model {hub_id}" + (f" at {revision}" if revision else "")
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ValueError(f"{what}: access is refused; ask for it on the hub, and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        reason = (
            "there is neither such a folder nor such a model on the hub, or it is private and HF_TOKEN does not open it"
        )
        raise FileNotFoundError(f"{what}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{what}: no such revision") from error
    except errors.HfHubHTTPError as error:
        raise ValueError(f"{what}: the hub answered {str(error).splitlines()[0]}") from error
    except (OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        reason = f"it is neither a folder nor whole in the local cache, and the hub is not reached{offline}"
        raise FileNotFoundError(f"{what}: {reason}: {str(error).splitlines()[0] if str(error) else error!r}") from error
