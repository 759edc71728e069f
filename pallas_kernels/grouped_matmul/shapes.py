"""Routed experts of released models on one device, by name: (experts, choices, width of an expert, width it reads)."""

SHAPES = {
    "nano": (128, 6, 1856, 2688),
    "nano_tp4": (128, 6, 464, 2688),
    "nano_tp8": (128, 6, 232, 2688),
    "nano_ep8": (16, 6, 1856, 2688),
    "super": (512, 22, 2688, 1024),
    "super_tp4": (512, 22, 672, 1024),
    "super_tp8": (512, 22, 336, 1024),
    "super_ep8": (64, 22, 2688, 1024),
}
