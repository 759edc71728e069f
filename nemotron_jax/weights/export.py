"""Hugging Face layout, written from any source: same names, shapes, dtypes and bytes; the same files where known."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nemotron_jax.parameters import Cut
from nemotron_jax.weights.huggingface import INDEX, SINGLE
from nemotron_jax.weights.source import BLOCK, DTYPES, Source, Tensor

LARGEST_FILE = 5 * 10**9  # bytes of a file where the source does not say what was in which


def write_safetensors(folder: Path, source: Source, done: Callable[[int], None]) -> None:
    """Write every tensor of ``source`` into ``folder``; host memory holds one piece of a tensor."""
    files = _files(source)
    metadata = getattr(source, "metadata", {})
    for file, names in files.items():
        _write_file(folder / file, source, names, metadata.get(file) or {"format": "pt"}, done)
    if list(files) != [SINGLE]:
        weight_map = {source.tensors[name].name: file for file, names in files.items() for name in names}
        numbers = sum(math.prod(t.shape) for t in source.tensors.values())
        totals = {"total_parameters": numbers, "total_size": source.bytes()}
        index = {"metadata": totals, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(source: Source) -> dict[str, list[str]]:
    """Which tensor goes into which file."""
    files: dict[str, list[str]] = {}
    if all(t.file for t in source.tensors.values()):
        for name, t in source.tensors.items():
            files.setdefault(t.file, []).append(name)
        return dict(sorted(files.items()))
    groups: list[list[str]] = [[]]
    size = 0
    for name, t in source.tensors.items():
        if groups[-1] and size + t.bytes > LARGEST_FILE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += t.bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _write_file(
    path: Path, source: Source, names: list[str], metadata: dict[str, str], done: Callable[[int], None]
) -> None:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name in names:
        t = source.tensors[name]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [position, position + t.bytes]}
        position += t.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for block in _blocks(source, name, source.tensors[name]):
                f.write(memoryview(block.reshape(-1).view(np.uint8)))
                done(block.nbytes)


def _blocks(source: Source, name: str, t: Tensor):
    if not t.shape:
        yield source.rows(name).reshape(1)
        return
    row = math.prod(t.shape[1:]) * DTYPES[t.dtype].itemsize
    step = max(1, 4 * BLOCK // max(1, row))
    for lo in range(0, t.shape[0], step):
        hi = min(lo + step, t.shape[0])
        out = np.empty((hi - lo, *t.shape[1:]), DTYPES[t.dtype])
        source.read_block(name, 0, lo, hi, [Cut(lo, hi, out)])
        yield out
