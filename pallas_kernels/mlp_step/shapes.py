"""Released models' MLPs and shared experts, by name: (hidden, wide); a tensor axis divides wide."""

SHAPES = {
    "8b": (4096, 21504),
    "9b": (4480, 15680),
    "47b": (8192, 30720),
    "nano-3 shared": (2688, 3712),
}


def of_rank(name: str, ranks: int) -> tuple[int, int] | None:
    """(hidden, wide) of one of so many ranks; None where they do not divide it."""
    hidden, wide = SHAPES[name]
    return None if wide % ranks else (hidden, wide // ranks)
