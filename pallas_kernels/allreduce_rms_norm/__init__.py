"""All-reduce + residual add + RMSNorm in one operation; reference.py is its meaning."""

from pallas_kernels.allreduce_rms_norm.api import allreduce_rms_norm
from pallas_kernels.allreduce_rms_norm.choose import choose
from pallas_kernels.allreduce_rms_norm.flags_state import (
    FlagsState,
    abstract_flags_state,
    flags_state_specs,
    make_flags_state,
    state_bytes,
)
from pallas_kernels.allreduce_rms_norm.probe import peers_reachable, unreachable_reason
from pallas_kernels.allreduce_rms_norm.support import IMPLEMENTATIONS, PEER_MEMORY, supported
from pallas_kernels.errors import Unsupported

__all__ = [
    "IMPLEMENTATIONS",
    "PEER_MEMORY",
    "FlagsState",
    "Unsupported",
    "abstract_flags_state",
    "allreduce_rms_norm",
    "choose",
    "flags_state_specs",
    "make_flags_state",
    "peers_reachable",
    "state_bytes",
    "supported",
    "unreachable_reason",
]
