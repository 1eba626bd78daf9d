"""Blocks of the key/value cache: which are free, which are held by texts, and which can be used again as a prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: of its ``tokens`` and, through ``parent``'s key, of all tokens before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Hands out blocks ``1 … num_blocks - 1``; block 0 is a dummy.

    A block is free, held (by one text, or by several that share a prefix), or cached: held by no text, but found again
    by its key until the space is needed. The least recently released cached block is evicted first, and of one text
    the last block first, because more texts can share the first ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks - 1
        self._is_free = np.ones(num_blocks + 1, dtype=bool)
        self._is_free[[0, num_blocks]] = False  # so that each run of free blocks has an end on both sides
        self._num_free = self.num_blocks
        self._holders: Counter[int] = Counter()
        self._cached: dict[int, None] = {}  # in the order of their release
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_held(self) -> int:
        """Blocks that texts hold."""
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return self._num_free + len(self._cached)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """``count`` blocks, at most ``num_available``, for a text whose last block is ``after``.

        They are consecutive where possible, since the cache reads consecutive blocks without copying them.
        """
        assert count <= self.num_available, f"{count} blocks of {self.num_available}"
        while self._num_free < count:
            evicted = next(iter(self._cached))
            del self._cached[evicted]
            self.forget([evicted])
            self._free(evicted)
        blocks: list[int] = []
        for missing in range(count, 0, -1):
            block = after + 1 if after is not None and self._is_free[after + 1] else self._start_of_run(missing)
            self._is_free[block] = False
            blocks.append(after := block)
        self._num_free -= count
        self._holders.update(blocks)
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of a chain of keys; ``hold`` takes them."""
        blocks: list[int] = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Take cached blocks, or share held ones."""
        for block in blocks:
            self._cached.pop(block, None)
        self._holders.update(blocks)

    def is_shared(self, block: int) -> bool:
        """Whether several texts hold a block."""
        return self._holders[block] > 1

    def num_cached_of(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` no text holds."""
        return sum(block in self._cached for block in blocks)

    def register(self, block: int, key: bytes) -> None:
        """Make a full block findable; the first block of a key stays the one that is found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Sequence[int]) -> None:
        """Make blocks unfindable, for content that is broken."""
        for block in blocks:
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Give a text's blocks back; those with a key stay cached."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free(block)

    def _free(self, block: int) -> None:
        self._is_free[block] = True
        self._num_free += 1

    def _start_of_run(self, count: int) -> int:
        """First block for ``count`` in the longest free run: its middle, so that the text before it can grow."""
        edges = np.flatnonzero(self._is_free[1:] != self._is_free[:-1]) + 1
        starts, ends = edges[::2], edges[1::2]
        longest = int((ends - starts).argmax())
        start, length = int(starts[longest]), int(ends[longest] - starts[longest])
        return start if start == 1 or length <= count else start + (length - count) // 2
