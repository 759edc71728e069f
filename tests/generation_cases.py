"""What the tests of generation share."""

import functools
import os
from pathlib import Path

import numpy as np

os.environ.setdefault("NEMOTRON_JAX_COMPILATION_CACHE", "off")  # tests leave nothing in the user's cache folder

import nemotron_jax
from nemotron_jax.generation.text import Tokenizer
from nemotron_jax.weights import load
from nemotron_jax.weights.loading import default_model

DATA = Path(__file__).parent / "data"


@functools.lru_cache(maxsize=8)
def trained(tensor: int = 1, data: int = 1, fusion: str = "none"):
    """The shipped model in float32."""
    return load(mesh=nemotron_jax.make_mesh(tensor, data), dtype="float32", fusion=fusion, progress=False)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(default_model())


@functools.cache
def reference() -> dict[str, np.ndarray]:
    with np.load(DATA / "models" / "tiny-nemotron-h" / "reference.npz") as file:
        return dict(file)


def reference_prompts() -> tuple[list[list[int]], np.ndarray]:
    """Prompts of several lengths and the tokens that PyTorch writes after them, greedily."""
    r = reference()
    padded = [row[mask.astype(bool)].tolist() for row, mask in zip(r["pad_ids"], r["pad_mask"], strict=True)]
    return [*r["ids"].tolist(), *padded], np.concatenate([r["greedy"], r["pad_greedy"]])


def one_by_one(model, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens the plain way: the model's own call, one token at a time."""
    cache, ids, found = None, prompt, []
    for _ in range(count):
        out = model(np.array([ids]), cache=cache)
        found.append(int(np.argmax(np.asarray(out.logits)[0, -1])))
        cache, ids = out.cache, found[-1:]
    return found
