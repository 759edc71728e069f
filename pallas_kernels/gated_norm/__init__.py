"""Gated grouped RMSNorm of a Mamba-2 block; reference.py is its meaning."""

from pallas_kernels.gated_norm.api import declined, gated_norm, supported

__all__ = ["declined", "gated_norm", "supported"]
