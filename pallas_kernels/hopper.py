"""What the kernels take for granted about the GPU that they were measured on."""

# Of an H100 or H200. A kind with fewer computes the same: blocks that found no place run after the others.
# `allreduce_rms_norm` alone needs all of its blocks at once, and asks for at most this many.
MULTIPROCESSORS = 132
