"""Shapes of released models on one device, by name: (inner, groups, columns of the packed projection)."""

SHAPES = {
    "nemotron-h-8b": (8192, 8, 18560),
    "nemotron-h-4b": (7168, 8, 16496),
    "nemotron-nano-9b-v2": (10240, 8, 22656),
    "nemotron-3-nano-4b": (7680, 8, 17504),
    "nemotron-3-nano-30b-a3b": (4096, 8, 10304),
    "nemotron-h-56b": (16384, 8, 37120),
    "nemotron-h-8b, 8 ranks": (1024, 1, 2320),
    "nemotron-3-nano-4b, 8 ranks": (960, 1, 2188),
}
