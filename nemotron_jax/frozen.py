"""JSON values that can be hashed and cannot be changed."""

import math
from collections.abc import Iterator, Mapping
from typing import Any


class FrozenMapping(Mapping[str, Any]):
    """An immutable, hashable mapping of JSON values: lists become tuples, mappings FrozenMappings.

    A float that JSON cannot write is held as {"__float__": "Infinity" | "-Infinity" | "NaN"}: equal stays equal.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, Any] = {}):  # noqa: B006 - never changed
        self._items = {str(key): freeze(value) for key, value in items.items()}
        self._hash: int | None = None

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._items == other._items if isinstance(other, FrozenMapping) else NotImplemented

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self._items),)


def freeze(value: Any) -> Any:
    """A hashable copy of a JSON value."""
    if isinstance(value, FrozenMapping):
        return value
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return FrozenMapping({"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"})
    return value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`: dicts and lists, writable as strict JSON."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value
