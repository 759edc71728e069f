"""Checkpoint folders for the weight tests: raw tensors read and written without the code under test."""

import json
import shutil
from pathlib import Path

import numpy as np

from tests.conftest import DATA, TINY

CASES = sorted(p.name for p in TINY.iterdir() if (p / "hf").is_dir())
TRAINED = ("tiny-nemotron-h", "tiny-nemotron-3")
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> safetensors dtype, shape, bytes


def folder_of(case: str) -> Path:
    """The folder in Hugging Face layout of a tiny case or a trained model."""
    if case == "tiny-nemotron-h":
        return DATA.parent.parent / "nemotron_jax" / "models" / case
    return DATA / "models" / case if case in TRAINED else TINY / case / "hf"


def read_raw(folder: Path) -> Raw:
    """Every tensor of every safetensors file of a folder."""
    found: Raw = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in found
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + size + begin : 8 + size + end])
    return found


def write_file(file: Path, tensors: Raw) -> None:
    """One safetensors file."""
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write_folder(folder: Path, tensors: Raw, like: Path, *, files: int = 1) -> Path:
    """A folder with the small files of ``like`` and these tensors, dealt out over so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
            (folder / file.name).chmod(0o644)
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in names[i::files]})
        weight_map |= dict.fromkeys(names[i::files], file)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit_json(file: Path, **values) -> None:
    """Set keys of a JSON file; None takes a key away."""
    d = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in d.items() if value is not None}))


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, rounding to nearest even by integer arithmetic."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
