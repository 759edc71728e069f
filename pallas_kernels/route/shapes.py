"""Routers of released models, by name: (experts, chosen ones of a token)."""

SHAPES = {
    "nemotron-3-nano-30b-a3b": (128, 6),
    "nemotron-3-super-120b-a12b": (512, 22),
    "nemotron-labs-3-puzzle-75b-a9b": (512, 10),  # the usual one of its blocks, which differ: 4 to 22
}
ROWS = (1, 3, 8, 64)
