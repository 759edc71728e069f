"""The released models, one JSON file each, beside this file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from nemotron_jax.frozen import FrozenMapping, freeze


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A released model. Its numbers are the published ones where there are any."""

    name: str
    hub_ids: tuple[str, ...]
    """Checkpoints on the Hugging Face hub with these shapes."""
    read: bool
    """Whether `config` was read as the released file; otherwise it was put together from `source`."""
    source: str
    parameters: int
    """MTP included."""
    tensors: int
    config: FrozenMapping
    """What `NemotronHConfig.from_dict` is given, in the spelling of the released file where it was read."""


def _load_presets() -> Mapping[str, Preset]:
    presets = {}
    for file in Path(__file__).parent.glob("*.json"):
        d = json.loads(file.read_text(encoding="utf-8"))
        presets[file.stem] = Preset(**d | {"hub_ids": tuple(d["hub_ids"]), "config": freeze(d["config"])})
    return dict(sorted(presets.items(), key=lambda item: item[1].parameters))


PRESETS: Mapping[str, Preset] = _load_presets()


def find_preset(name: str) -> Preset:
    """The preset of that name, or the one that lists that hub id (letter case does not matter)."""
    for preset in PRESETS.values():
        if name.lower() == preset.name or name.lower() in (hub_id.lower() for hub_id in preset.hub_ids):
            return preset
    raise ValueError(f"preset: found {name!r}; accepted: {', '.join(PRESETS)}, or a hub id of one of these")
