"""Many tokens of a Mamba-2 block's state space; reference.py is its meaning."""

from pallas_kernels.chunk_scan.api import chunk_scan, declined, supported

__all__ = ["chunk_scan", "declined", "supported"]
