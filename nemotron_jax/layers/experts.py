"""The routed experts' products: each token through the experts chosen for it, weighted and summed.

Every implementation is exact for any number of tokens and any choice: there is no capacity and no token is dropped.
Each rounds at the same places (a product to the model's dtype, relu^2 in float32 to the model's dtype, the weighted sum
in float32 and then once), so they differ only in the order of float32 additions.

Letters: n tokens, k choices of a token, x experts on this rank, f their width on this rank, i their input and output
width, j blocks, r rows of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nemotron_jax.layers.linear import dot_precision, squared_relu
from nemotron_jax.sharding import vary_like
from pallas_kernels import grouped_matmul as kernel
from pallas_kernels import matvec

# Blocks of one expert's rows that run as one batched product, whose matrices are copied side by side for it.
BLOCKS_AT_ONCE = 16
MAX_BLOCK_ROWS = 256
ROOM_FOR_ALL = 128  # tokens
# Up to so many choices per expert on average, reading its matrices again for each was faster than `blocks`, measured
# when that still copied them.
GATHER_CHOICES_PER_EXPERT = 3
# Where the kernel is switched on: up to here most experts have one choice at most, and gather reads them as often.
GATHER_CHOICES_PER_EXPERT_BESIDE_KERNEL = 0.5


def expert_sum(
    x: Float[Array, "tokens width"],
    up: Float[Array, "experts expert_mlp width"],
    down: Float[Array, "experts width expert_mlp"],
    chosen: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    implementation: str = "auto",
    *,
    elsewhere: bool = True,
) -> Float[Array, "tokens width"]:
    """sum over a token's choices of weight * down(relu(up(x))^2).

    Args:
      x: what the experts see.
      up, down: the matrices of this rank's experts (all or its own, whole or its slices), checkpoint orientation.
      chosen: index into this rank's experts; anything outside 0 .. experts - 1 is another rank's, and adds nothing.
        No expert twice for a token, as a router chooses.
      weights: float32.
      implementation: a name of IMPLEMENTATIONS, or ``auto``.
      elsewhere: whether choices may be another rank's. Where none is, nothing is computed to find out.

    Returns:
      In x's dtype; zeros where none of a token's experts is here.
    """
    tokens, k = chosen.shape
    if tokens == 0:
        return x
    if implementation == "auto":
        implementation = choose(tokens, k, up.shape[0], kernel_fault(tokens * k, up) is None, elsewhere)
    mine = (chosen >= 0) & (chosen < up.shape[0]) if elsewhere else None
    if mine is not None:
        chosen = jnp.where(mine, chosen, up.shape[0])
        if implementation == "gather":
            chosen = stand_ins(chosen, up.shape[0])
    y = IMPLEMENTATIONS[implementation](x, up, down, chosen).astype(jnp.float32) * weights[..., None]
    if mine is not None:
        y = jnp.where(mine[..., None], y, 0.0)
    return jnp.sum(y, axis=1).astype(x.dtype)


def stand_ins(chosen: jax.Array, experts: int) -> jax.Array:
    """``chosen`` with a token's first expert that is here (expert 0 where none is) in the place of other ranks'."""
    first = jnp.min(chosen, axis=1, keepdims=True)
    return jnp.where(chosen < experts, chosen, jnp.where(first < experts, first, 0))


def choose(tokens: int, k: int, experts: int, kernel: bool = False, elsewhere: bool = False) -> str:
    """``gather``, which reads matrices for each choice anew, for few choices, and ``gather_rows`` where choices may be
    another rank's; for many ``grouped`` where its kernel runs, else ``blocks``.

    On one H200 (bfloat16, 128 experts of 1856 x 2688, 6 chosen) gather reads at 2.9 to 3.3 TB/s up to 8 tokens, takes
    0.25 ms for 8 tokens where blocks took 0.76, and 1.97 ms for 64 where it took 2.43 (scripts/bench_experts.py). It
    copied the matrices then; as it is now it has not been timed.
    """
    few = GATHER_CHOICES_PER_EXPERT_BESIDE_KERNEL if kernel else GATHER_CHOICES_PER_EXPERT
    if tokens * k <= few * experts:
        return "gather_rows" if elsewhere else "gather"
    return "grouped" if kernel else "blocks"


def kernel_fault(choices: int, up: jax.Array) -> str | None:
    """Why the products of so many choices are not the kernel's in the program that is being traced, or None."""
    experts, f, i = up.shape
    rows = kernel.row_tile(choices, experts)
    return kernel.declined(row_tile=rows, inputs=i, outputs=f, dtype=up.dtype) or kernel.declined(
        row_tile=rows, inputs=f, outputs=i, dtype=up.dtype
    )


