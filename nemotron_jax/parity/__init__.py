"""Comparing with stored PyTorch outputs, and runs of our own with each other."""

from nemotron_jax.parity.comparison import Comparison, compare, compare_arrays
from nemotron_jax.parity.record import describe, record, save_run
from nemotron_jax.parity.reference import Reference, read_reference

__all__ = ["Comparison", "Reference", "compare", "compare_arrays", "describe", "read_reference", "record", "save_run"]
