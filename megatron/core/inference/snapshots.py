"""Snapshots of states of fixed size, by which texts begin where an equal beginning of another prompt ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StateSnapshots:
    """Which of the ``slots`` after those of requests hold the state behind which chain of full blocks, by the last
    block's key. The snapshot that was not used for the longest time gives way to a new one.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._slot_of: dict[bytes, int] = {}  # in the order of their last use

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks with these ``keys``, from the first on, the longest known beginning has."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._slot_of), 0)

    def use(self, key: bytes) -> int:
        """The slot of a known snapshot."""
        slot = self._slot_of[key] = self._slot_of.pop(key)
        return slot

    def add(self, key: bytes) -> int | None:
        """A slot for a new snapshot; None for one that is known."""
        if key in self._slot_of:
            return None
        slot = self._free.pop() if self._free else self._slot_of.pop(next(iter(self._slot_of)))
        self._slot_of[key] = slot
        return slot

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop snapshots whose content is broken."""
        self._free += [self._slot_of.pop(key) for key in keys if key in self._slot_of]
