"""Compiled programs kept on disk between runs: on by default, one environment variable switches it.

``NEMOTRON_JAX_COMPILATION_CACHE`` is ``off``, or a folder. Unset: ``nemotron_jax/compiled`` in the user's cache folder
(``XDG_CACHE_HOME``, or ``~/.cache``). A cache that the user has set up in JAX itself (``JAX_COMPILATION_CACHE_DIR`` or
``jax_compilation_cache_dir``) is left as it is.
"""

import logging
import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger("nemotron_jax")

SWITCH = "NEMOTRON_JAX_COMPILATION_CACHE"


def enable() -> Path | None:
    """Use the folder that the environment names; returns it, or None where compiled programs are not kept.

    A folder that cannot be written to is said in the log, and nothing is kept.
    """
    asked = os.environ.get(SWITCH, "")
    if asked.lower() in ("off", "0", "no", "false"):
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(asked) if asked else base / "nemotron_jax" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.info("compiled programs are not kept: %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX decides at its first compilation whether there is a cache
    return folder
