"""Sums that are still to be taken over a mesh axis, who defers them, and the norm that takes them in.

A row-parallel projection gives every rank a summand. Its block either reduces it at once (``eager``) or hands on a
:class:`PendingSum`, which the next norm reduces together with the residual add and the RMSNorm. Only this module reads
``PendingSum.value`` and only this module and ``sharding.py`` issue collectives, so a sum that is forgotten or taken
twice
is an error while tracing: a PendingSum is no array, and a value that no longer varies over the axis is refused.
"""

import dataclasses
import logging

import jax
from jax import lax
from jax.sharding import Mesh

from nemotron_jax.sharding import Axis, ShardingRules, varies
from pallas_kernels import rms_norm
from pallas_kernels.allreduce_rms_norm import allreduce_rms_norm, choose, supported

logger = logging.getLogger("nemotron_jax")

EAGER = "eager"
LETTERS = {".": EAGER, "p": "psum", "g": "gather", "1": "one_shot", "2": "two_shot", "f": "flags", "a": "auto"}
IMPLEMENTATIONS = tuple(name for name in LETTERS.values() if name not in (EAGER, "auto"))
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PendingSum:
    """A per-device summand of a value that is still to be summed over ``axis``. It is no Array: arithmetic on it is a
    TypeError.

    Attributes:
      value: varies over the axis. Read by this module alone.
      axis: the mesh axis to sum over.
    """

    value: jax.Array
    axis: Axis = dataclasses.field(metadata={"static": True})


def defer(x: jax.Array, axis: Axis) -> "jax.Array | PendingSum":
    """Mark ``x`` as a summand over ``axis``; whoever takes it must reduce it. The identity on an axis of size 1.

    Raises:
      TypeError: if ``x`` is a PendingSum already, or does not vary over the axis (it is reduced already).
    """
    if isinstance(x, PendingSum):
        raise TypeError("defer: found a PendingSum, accepted a per-device array: this sum is deferred already")
    if axis.size == 1:
        return x
    if not varies(x, axis):
        raise TypeError(
            f"defer: found {jax.typeof(x)}, which is the same on every rank of {axis.name!r}: its sum is taken already"
        )
    return PendingSum(x, axis)


def settle(x: "PendingSum | jax.Array", axis: Axis) -> jax.Array:
    """Reduce a pending sum now. The identity on an axis of size 1.

    Raises:
      TypeError: if ``x`` is no PendingSum: its sum is taken already, and a second one would multiply it by the axis
      size.
    """
    if isinstance(x, PendingSum):
        return _psum(x.value, x.axis)
    if axis.size == 1:
        return x
    raise TypeError(
        f"settle: found {jax.typeof(x)}, accepted a PendingSum: a value that is no pending sum is not summed again"
    )


