"""Programs that are traced as for a GPU which is not here."""

import contextlib
from collections.abc import Generator

import jax

from pallas_kernels import selection


@contextlib.contextmanager
def traced_for(setting: str, kind: str = "NVIDIA H200") -> Generator[None]:
    """Inside, a choice of kernels is made for one GPU of this kind, with this setting of PALLAS_KERNELS."""
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("tensor",), abstract_device=device)
    with selection.use(setting), jax.sharding.use_abstract_mesh(mesh):
        yield
