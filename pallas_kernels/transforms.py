"""What a kernel does under JAX's transformations: what the plain JAX does that defines what it computes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def as_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which in reverse-mode differentiation runs `reference` again on the same operands, and under `vmap`
    `reference` in its place.

    Both take the operands alone (None and integers among them) and give results of the same types.
    """

    @custom_vmap
    def run(*operands):
        return kernel(*operands)

    @run.def_vmap
    def rule(size, mapped, *operands):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
        outs = jax.vmap(reference, axes, axis_size=size)(*operands)
        return outs, jax.tree.map(lambda _: True, outs)

    @jax.custom_vjp
    def call(*operands):
        return run(*operands)

    def forward(*operands):
        return run(*operands), operands

    def backward(operands, cotangents):
        return jax.vjp(reference, *operands)[1](cotangents)

    call.defvjp(forward, backward)
    return call
