"""Few rows times a large matrix that is read once; reference.py is its meaning."""

from pallas_kernels.matvec.api import declined, matvec, supported

__all__ = ["declined", "matvec", "supported"]
