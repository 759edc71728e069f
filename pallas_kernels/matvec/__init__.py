"""Few rows times a large matrix that is read once; reference.py is its meaning."""

from pallas_kernels.matvec.api import chosen_declined, chosen_matvec, declined, matvec, supported

__all__ = ["chosen_declined", "chosen_matvec", "declined", "matvec", "supported"]
