"""One decode step of a Mamba-2 block between its projections; reference.py is its meaning."""

from pallas_kernels.mamba_step.api import declined, mamba_step, supported

__all__ = ["declined", "mamba_step", "supported"]
