"""Nemotron-H (Mamba-2, attention, MLP, mixture of experts) in JAX, tensor parallel, with deferred sums."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron_jax.config import NemotronHConfig
    from nemotron_jax.generation import Generator
    from nemotron_jax.parity import compare
    from nemotron_jax.runtime import NemotronH, Output
    from nemotron_jax.sharding import ShardingRules, make_mesh
    from nemotron_jax.weights import convert, export, load, save

__all__ = [
    "Generator",
    "NemotronH",
    "NemotronHConfig",
    "Output",
    "ShardingRules",
    "compare",
    "convert",
    "export",
    "load",
    "make_mesh",
    "save",
]

_HOMES = {
    "config": ("NemotronHConfig",),
    "generation": ("Generator",),
    "parity": ("compare",),
    "runtime": ("NemotronH", "Output"),
    "sharding": ("ShardingRules", "make_mesh"),
    "weights": ("convert", "export", "load", "save"),
}


def __getattr__(name: str) -> Any:
    """Each name, and each module, when it is first asked for: the program starts before JAX is imported."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
