"""Ways to break a model on purpose, to see that comparing names the layer."""

import contextlib
from collections.abc import Generator
from unittest import mock

import jax
import jax.numpy as jnp

from nemotron_jax import NemotronH
from nemotron_jax import model as blocks
from nemotron_jax.fusion import PendingSum, settle


def change_one_weight(model: NemotronH, *path: str | int, by: float = 0.5) -> None:
    """Add ``by`` to one number, the first, of a parameter."""
    value = model.parameter(*path)
    model.replace_weights({path: value.at[(0,) * value.ndim].add(by)})


@contextlib.contextmanager
def reduced_twice(layer: int) -> Generator[None]:
    """Models traced inside reduce the output of one block a second time, which multiplies it by the axis size.

    jax does not notice (an invariant value may be summed). The functions of fusion.py would refuse: they are not asked.
    """
    original = blocks.Block.__call__
    position = -1

    def broken(self, x, residual, *args, **options):
        nonlocal position
        position = 0 if residual is None else position + 1  # the first block is the one without a residual
        out, *rest = original(self, x, residual, *args, **options)
        if position == layer:
            out = jax.lax.psum(settle(out, self.sum_axis) if isinstance(out, PendingSum) else out, self.sum_axis.name)
        return out, *rest

    with mock.patch.object(blocks.Block, "__call__", broken):
        yield


def fill_with_nan(model: NemotronH, *path: str | int) -> None:
    """Make one number of a parameter NaN."""
    value = model.parameter(*path)
    model.replace_weights({path: value.at[(0,) * value.ndim].set(jnp.nan)})
