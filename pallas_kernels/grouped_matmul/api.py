"""Public entry: rows sorted by group, in tiles that each belong to one group, times their group's matrix."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection, transforms
from pallas_kernels.errors import Unsupported
from pallas_kernels.grouped_matmul import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
LARGEST_ROW_TILE = 128
LEAST_INPUTS, LEAST_OUTPUTS = 64, 128  # a step and a tile of the kernel
STEP = 16  # the narrowest pattern that TMA and the tensor cores share


def row_tile(rows: int, groups: int) -> int:
    """Rows of a tile for so many rows in so many groups: a group of average size fills one tile, where that exists.

    Smaller tiles waste fewer rows, larger ones read their matrix less often.
    """
    average = -(-rows // max(groups, 1))
    return min(LARGEST_ROW_TILE, max(8, 1 << (average - 1).bit_length()))


def supported(*, row_tile: int, inputs: int, outputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot serve these shapes, or None. The device is another question: `selection.fault`."""
    if jnp.dtype(dtype) not in FLOATS:
        return f"needs bfloat16 or float16; x is {jnp.dtype(dtype)}"
    if row_tile % 8 or not 8 <= row_tile <= LARGEST_ROW_TILE:
        return f"needs a row tile of 8 to {LARGEST_ROW_TILE} in steps of 8; it is {row_tile}"
    for name, size, least in (("inputs", inputs, LEAST_INPUTS), ("outputs", outputs, LEAST_OUTPUTS)):
        if size < least or size % STEP:
            return f"needs {name} of at least {least} in steps of {STEP}; there are {size}"
    return None


def declined(*, row_tile: int, inputs: int, outputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a call without `implementation` uses plain JAX in the program that is being traced, or None: the kernel."""
    reason = supported(row_tile=row_tile, inputs=inputs, outputs=outputs, dtype=dtype)
    return selection.declined(
        "grouped_matmul", f"grouped_matmul, tiles of {row_tile} rows x {inputs} -> {outputs}", reason
    )


def grouped_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Float[Array, "groups outputs inputs"],
    tile_group: Int[Array, " tiles"],
    used: Int[Array, " 1"],
    *,
    squared_relu: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows outputs"]:
    """Each tile of rows times the matrix of its group; whatever a row holds, it reaches no other row.

    The kernel's gradient is the reference's.

    Args:
        x: [tiles * row tile, inputs].
        matrices: [groups, outputs, inputs], of x's dtype; those that no used tile names are not read.
        tile_group: int32, the group of each tile.
        used: [1], int32: so many tiles count, from the first on. The time goes by them, not by `tiles`.
        squared_relu: take relu(y)^2 of each result.
        implementation: "reference" or "mosaic_gpu"; None: the kernel where it can run and is switched on.

    Returns:
        [rows, outputs] in x's dtype, accumulated in float32. Rows of tiles that are not used mean nothing.

    Raises:
        ValueError: shapes or types do not fit each other; all faults are listed.
        Unsupported: the implementation asked for cannot serve this call.
    """
    rows, tiles = x.shape[0], tile_group.shape[0]
    faults = []
    if matrices.ndim != 3 or matrices.shape[2] != x.shape[1]:
        faults.append(f"matrices has shape {matrices.shape}; accepted: (groups, outputs, {x.shape[1]})")
    if matrices.dtype != x.dtype:
        faults.append(f"matrices has dtype {matrices.dtype}; accepted: {x.dtype}, that of x")
    if tiles == 0 or rows % tiles:
        faults.append(f"tile_group has shape {tile_group.shape}; accepted: a number of tiles that divides {rows} rows")
    if used.shape != (1,):
        faults.append(f"used has shape {used.shape}; accepted: (1,)")
    for name, value in (("tile_group", tile_group), ("used", used)):
        if value.dtype != jnp.int32:
            faults.append(f"{name} has dtype {value.dtype}; accepted: int32")
    if implementation not in (None, *IMPLEMENTATIONS):
        faults.append(f"implementation is {implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}, None")
    if faults:
        raise ValueError("grouped_matmul: " + "; ".join(faults))
    shape = dict(row_tile=rows // tiles, inputs=x.shape[1], outputs=matrices.shape[1], dtype=x.dtype)
    if implementation is None:
        implementation = "mosaic_gpu" if declined(**shape) is None else "reference"
    elif implementation == "mosaic_gpu" and (reason := supported(**shape)) is not None:
        raise Unsupported(f"grouped_matmul: the kernel {reason}")
    return _run(implementation, squared_relu, x, matrices, tile_group, used)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(implementation, squared_relu, *operands):
    # A jitted function of its own: the layers of a model share one trace and one lowering.
    if implementation == "reference":
        return reference.grouped_matmul(*operands, squared_relu=squared_relu)
    # Imported here: programs that never leave the CPU do not load the kernel compiler.
    from pallas_kernels.grouped_matmul import mosaic_gpu

    axes = frozenset().union(*map(selection.varying, operands))

    def kernel(*operands):
        y = mosaic_gpu.grouped_matmul(*operands, squared_relu=squared_relu)
        return selection.vary(y, axes)  # a kernel's outputs carry no varying axes of their own

    call = transforms.as_of(functools.partial(reference.grouped_matmul, squared_relu=squared_relu), kernel)
    return call(*(selection.vary(v, axes) for v in operands))
