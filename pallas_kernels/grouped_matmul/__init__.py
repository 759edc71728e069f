"""Products of sorted rows with the matrix of their group; reference.py is its meaning."""

from pallas_kernels.grouped_matmul.api import declined, grouped_matmul, row_tile, supported

__all__ = ["declined", "grouped_matmul", "row_tile", "supported"]
