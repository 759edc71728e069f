"""One folder of weights written as a whole: small files, tensors, and whatever the caller adds at the end."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from nemotron_jax.config import NemotronHConfig
from nemotron_jax.files import reason
from nemotron_jax.weights.atomic import replacing
from nemotron_jax.weights.companions import carry
from nemotron_jax.weights.export import write_safetensors
from nemotron_jax.weights.orbax import write_arrays
from nemotron_jax.weights.progress import progress_bar
from nemotron_jax.weights.source import Source

logger = logging.getLogger("nemotron_jax")

ORBAX, HUGGINGFACE = "orbax", "huggingface"


def write(
    path: Path,
    kind: str,
    source: Source,
    config: NemotronHConfig,
    folder: Path | None,
    *,
    progress: bool | None,
    finish: Callable[[Path], None] = lambda new: None,
) -> None:
    """Put a checkpoint at ``path``, in place of whatever is there, in one step at the end.

    Args:
      path: where to.
      kind: ORBAX or HUGGINGFACE.
      source: the tensors.
      config: the model's configuration.
      folder: where config, tokenizer and other small files come from.
      progress: a progress bar on stderr; None: where stderr is a terminal.
      finish: called with the new folder when everything else is in it; may write more, or raise to give it up.

    Raises:
      ValueError: if the disk has no room, or writing failed. What was at ``path`` is untouched.
    """
    needed = source.bytes()
    writer: Callable = write_arrays if kind == ORBAX else write_safetensors
    arguments = (config,) if kind == ORBAX else ()
    try:
        with replacing(path) as new:
            free = shutil.disk_usage(new).free
            if free < needed:
                raise OSError(f"it needs {needed} bytes, {free} are free on its disk")
            carry(folder, new, config, dequantized=source.quantized)
            with progress_bar(f"writing {path.name}", needed, progress) as bar:
                writer(new, source, *arguments, bar.update)
            finish(new)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} was not written: {reason(error)}") from error
    logger.info("wrote %d tensors, %.1f MB to %s", len(source.tensors), needed / 1e6, path)
