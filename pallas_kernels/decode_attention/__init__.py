"""One decode step of an attention block between its projections; reference.py is its meaning."""

from pallas_kernels.decode_attention.api import declined, decode_attention, supported

__all__ = ["declined", "decode_attention", "supported"]