def _psum(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.psum(x, axis.name)


def add_norm(
    x: "jax.Array | PendingSum",
    residual: jax.Array | None,
    weight: jax.Array,
    *,
    axis: Axis,
    eps: float,
    implementation: str = EAGER,
    residual_dtype=None,
    state=None,
) -> tuple[jax.Array, jax.Array]:
    """Take a block's output, reduced or pending, into the residual and normalise it.

    ``new_residual = residual + sum(x)`` rounded once to the residual's dtype; ``normed = rms_norm(new_residual) *
    weight``,
    computed in float32 and cast once.

    Args:
      x: [batch, tokens, hidden] from the block before (or the embedding).
      residual: [batch, tokens, hidden], or None before the first block: then x itself becomes the residual.
      weight: [hidden], any float dtype.
      axis: the tensor axis of the model.
      implementation: of the fused operation, for a pending x.
      residual_dtype: dtype of the residual stream where it starts (residual None).
      state: persistent buffers of the ``flags`` implementation.

    Returns:
      (normed in x's dtype, new_residual). The new residual is the hidden state after the block: the accessor that
      captures hidden states reads it, so what is captured has been summed exactly once.

    Raises:
      TypeError: for an x that differs between ranks and is no PendingSum (a forgotten sum).
    """
    if isinstance(x, PendingSum):
        if residual is None:
            raise TypeError("add_norm: a pending sum needs a residual; the first norm takes the embedding")
        return allreduce_rms_norm(
            x.value, residual, weight, axis_name=x.axis.name, eps=eps, implementation=implementation, state=state
        )
    if varies(x, axis):
        raise TypeError(
            f"add_norm: found {jax.typeof(x)}, which differs between the ranks of {axis.name!r} and is no PendingSum"
        )
    if residual is None:
        residual = x.astype(residual_dtype or x.dtype)
        return rms_norm(residual, None, weight, eps=eps, out_dtype=x.dtype)
    return rms_norm(x, residual, weight, eps=eps)


# ------------------------------------------------------------------------------------------------ plans
@dataclasses.dataclass(frozen=True)
class Boundary:
    """What happens to one block's output on its way into the next norm (of block ``layer + 1``, or the final norm).

    Attributes:
      layer: 0-based block index.
      kind: pattern letter of the block.
      implementation: ``eager`` (reduced in the block) or the fused operation's implementation in the next norm.
      reason: why this one, in words.
    """

    layer: int
    kind: str
    implementation: str
    reason: str

    @property
    def defers(self) -> bool:
        return self.implementation != EAGER


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """One boundary per block. Computed from static facts only, so every rank traces the same program."""

    spec: str
    boundaries: tuple[Boundary, ...]

    def implementation(self, layer: int) -> str:
        return self.boundaries[layer].implementation

    @property
    def fused_boundaries(self) -> int:
        """How many block outputs stay unreduced until the next norm takes them in."""
        return sum(b.defers for b in self.boundaries)

    @property
    def letters(self) -> str:
        back = {name: letter for letter, name in LETTERS.items()}
        return "".join(back[b.implementation] for b in self.boundaries)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why boundaries for which the plan names an implementation run another one."""
        asked = parse_plan(self.spec, "".join(b.kind for b in self.boundaries))
        return tuple(
            dict.fromkeys(
                b.reason
                for b, name in zip(self.boundaries, asked, strict=True)
                if name in IMPLEMENTATIONS and b.implementation not in (name, EAGER)
            )
        )

    def uses(self, implementation: str) -> bool:
        return any(b.implementation == implementation for b in self.boundaries)

    def describe(self) -> str:
        """One line: the plan, what runs where, and every reason for a fallback."""
        kinds = {b.implementation: 0 for b in self.boundaries}
        for b in self.boundaries:
            kinds[b.implementation] += 1
        reasons = dict.fromkeys(b.reason for b in self.boundaries if b.reason)
        ran = ", ".join(f"{n} {name}" for name, n in kinds.items()) or "no blocks"
        return f"fusion plan {self.spec!r}: {ran}" + (f" ({'; '.join(reasons)})" if reasons else "")


def parse_plan(spec: str, pattern: str) -> tuple[str, ...]:
    """What ``spec`` asks for at each boundary: ``eager``, an implementation, or ``auto``.

    Accepted: ``none`` | ``all`` | ``auto`` | ``kinds:M*`` | ``layers:`` and one letter per block (``.`` eager, ``p``
    psum,
    ``g`` gather, ``1`` one_shot, ``2`` two_shot, ``f`` flags, ``a`` auto); ``all`` and ``kinds:`` may end in
    ``/IMPLEMENTATION``.

    Raises:
      ValueError: naming what was found and what is accepted.
    """
    usage = "accepted: none, all, auto, kinds:LETTERS, layers:LETTERS; all and kinds: may end in /" + "|".join(
        IMPLEMENTATIONS
    )
    head, slash, implementation = spec.partition("/")
    if slash and (head in ("none", "auto") or head.startswith("layers:")):
        raise ValueError(f"fusion plan {spec!r}: {head.partition(':')[0]!r} takes no /IMPLEMENTATION; {usage}")
    if slash and implementation not in (*IMPLEMENTATIONS, "auto"):
        raise ValueError(f"fusion plan {spec!r}: unknown implementation {implementation!r}; {usage}")
    implementation = implementation or "auto"
    if head == "none":
        return (EAGER,) * len(pattern)
    if head in ("all", "auto"):
        return (implementation,) * len(pattern)
    if head.startswith("kinds:"):
        kinds = head.removeprefix("kinds:")
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown or not kinds:
            raise ValueError(
                f"fusion plan {spec!r}: found block kinds {unknown or 'none'}, accepted letters of {''.join(KINDS)!r}"
            )
        return tuple(implementation if kind in kinds else EAGER for kind in pattern)
    if head.startswith("layers:"):
        letters = head.removeprefix("layers:")
        unknown = [f"{c!r} at {i}" for i, c in enumerate(letters) if c not in LETTERS]
        if unknown:
            raise ValueError(
                f"fusion plan {spec!r}: unknown letters {', '.join(unknown)}, accepted {''.join(LETTERS)!r}"
            )
        if len(letters) != len(pattern):
            raise ValueError(
                f"fusion plan {spec!r}: found {len(letters)} letters, accepted one per block: {len(pattern)}"
            )
        return tuple(LETTERS[c] for c in letters)
    raise ValueError(f"fusion plan {spec!r} is unknown; {usage}")


def plan(
    spec: str,
    pattern: str,
    *,
    tokens: int,
    hidden: int,
    dtype,
    residual_dtype,
    mesh: Mesh,
    axis: Axis,
    rules: ShardingRules,
    platform: str | None = None,
    device_kind: str | None = None,
    peers_reachable: bool = True,
    steps: int = 1,
) -> FusionPlan:
    """Resolve ``spec`` for one program. Only static facts count: pattern, shapes, dtypes, mesh, device kind, and one
    start-up probe.

    An implementation that cannot run here gives way to the best one that can, with the reason recorded at its boundary.

    Args:
      tokens: rows of the [tokens, hidden] message on one device (local batch x new tokens).
      peers_reachable: the start-up probe's answer (can a kernel read its peers' memory).
      steps: how often the program runs each boundary when it is started once (a loop on the device).
    """
    platform = platform or mesh.devices.flat[0].platform
    device_kind = device_kind or mesh.devices.flat[0].device_kind
    boundaries = []

    def refusal(name: str) -> str | None:
        return supported(
            name, tokens=tokens, hidden=hidden, dtype=dtype, residual_dtype=residual_dtype, world=axis.size, mesh=mesh,
            platform=platform, processes_reachable=peers_reachable,
        )  # fmt: skip

    def fastest() -> tuple[str, str]:
        usable = [name for name in IMPLEMENTATIONS if refusal(name) is None]
        return choose(
            tokens=tokens,
            hidden=hidden,
            dtype=dtype,
            world=axis.size,
            device_kind=device_kind,
            available=usable,
            runs_per_start=steps,
        )

    for layer, (kind, asked) in enumerate(zip(pattern, parse_plan(spec, pattern), strict=True)):
        if axis.size == 1:
            boundaries.append(Boundary(layer, kind, EAGER, "tensor axis of size 1: there is nothing to sum"))
        elif not rules.cuts(kind):
            boundaries.append(Boundary(layer, kind, EAGER, f"{KINDS[kind]} blocks are not cut by the sharding rules"))
        elif asked == EAGER:
            boundaries.append(Boundary(layer, kind, EAGER, ""))
        elif asked == "auto":
            boundaries.append(Boundary(layer, kind, *fastest()))
        else:
            why_not = refusal(asked)
            if why_not is None:
                boundaries.append(Boundary(layer, kind, asked, ""))
            else:
                instead, why = fastest()
                boundaries.append(
                    Boundary(layer, kind, instead, f"{asked} cannot run here: it {why_not}; {instead} instead ({why})")
                )
    return FusionPlan(spec, tuple(boundaries))
