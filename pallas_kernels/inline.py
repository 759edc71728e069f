"""What inline code in a kernel says about the references that it takes."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu


def lasting() -> plgpu.RefType:
    """A reference to memory that outlives the call and belongs to the kernel alone, an array to everybody else.

    Writes through it are hidden from jax: since 0.12.1 it wants arguments that are written to be its own mutable
    references, of which it would make copies, and peers write to addresses that they were told once.
    """
    told = {"write": False} if "write" in {field.name for field in dataclasses.fields(plgpu.RefType)} else {}
    return plgpu.RefType(**told)
