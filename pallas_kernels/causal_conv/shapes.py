"""Shapes of released models on one device, by name: (start, channels, columns of the packed projection)."""

SHAPES = {
    "nemotron-h-8b": (8192, 10240, 18560),
    "nemotron-h-4b": (7168, 9216, 16496),
    "nemotron-nano-9b-v2": (10240, 12288, 22656),
    "nemotron-3-nano-4b": (7680, 9728, 17504),
    "nemotron-3-nano-30b-a3b": (4096, 6144, 10304),
    "nemotron-h-56b": (16384, 20480, 37120),
    "nemotron-h-8b, 8 ranks": (1024, 1280, 2320),
    "nemotron-3-nano-4b, 4 ranks": (1920, 2432, 4376),
}
TAPS = 4
