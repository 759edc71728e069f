"""Kernels for JAX on NVIDIA GPUs. They know arrays and mesh axes, and nothing of models.

One folder per operation: `api.py` is what to call, `reference.py` what it means.
"""

from pallas_kernels.allreduce_rms_norm.api import allreduce_rms_norm
from pallas_kernels.allreduce_rms_norm.flags_state import FlagsState, flags_state_specs, make_flags_state
from pallas_kernels.errors import Unsupported
from pallas_kernels.rms_norm.api import rms_norm

__all__ = ["FlagsState", "Unsupported", "allreduce_rms_norm", "flags_state_specs", "make_flags_state", "rms_norm"]
