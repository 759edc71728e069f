"""How far two arrays are apart, in float64. A NaN or an infinity on one side alone counts as infinitely far."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one array against its reference.

    Attributes:
      max_abs: largest absolute difference.
      relative_rms: root of (sum of squared differences / sum of the reference's squares).
      cosine: of the angle between the two, flattened; 1 for two zero arrays.
      entries: how many numbers were compared.
    """

    max_abs: float
    relative_rms: float
    cosine: float
    entries: int


def difference(ours: Float[np.ndarray, "..."], reference: Float[np.ndarray, "..."]) -> Difference:
    """Compare two arrays of one shape."""
    a, b = np.asarray(ours, np.float64).ravel(), np.asarray(reference, np.float64).ravel()
    if not a.size:
        return Difference(0.0, 0.0, 1.0, 0)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # equal infinities are no difference
    if not (np.isfinite(a) | same).all() or not (np.isfinite(b) | same).all():
        return Difference(math.inf, math.inf, math.nan, a.size)
    a, b = np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0)
    d = a - b
    norm_a, norm_b = math.sqrt(a @ a), math.sqrt(b @ b)
    rms = math.sqrt(d @ d)
    relative = rms / norm_b if norm_b else (0.0 if rms == 0 else math.inf)
    cosine = float(a @ b / (norm_a * norm_b)) if norm_a and norm_b else (1.0 if norm_a == norm_b else 0.0)
    return Difference(float(np.abs(d).max()), relative, cosine, a.size)


def log_softmax(logits: Float[np.ndarray, "... vocab"]) -> Float[np.ndarray, "... vocab"]:
    """In float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Next-token distributions against the reference's.

    Attributes:
      kl_mean, kl_max: KL(reference || ours) per token, in nats.
      top1: share of tokens with the same most likely id.
      top5: mean share of the reference's five most likely ids among our five.
      tokens: how many were compared.
    """

    kl_mean: float
    kl_max: float
    top1: float
    top5: float
    tokens: int


def distributions(
    ours: Float[np.ndarray, "tokens vocab"], reference: Float[np.ndarray, "tokens vocab"]
) -> Distributions | None:
    """Compare logits row by row; None where there is no row."""
    if not len(ours):
        return None
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return Distributions(math.inf, math.inf, 0.0, 0.0, len(ours))
    p, q = log_softmax(reference), log_softmax(ours)
    kl = np.maximum(np.sum(np.exp(p) * (p - q), -1), 0.0)
    k = min(5, ours.shape[-1])
    best_ours, best = (np.argpartition(-x, k - 1, axis=-1)[:, :k] for x in (ours, reference))
    shared = [len(np.intersect1d(a, b)) for a, b in zip(best_ours, best, strict=True)]
    top1 = float(np.mean(ours.argmax(-1) == reference.argmax(-1)))
    return Distributions(float(kl.mean()), float(kl.max()), top1, float(np.mean(shared)) / k, len(ours))


def two_best(logits: Float[np.ndarray, "... vocab"]) -> tuple[Int[np.ndarray, "... 2"], Float[np.ndarray, "..."]]:
    """Ids of the two largest logits, larger first, and their distance."""
    second, first = np.moveaxis(np.argpartition(logits, -2, axis=-1)[..., -2:], -1, 0)
    value = [np.take_along_axis(logits, i[..., None], -1)[..., 0] for i in (first, second)]
    swap = value[1] > value[0]
    first, second = np.where(swap, second, first), np.where(swap, first, second)
    return np.stack([first, second], -1), np.abs(value[0] - value[1])


def greedy_matches(
    choice: Int[np.ndarray, "batch n"],
    stored: Int[np.ndarray, "batch n"],
    margin: Float[np.ndarray, "batch n"] | None,
    best: Int[np.ndarray, "batch n 2"] | None,
    tie: float,
) -> Bool[np.ndarray, "batch n"]:
    """Which choices count as the stored ones: equal, or one of the two best where their margin is below ``tie``."""
    matches = choice == stored
    if margin is None or best is None:
        return matches
    return matches | ((margin < tie) & (choice[..., None] == best).any(-1))


@dataclasses.dataclass(frozen=True)
class Experts:
    """Which experts were chosen, against the reference's choice.

    Attributes:
      agreement: share of (block, token) with the same set.
      tokens: how many (block, token) were compared.
      flips: for each other one, (block index among the mixture-of-experts blocks, token, the reference's score gap
        between the last expert chosen and the first left out; NaN where it stores none).
      weights: difference of the weights where the sets agree.
    """

    agreement: float
    tokens: int
    flips: tuple[tuple[int, int, float], ...]
    weights: Difference | None


def experts(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> Experts:
    """Compare ``topk_idx`` [blocks, tokens, k] ascending, and ``topk_w`` where the reference has it."""
    chosen, stored = ours["topk_idx"], reference["topk_idx"]
    same = (chosen == stored).all(-1)
    gap = reference.get("topk_gap", np.full(same.shape, np.nan))
    flips = tuple((int(b), int(t), float(gap[b, t])) for b, t in np.argwhere(~same))
    weights = None
    if "topk_w" in reference and "topk_w" in ours:
        weights = difference(ours["topk_w"][same], reference["topk_w"][same])
    return Experts(float(same.mean()) if same.size else 1.0, int(same.size), flips, weights)
