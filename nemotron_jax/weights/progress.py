"""The bar that says how far reading or writing is."""

import sys

from tqdm import tqdm


def progress_bar(what: str, total: int, progress: bool | None) -> tqdm:
    """A bar in bytes on stderr; ``progress`` None: only where stderr is a terminal."""
    disable = None if progress is None else not progress
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, file=sys.stderr, disable=disable)
