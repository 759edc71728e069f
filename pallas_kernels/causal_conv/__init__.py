"""Causal convolution and SiLU of a Mamba-2 block's prefill; reference.py is its meaning."""

from pallas_kernels.causal_conv.api import causal_conv, declined, supported

__all__ = ["causal_conv", "declined", "supported"]
