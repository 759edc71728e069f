"""Which implementation to take: looked up in measurements that ship with the package (tuning.json)."""

import functools
import json
import math
from collections.abc import Collection
from importlib import resources

import jax
import jax.numpy as jnp

from pallas_kernels.allreduce_rms_norm.support import IMPLEMENTATIONS

FALLBACK = "psum"
# On a number of devices that nobody has measured, kernels are chosen only for messages so small that latency is all.
UNMEASURED_BYTES = 256 * 1024


@functools.cache
def measurements() -> dict:
    """The shipped table, by device kind.

    Each entry holds "source", "call_site_us" (name: microseconds that a call site costs each time a program starts) and
    "rows" ("world", "tokens", "hidden", "dtype", "us": name: microseconds per call in a loop on the device).
    """
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())


def choose(
    *,
    tokens: int,
    hidden: int,
    dtype: jax.typing.DTypeLike,
    world: int,
    device_kind: str,
    available: Collection[str] = IMPLEMENTATIONS,
    runs_per_start: float = 1.0,
) -> tuple[str, str]:
    """The implementation that measured fastest for a message of this size, among the available ones.

    The row taken is that of the same device kind, the nearest number of devices, and the nearest message
    (tokens x hidden x itemsize in bytes, on a logarithmic scale).

    Args:
        tokens: rows per device.
        hidden: row length.
        dtype: dtype of the partials.
        world: size of the axis that is summed over.
        device_kind: `jax.Device.device_kind`, for instance "NVIDIA H200".
        available: names that can serve the call (see `supported`); must contain "psum".
        runs_per_start: how often the call runs each time its program starts: 1 in a prefill or in a decode step that
            the host starts, the number of steps in a loop on the device. Kernels that ask XLA for their peers'
            addresses pay for that at each start.

    Returns:
        (name, reason in words).
    """
    if world == 1:
        return FALLBACK, "one device: nothing to sum"
    if FALLBACK not in available:
        raise ValueError(f"available is {sorted(available)}; it must contain {FALLBACK!r}, which serves every call")
    kind = measurements().get(device_kind)
    if kind is None:
        return FALLBACK, f"no measurements for device kind {device_kind!r}"
    size = max(1, tokens * hidden * jnp.dtype(dtype).itemsize)

    def distance(row: dict) -> tuple[float, float, int]:
        message = row["tokens"] * row["hidden"] * jnp.dtype(row["dtype"]).itemsize
        return abs(math.log2(row["world"] / world)), abs(math.log2(message / size)), abs(row["hidden"] - hidden)

    row = min(kind["rows"], key=distance)
    if row["world"] != world and size * (world - 1) > UNMEASURED_BYTES:
        return FALLBACK, f"{size} bytes on {world} devices: measured on {row['world']} devices only"
    site = kind["call_site_us"]
    times = {
        name: us + site.get(name, 0) / max(1.0, runs_per_start) for name, us in row["us"].items() if name in available
    }
    best = min(times, key=times.__getitem__)
    measured = f"{row['tokens']} x {row['hidden']} {row['dtype']} on {row['world']} devices"
    if best == FALLBACK:
        return best, f"fastest of {', '.join(sorted(times))} at {measured}: {times[best]:.1f} us"
    return best, f"{times[best]:.1f} us against {times[FALLBACK]:.1f} for {FALLBACK} at {measured}"
