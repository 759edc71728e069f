"""Matrices of released models' decode steps, by name: (outputs, inputs, which of the two a tensor axis divides)."""

SHAPES = {
    "8b in_proj": (18560, 4096, "outputs"),
    "8b out_proj": (4096, 8192, "inputs"),
    "8b up": (21504, 4096, "outputs"),
    "8b down": (4096, 21504, "inputs"),
    "8b qkv": (6144, 4096, "outputs"),
    "8b o": (4096, 4096, "inputs"),
    "8b head": (131072, 4096, "outputs"),
    "9b in_proj": (22656, 4480, "outputs"),
    "9b out_proj": (4480, 10240, "inputs"),
    "9b up": (15680, 4480, "outputs"),
    "9b down": (4480, 15680, "inputs"),
    "9b qkv": (7168, 4480, "outputs"),
    "9b o": (4480, 5120, "inputs"),
    "47b in_proj": (37120, 8192, "outputs"),
    "47b out_proj": (8192, 16384, "inputs"),
    "47b up": (30720, 8192, "outputs"),
    "47b down": (8192, 30720, "inputs"),
    "47b qkv": (10240, 8192, "outputs"),
    "47b o": (8192, 8192, "inputs"),
    "nano-3 in_proj": (10304, 2688, "outputs"),
    "nano-3 out_proj": (2688, 4096, "inputs"),
    "nano-3 shared up": (3712, 2688, "outputs"),
    "nano-3 shared down": (2688, 3712, "inputs"),
    "nano-3 qkv": (4608, 2688, "outputs"),
    "nano-3 o": (2688, 4096, "inputs"),
    "nano-3 head": (131072, 2688, "outputs"),
}


def of_rank(name: str, ranks: int) -> tuple[int, int] | None:
    """(outputs, inputs) of one of so many ranks; None where they do not divide it."""
    outputs, inputs, divided = SHAPES[name]
    whole = outputs if divided == "outputs" else inputs
    if whole % ranks:
        return None
    return (outputs // ranks, inputs) if divided == "outputs" else (outputs, inputs // ranks)
