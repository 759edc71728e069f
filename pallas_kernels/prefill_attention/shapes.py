"""Shapes of released models on one device, by name: (query heads, KV heads). All have a head_dim of 128."""

SHAPES = {
    "nemotron-h-8b": (32, 8),
    "nemotron-nano-9b-v2": (40, 8),
    "nemotron-3-nano-30b-a3b": (32, 2),
    "nemotron-h-56b": (64, 8),
    "nemotron-3-ultra-550b-a55b": (64, 2),
    "nemotron-h-8b, 8 ranks": (4, 1),
}
