"""Shapes of released models on one device, by name: (heads, head_dim, state, groups)."""

SHAPES = {
    "nemotron-h-8b": (128, 64, 128, 8),
    "nemotron-nano-9b-v2": (128, 80, 128, 8),
    "nemotron-3-nano-4b": (96, 80, 128, 8),
    "nemotron-3-nano-30b-a3b": (64, 64, 128, 8),
    "nemotron-h-56b": (256, 64, 256, 8),
    "nemotron-h-8b, 8 ranks": (16, 64, 128, 1),
}
