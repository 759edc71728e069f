"""Row lengths and token counts of real models, shared by tests and benches."""

# hidden_size of the released models, and what else the family's shapes ask of the kernels
HIDDEN = {
    "nano-3-30b": 2688,
    "nano-4b": 3136,
    "8b": 4096,
    "nano-12b-v2": 5120,
    "nano-9b-v2": 4480,
    "56b": 8192,
}
# rows per call: one decode step of a few sequences, small batches, prefill chunks
DECODE_TOKENS = (1, 8, 64)
PREFILL_TOKENS = (512, 2048)
# the boundaries of each: odd counts, around the number of devices, around the number of blocks, around two rows a block
EDGE_TOKENS = (0, 1, 2, 3, 6, 7, 8, 9, 127, 128, 129, 131, 132, 133, 255, 265)
WORLDS = (2, 4, 8)
