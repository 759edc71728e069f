"""Where a program is meant to run: the devices that are here, or a number of H200 that are not.

Without the GPUs a program can be compiled for them where jax's CUDA plugin is installed (no driver is needed), and
otherwise lowered for CUDA. Both give the real program's collectives; compiling gives its memory too.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from nemotron_jax.sharding import DATA, TENSOR, make_mesh

HERE = "here"


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU, in the numbers that fitting and predicting need.

    Attributes:
      kind: as ``jax.Device.device_kind`` says it.
      memory: bytes.
      bandwidth: bytes a second of its memory, as specified.
      flops: dense bfloat16 operations a second that matrix products reach.
    """

    kind: str
    memory: int
    bandwidth: float
    flops: float


H200 = Device("NVIDIA H200", 150_754_820_096, 4.8e12, 790e12)
DEVICES = {"h200": H200}

# What XLA asks about a device to compile for it. H200 SXM, as the driver reports it.
_H200_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where to build meshes.

    Attributes:
      name: ``here`` or a key of DEVICES.
      devices: jax devices: real ones, virtual ones, or those of a topology; none where programs are only lowered.
      count: how many of them.
      how: ``run``: programs can run; ``compile``: they can be compiled; ``lower``: they can be lowered.
      platform: that the programs are for: ``cpu``, ``gpu`` or ``cuda``.
      device_kind: that the programs are for.
    """

    name: str
    devices: Sequence[Any]
    count: int
    how: str
    platform: str
    device_kind: str

    @property
    def device(self) -> Device | None:
        """Its numbers, where they are known."""
        return next((d for d in DEVICES.values() if d.kind == self.device_kind), None)

    def mesh(self, tensor: int = 1, data: int = 1) -> Mesh | AbstractMesh:
        """Over the first ``tensor * data`` of the devices; abstract where there are none.

        Raises:
          ValueError: there are not so many.
        """
        if self.devices:
            return make_mesh(tensor, data, self.devices)
        if tensor * data > self.count:
            raise ValueError(f"mesh data={data} x tensor={tensor} needs {data * tensor} devices, found {self.count}")
        device = AbstractDevice(self.device_kind, num_cores=None, platform=self.platform)
        return AbstractMesh((data, tensor), (DATA, TENSOR), abstract_device=device)


def parse(spec: str) -> tuple[str, int]:
    """``h200:8`` or ``h200`` (8 of them) as (name, how many).

    Raises:
      ValueError: for an unknown kind or count.
    """
    match = re.fullmatch(r"(\w+)(?::(\d+))?", spec)
    if match is None or match[1] not in DEVICES or int(match[2] or 8) < 1:
        raise ValueError(f"devices: found {spec!r}, accepted NAME or NAME:COUNT with NAME one of {', '.join(DEVICES)}")
    return match[1], int(match[2] or 8)


def here() -> Target:
    """The devices of this process."""
    devices = jax.devices()
    return Target(HERE, devices, len(devices), "run", devices[0].platform, devices[0].device_kind)


def without_gpus() -> None:
    """Before JAX starts: no look at GPUs. :func:`absent` needs it where there is a CUDA plugin and no driver."""
    jax.config.update("jax_platforms", "cpu")


def can_compile() -> bool:
    """Whether a CUDA plugin is installed, with which programs can be compiled for GPUs that are not here."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))


def absent(name: str, count: int, *, compile: bool = True) -> Target:
    """``count`` GPUs of a kind, none of which need be here.

    Args:
      name: key of DEVICES.
      count: how many.
      compile: use the compiler where it is installed; otherwise, and without it, programs are lowered only.
    """
    kind = DEVICES[name].kind
    if compile and can_compile():
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(platform="cuda", target_config=_H200_CONFIG, topology=f"1x1x{count}")
        return Target(name, topology.devices, count, "compile", "gpu", kind)
    return Target(name, (), count, "lower", "gpu", kind)