def gather(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Matrix-vector products with the chosen experts' matrices and no others.

    In one launch each (pallas_kernels.matvec) where that kernel is asked for and can run. Otherwise written as
    multiplication and sum, not as a product of matrices, so that XLA reads the matrices where they lie: a gathered
    operand of a matrix product would be copied first.

    Args:
      chosen: [n, k], 0 to experts - 1.

    Returns:
      [n, k, i], each choice's output.
    """
    if streams(x, up, down, chosen):
        h = matvec.chosen_matvec(x, up, chosen, squared_relu=True, implementation="mosaic_gpu")
        return matvec.chosen_matvec(h, down, chosen, implementation="mosaic_gpu")
    return _gathered(x, up, down, lambda matrices: jnp.take(matrices, chosen, axis=0, mode="clip"))


def streams(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> bool:
    """Whether the products of `gather` run in the kernel, in the program that is being traced."""
    return all(
        matvec.chosen_declined(
            choices=chosen.size, outputs=w.shape[1], inputs=w.shape[2], dtype=x.dtype, w_dtype=w.dtype
        )
        is None
        for w in (up, down)
    )


def gather_rows(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """``gather`` by rows: another rank's choice reads one row over and over, which stays in the cache, and no matrices.

    So a rank with none of a token's experts reads none, and one with few does not read those once more per choice.

    Args:
      chosen: [n, k]; ``experts`` where the choice is another rank's, whose result means nothing.

    Returns:
      [n, k, i], each choice's output.
    """
    experts = up.shape[0]

    def take(matrices: jax.Array) -> jax.Array:
        rows = rows_read(chosen, experts, matrices.shape[1])
        return jnp.take(matrices.reshape(-1, matrices.shape[2]), rows, axis=0, mode="clip")

    return _gathered(x, up, down, take)


def rows_read(chosen: jax.Array, experts: int, out: int) -> jax.Array:
    """[n, k, out], of all experts' matrices below each other: those of the chosen one, or row 0 for other ranks'."""
    return jnp.where((chosen < experts)[..., None], chosen[..., None] * out + jnp.arange(out, dtype=jnp.int32), 0)


def _gathered(x: jax.Array, up: jax.Array, down: jax.Array, take: Callable[[jax.Array], jax.Array]) -> jax.Array:
    def product(matrices: jax.Array, v: jax.Array) -> jax.Array:  # [x, out, in], [n, k or 1, in] -> [n, k, out]
        taken = take(matrices).astype(jnp.float32)
        return jnp.sum(taken * v[:, :, None, :].astype(jnp.float32), -1).astype(v.dtype)

    return product(down, squared_relu(product(up, x[:, None])))


class Sorted(NamedTuple):
    """The choices in the order of their experts, those of other ranks last.

    Attributes:
      expert: [n * k], of each choice; ``experts`` where it is another rank's.
      order: [n * k], the choices in their new order.
      size, start: [x], how many choices an expert has, and where the first of them stands.
      place: [n * k], of a choice among its expert's; meaningless for other ranks'.
    """

    expert: jax.Array
    order: jax.Array
    size: jax.Array
    start: jax.Array
    place: jax.Array

    @classmethod
    def make(cls, chosen: jax.Array, experts: int) -> "Sorted":
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        size = jnp.sum(expert[None] == jnp.arange(experts)[:, None], 1, dtype=jnp.int32)
        start = jnp.cumsum(size) - size
        place = jnp.argsort(order) - start.at[expert].get(mode="fill", fill_value=0)
        return cls(expert, order, size, start, place)

    def rows(self, expert: jax.Array, first: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """For blocks of ``rows`` choices of an expert, from its ``first`` one on: (choice, whether there is one),
        [j, rows] each. Rows that hold no choice name some other."""
        within = first[:, None] + jnp.arange(rows, dtype=jnp.int32)
        real = within < self.size[expert][:, None]
        return self.order[jnp.where(real, self.start[expert][:, None] + within, 0)], real


def _cut(size: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Blocks of ``rows``, numbered through all experts: (first one, end) of each expert."""
    end = jnp.cumsum(-(-size // rows))
    return end - -(-size // rows), end


def _expert_of(block: jax.Array, end: jax.Array) -> jax.Array:
    """The expert of each block; the last one's for blocks that are not needed."""
    return jnp.minimum(jnp.sum(block[:, None] >= end[None], 1, dtype=jnp.int32), end.shape[0] - 1)


def room_per_expert(tokens: int, k: int, experts: int) -> int:
    """Rows that ``blocks`` gives every expert at once: all tokens while they fill no more than one tile of a product,
    for then reading the matrices takes the time; else a quarter more than the average and 16.
    """
    if tokens <= ROOM_FOR_ALL:
        return tokens
    average = -(-tokens * k // experts)
    step = 16 if average < 64 else 64
    return min(tokens, -(-(average * 5 // 4 + 16) // step) * step)


def blocks(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """One product for all experts, each with the same number of its choices, and then what is left over in blocks of
    one expert's choices. Args and result as :func:`gather_rows`.

    The first product takes the matrices as they lie. Blocks need theirs side by side, so XLA copies them: as long as
    nobody's share is much above the average there are no blocks, and no program has more than it needs. Programs of few
    tokens, like those of decoding, have no such loop at all: the host must look at a loop's condition.
    """
    tokens, k = chosen.shape
    experts, choices = up.shape[0], tokens * k
    table = Sorted.make(chosen, experts)
    room = room_per_expert(tokens, k, experts)

    def through(expert: jax.Array | slice, v: jax.Array) -> jax.Array:
        return _block_product(squared_relu(_block_product(v, up[expert])), down[expert])

    everyone = jnp.arange(experts, dtype=jnp.int32)
    choice, _ = table.rows(everyone, jnp.zeros_like(everyone), room)
    y = through(slice(None), x[choice // k]).reshape(-1, down.shape[1])
    out = y.at[table.expert * room + jnp.minimum(table.place, room - 1)].get(mode="clip")
    if room < tokens:
        rows = min(MAX_BLOCK_ROWS, max(8, 1 << (choices // experts).bit_length()))
        first, end = _cut(jnp.maximum(table.size - room, 0), rows)

        def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return carry[0] < end[-1]

        def batch(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            begin, out = carry
            block = begin + jnp.arange(BLOCKS_AT_ONCE, dtype=jnp.int32)
            expert = _expert_of(block, end)
            choice, real = table.rows(expert, room + (block - first[expert]) * rows, rows)
            y = through(expert, x[choice // k])
            return begin + BLOCKS_AT_ONCE, out.at[jnp.where(real, choice, choices)].set(y, mode="drop")

        begin = vary_like(jnp.zeros((), jnp.int32), end)
        out = lax.while_loop(more, batch, (begin, out))[1]
    return out.reshape(tokens, k, -1)


def grouped(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Two grouped matrix products (pallas_kernels.grouped_matmul) over blocks of one expert's choices, each in one
    launch that reads each chosen expert where it lies. Args and result as :func:`gather_rows`.

    The number of blocks is static, the most that any choice can need; the time goes by those that this one needs.
    """
    tokens, k = chosen.shape
    experts, choices = up.shape[0], tokens * k
    rows = kernel.row_tile(choices, experts)
    most = min(choices, (choices + min(experts, choices) * (rows - 1)) // rows)
    table = Sorted.make(chosen, experts)
    first, end = _cut(table.size, rows)
    block = jnp.arange(most, dtype=jnp.int32)
    expert = _expert_of(block, end)
    choice, _ = table.rows(expert, (block - first[expert]) * rows, rows)

    v = x[choice.reshape(-1) // k]  # where there is no choice some other stands in: no row reaches another
    h = kernel.grouped_matmul(v, up, expert, end[-1:], squared_relu=True)
    y = kernel.grouped_matmul(h, down, expert, end[-1:])
    slot = first.at[table.expert].get(mode="fill", fill_value=0) * rows + table.place
    return y.at[slot].get(mode="clip").reshape(tokens, k, -1)


def _block_product(v: jax.Array, matrices: jax.Array) -> jax.Array:
    """[j, r, in], [j, out, in] -> [j, r, out]."""
    dims = (((2,), (2,)), ((0,), (0,)))
    y = lax.dot_general(v, matrices, dims, precision=dot_precision(v.dtype), preferred_element_type=jnp.float32)
    return y.astype(v.dtype)


def ragged(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Choices sorted by expert, then ``jax.lax.ragged_dot_general``. Args and result as :func:`gather_rows`.

    On CPUs and NVIDIA GPUs jax expands it to every expert times every choice (jax 0.11.2 and 0.12); it is here for
    platforms that have an instruction for it.
    """
    tokens, k = chosen.shape
    table = Sorted.make(chosen, up.shape[0])
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )

    def product(v: jax.Array, matrices: jax.Array) -> jax.Array:
        y = lax.ragged_dot_general(
            v, matrices, table.size, dims, precision=dot_precision(v.dtype), preferred_element_type=jnp.float32
        )
        return y.astype(v.dtype)

    y = product(squared_relu(product(x[table.order // k], up)), down)
    return y[jnp.argsort(table.order)].reshape(tokens, k, -1)


def dense(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Every expert on every token: what the others must equal. Args and result as :func:`gather_rows`."""
    precision = dot_precision(x.dtype)
    h = jnp.einsum("ni,xfi->xnf", x, up, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    y = jnp.einsum("xnf,xif->nxi", squared_relu(h), down, precision=precision, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(y.astype(x.dtype), chosen[..., None], axis=1, mode="clip")


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "gather": gather,
    "gather_rows": gather_rows,
    "blocks": blocks,
    "grouped": grouped,
    "ragged": ragged,
    "dense": dense,
}
