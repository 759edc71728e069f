"""A mixture of experts' router behind its matrix product; reference.py is its meaning."""

from pallas_kernels.route.api import declined, route, supported

__all__ = ["declined", "route", "supported"]
