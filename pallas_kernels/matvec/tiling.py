"""How the matrix of a product of few rows is cut: tiles of outputs, steps along the inputs. Plain arithmetic."""

import dataclasses

from pallas_kernels.hopper import MULTIPROCESSORS

GROUP = 8  # rows of a swizzled group, outputs as well as rows of x
HEIGHT = 64  # outputs of one tensor core instruction
HIGHEST = 256  # outputs of a tile: the largest side of a TMA box
SHARED_BYTES = 220 * 1024
SLOT_BYTES = 16 * 1024


def padded(rows: int, step: int = GROUP) -> int:
    return -(-rows // step) * step


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the matrix is cut.

    Attributes:
        outputs: of a tile, a multiple of 8, at most 256.
        depth: inputs of a step, a multiple of 64.
        stages: steps that are in shared memory at once, a multiple of `warpgroups`, two or more for each.
        warpgroups: that multiply, beside the one that fetches.
        blocks: thread blocks, at most.
    """

    outputs: int
    depth: int
    stages: int
    warpgroups: int = 1
    blocks: int = MULTIPROCESSORS

    @property
    def firsts(self) -> tuple[int, ...]:
        """Where in a tile its products start."""
        whole = range(0, self.outputs - HEIGHT + 1, HEIGHT)
        rest = [max(self.outputs - HEIGHT, 0)] if self.outputs % HEIGHT else []
        return (*whole, *rest)

    @property
    def ring_rows(self) -> int:
        """Of the matrix, in shared memory; products of the last slot may read on behind it."""
        return self.stages * self.outputs + max(HEIGHT - self.outputs, 0)

    @property
    def width(self) -> int:
        """Outputs in shared memory, in whole 128 bytes."""
        return -(-self.outputs // HEIGHT) * HEIGHT

    def shared_bytes(self, rows: int) -> int:
        """With results of four bytes."""
        rows = padded(rows)
        ring = 2 * self.depth * (self.ring_rows + self.stages * rows)
        sums = 4 * max(self.warpgroups - 1, 1) * len(self.firsts) * HEIGHT * rows
        return ring + sums + 4 * rows * self.width


def tile_outputs(outputs: int, blocks: int = MULTIPROCESSORS, choices: int = 1) -> int:
    """The tile whose busiest block has least to read, its group of x's rows with each tile; of several, the highest."""

    def busiest(height: int) -> int:
        return -(-choices * -(-outputs // height) // blocks) * (height + GROUP)

    return min(range(GROUP, min(HIGHEST, outputs) + 1, GROUP), key=lambda height: (busiest(height), -height))


def default_tiling(
    rows: int,
    outputs: int,
    choices: int = 1,
    *,
    blocks: int = MULTIPROCESSORS,
    shared_bytes: int = SHARED_BYTES,
    slot_bytes: int = SLOT_BYTES,
    warpgroups: int = 1,
) -> Tiling:
    """Tiles that load all blocks alike, and as many steps on their way as shared memory has room for.

    Args:
        choices: matrices of so many outputs.
        shared_bytes: of a block.
        slot_bytes: of a step of the matrix, about; no step is longer than 256 inputs.
    """
    tile = tile_outputs(outputs, blocks, choices)
    depth = 64 * min(max(slot_bytes // (tile * 128), 1), 4)
    one, two = (Tiling(tile, depth, n, warpgroups, blocks).shared_bytes(rows) for n in (1, 2))
    stages = 1 + (shared_bytes - one) // (two - one)
    return Tiling(tile, depth, max(stages // warpgroups, 2) * warpgroups, warpgroups, blocks)
