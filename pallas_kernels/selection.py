"""Which kernels of one device take the place of plain JAX: "auto" chooses by device and shape, unless told otherwise.

The setting is read while a program is traced. It comes from `use`, else from the environment variable PALLAS_KERNELS,
else it is DEFAULT. Programs that are traced already stay as they are. Kernels that communicate have their own choice
(allreduce_rms_norm/choose.py).
"""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Generator

import jax

logger = logging.getLogger(__name__)

NAMES = (
    "mamba_step",
    "rms_norm",
    "grouped_matmul",
    "decode_attention",
    "prefill_attention",
    "chunk_scan",
    "causal_conv",
    "gated_norm",
    "matvec",
    "route",
)
# Those that were right on hardware, where alone some faults of such kernels show, in what was run of their checks
# (benchmarks/decode and benchmarks/prefill say how many), and that were measured to pay: at present all. A new one is
# left out until it has been there.
AUTO = NAMES
VARIABLE = "PALLAS_KERNELS"
DEFAULT = "auto"
HOPPER = ("H100", "H200", "H800", "H20", "GH200")

_setting: contextvars.ContextVar[str | None] = contextvars.ContextVar("pallas_kernels", default=None)


def _names(setting: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in setting.split(","))


def parse(setting: str, source: str = "kernels") -> tuple[str, ...]:
    """The kernels that a setting allows: "none" none, or names with commas, of which "auto" stands for those that pay.

    Raises:
        ValueError: it names something else.
    """
    names = _names(setting)
    if names == ("none",):
        return ()
    if unknown := [name for name in names if name not in (*NAMES, "auto")]:
        what = "none stands alone" if "none" in unknown else f"no such kernel {', '.join(map(repr, unknown))}"
        raise ValueError(
            f"{source} is {setting!r}: {what}; accepted: none, or some of auto,{','.join(NAMES)} with commas"
        )
    return tuple(dict.fromkeys(kernel for name in names for kernel in (AUTO if name == "auto" else (name,))))


def allowed() -> tuple[str, ...]:
    """The kernels that programs traced here may use where the device and the shapes allow it.

    Raises:
        ValueError: the environment variable names something else.
    """
    inside = _setting.get()
    return parse(inside) if inside is not None else parse(os.environ.get(VARIABLE) or DEFAULT, VARIABLE)


def automatic() -> bool:
    """Whether the kernels of "auto" are meant: then those that do not pay at a size are left out there."""
    inside = _setting.get()
    return "auto" in _names(inside if inside is not None else os.environ.get(VARIABLE) or DEFAULT)


def key() -> tuple:
    """What of the setting a program depends on, beside its shapes."""
    return allowed(), automatic()


@contextlib.contextmanager
def use(setting: str) -> Generator[None]:
    """Programs traced inside use this setting.

    Raises:
        ValueError: as `parse`.
    """
    parse(setting)
    token = _setting.set(setting)
    try:
        yield
    finally:
        _setting.reset(token)


def fault(name: str) -> str | None:
    """Why this kernel is not used in the program that is being traced, whatever the shapes; or None."""
    if name not in allowed():
        return f"{name} is switched off"
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = getattr(device, "platform", None) or jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return f"needs a GPU; this program runs on {platform}"
    kind = getattr(device, "device_kind", None) or jax.devices()[0].device_kind
    if not any(name in kind for name in HOPPER):
        return f"needs a Hopper GPU (compute capability 9.0); this is {kind}"
    return None


def declined(name: str, call: str, reason: str | None) -> str | None:
    """Why this kernel is not used for a call, or None: ``reason``, which its shapes give, or what `fault` says.

    Args:
        call: the operation and its shapes; what it runs is logged once.
    """
    reason = reason or fault(name)
    _report(call, reason)
    return reason


@functools.cache
def _report(call: str, reason: str | None) -> None:
    logger.info("%s: %s", call, "mosaic_gpu" if reason is None else f"plain JAX: {reason}")


def varying(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` differs, as JAX tracks them under `shard_map(check_vma=True)`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` typed as differing over `axes` too."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
