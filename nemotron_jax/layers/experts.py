"""The routed experts' products: each token through the experts chosen for it, weighted and summed.

Every implementation is exact for any number of tokens and any choice: there is no capacity and no token is dropped.
Each rounds at the same places (a product to the model's dtype, relu^2 in float32 to the model's dtype, the weighted sum
in float32 and then once), so they differ only in the order of float32 additions.

Letters: n tokens, k choices of a token, x experts on this rank, f their width on this rank, i their input and output
width, j blocks, r rows of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nemotron_jax.layers.linear import dot_precision
from nemotron_jax.layers.mlp import squared_relu

# Blocks of one expert's rows that run as one batched product, whose matrices are copied side by side for it.
BLOCKS_AT_ONCE = 16
MAX_BLOCK_ROWS = 256
# Up to so many choices per expert on average, reading its matrices again for each beats copying them once.
GATHER_CHOICES_PER_EXPERT = 3


def expert_sum(
    x: Float[Array, "tokens width"],
    up: Float[Array, "experts expert_mlp width"],
    down: Float[Array, "experts width expert_mlp"],
    chosen: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    implementation: str = "auto",
) -> Float[Array, "tokens width"]:
    """sum over a token's choices of weight * down(relu(up(x))^2).

    Args:
      x: what the experts see.
      up, down: the matrices of this rank's experts (all or its own, whole or its slices), checkpoint orientation.
      chosen: index into this rank's experts; anything outside 0 .. experts - 1 is another rank's, and adds nothing.
      weights: float32.
      implementation: a name of IMPLEMENTATIONS, or ``auto``.

    Returns:
      In x's dtype; zeros where none of a token's experts is here.
    """
    tokens, k = chosen.shape
    if tokens == 0:
        return x
    if implementation == "auto":
        implementation = choose(tokens, k, up.shape[0])
    mine = (chosen >= 0) & (chosen < up.shape[0])
    y = IMPLEMENTATIONS[implementation](x, up, down, jnp.where(mine, chosen, up.shape[0]))
    total = jnp.sum(jnp.where(mine[..., None], y.astype(jnp.float32) * weights[..., None], 0.0), axis=1)
    return total.astype(x.dtype)


def choose(tokens: int, k: int, experts: int) -> str:
    """``gather``, which reads matrices for each choice anew, for few choices; ``blocks``, once per block, for many.

    On one H200 (bfloat16, 128 experts of 1856 x 2688, 6 chosen) gather reads at 2.9 to 3.3 TB/s up to 8 tokens, takes
    0.25 ms for 8 tokens where blocks takes 0.76, and 1.97 ms for 64 where blocks takes 2.43: scripts/bench_experts.py.
    """
    return "gather" if tokens * k <= GATHER_CHOICES_PER_EXPERT * experts else "blocks"


def gather(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Matrix-vector products with the chosen experts' matrices and no others.

    Written as multiplication and sum, not as a product of matrices, so that XLA reads the matrices where they lie: a
    gathered operand of a matrix product would be copied first.

    Args:
      chosen: [n, k]; ``experts`` where the choice is another rank's. Such a choice reads the same matrices as the
        token's first one that is here (expert 0 where none is), and its result means nothing.

    Returns:
      [n, k, i], each choice's output.
    """
    experts = up.shape[0]
    stand_in = jnp.min(chosen, axis=1, keepdims=True)
    index = jnp.where(chosen < experts, chosen, jnp.where(stand_in < experts, stand_in, 0))

    def product(matrices: jax.Array, v: jax.Array) -> jax.Array:  # [x, out, in], [n, k or 1, in] -> [n, k, out]
        taken = jnp.take(matrices, index, axis=0, mode="clip").astype(jnp.float32)
        return jnp.sum(taken * v[:, :, None, :].astype(jnp.float32), -1).astype(v.dtype)

    return product(down, squared_relu(product(up, x[:, None])))


def blocks(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Choices sorted by expert and cut into blocks of equal size, each of one expert, its last one padded.

    Args and result as :func:`gather`. The number of blocks is static: the most that any choice can need.
    """
    tokens, k = chosen.shape
    experts, choices = up.shape[0], tokens * k
    rows = min(MAX_BLOCK_ROWS, max(8, 1 << (choices // experts).bit_length()))
    used = min(experts, choices)
    count = min(choices, (choices + used * (rows - 1)) // rows)
    at_once = min(BLOCKS_AT_ONCE, count)
    count = -(-count // at_once) * at_once

    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # choices of other ranks come last
    size = jnp.sum(expert[None] == jnp.arange(experts)[:, None], 1, dtype=jnp.int32)
    start = jnp.cumsum(size) - size
    last_block = jnp.cumsum(-(-size // rows))
    first_block = last_block - -(-size // rows)

    block = jnp.arange(count, dtype=jnp.int32)
    of = jnp.sum(block[:, None] >= last_block[None], 1, dtype=jnp.int32)  # expert of each block
    of = jnp.minimum(of, experts - 1)  # blocks that are not needed
    within = (block - first_block[of])[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)
    real = within < size[of][:, None]
    token = order[jnp.where(real, start[of][:, None] + within, 0)] // k

    def batch(step: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        of, token, real = step
        v = jnp.where(real[..., None], x[token], 0)
        h = squared_relu(_block_product(v, up[of]))
        return _block_product(h, down[of])

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(-1, at_once, *a.shape[1:])

    y = lax.map(batch, (split(of), split(token), split(real))).reshape(-1, down.shape[1])
    place = jnp.argsort(order) - start.at[expert].get(mode="fill", fill_value=0)  # of a choice among its expert's
    slot = first_block.at[expert].get(mode="fill", fill_value=0) * rows + place
    return y.at[slot].get(mode="clip").reshape(tokens, k, -1)


def _block_product(v: jax.Array, matrices: jax.Array) -> jax.Array:
    """[j, r, in], [j, out, in] -> [j, r, out]."""
    dims = (((2,), (2,)), ((0,), (0,)))
    y = lax.dot_general(v, matrices, dims, precision=dot_precision(v.dtype), preferred_element_type=jnp.float32)
    return y.astype(v.dtype)


def ragged(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Choices sorted by expert, then ``jax.lax.ragged_dot_general``. Args and result as :func:`gather`.

    On CPUs and NVIDIA GPUs jax expands it to every expert times every choice (jax 0.11.2 and 0.12); it is here for
    platforms that have an instruction for it.
    """
    tokens, k = chosen.shape
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    size = jnp.sum(expert[None] == jnp.arange(up.shape[0])[:, None], 1, dtype=jnp.int32)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )

    def product(v: jax.Array, matrices: jax.Array) -> jax.Array:
        y = lax.ragged_dot_general(
            v, matrices, size, dims, precision=dot_precision(v.dtype), preferred_element_type=jnp.float32
        )
        return y.astype(v.dtype)

    y = product(squared_relu(product(x[order // k], up)), down)
    return y[jnp.argsort(order)].reshape(tokens, k, -1)


def dense(x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """Every expert on every token: what the others must equal. Args and result as :func:`gather`."""
    precision = dot_precision(x.dtype)
    h = jnp.einsum("ni,xfi->xnf", x, up, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    y = jnp.einsum("xnf,xif->nxi", squared_relu(h), down, precision=precision, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(y.astype(x.dtype), chosen[..., None], axis=1, mode="clip")


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "gather": gather,
    "blocks": blocks,
    "ragged": ragged,
    "dense": dense,
}
