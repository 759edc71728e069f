"""Causal attention of many new tokens over a row's cache; reference.py is its meaning."""

from pallas_kernels.prefill_attention.api import declined, prefill_attention, supported

__all__ = ["declined", "prefill_attention", "supported"]
