"""Which blocks of the cache are given away first, and where a text's blocks lie."""

from __future__ import annotations

from megatron.core.inference.block_pool import BlockPool, block_key


def keys_of(number: int) -> list[bytes]:
    """Keys of a text of two blocks."""
    first = block_key(b"", [number])
    return [first, block_key(first, [number])]


def test_the_longest_unused_beginnings_are_lost_first_and_their_ends_before() -> None:
    """A system prompt that every request uses would be lost to one that was used once."""
    pool, texts = BlockPool(7), {}
    for number in range(3):
        texts[number] = pool.allocate(2)
        for block, key in zip(texts[number], keys_of(number)):
            pool.register(block, key)
        pool.release(texts[number])
    pool.hold(pool.find(keys_of(0)))  # used once more
    pool.release(texts[0])
    pool.allocate(3)
    assert [len(pool.find(keys_of(number))) for number in range(3)] == [2, 0, 1]
    pool.allocate(1)
    assert [len(pool.find(keys_of(number))) for number in range(3)] == [2, 0, 0]


def test_blocks_of_a_text_lie_side_by_side() -> None:
    """They are read without being copied."""
    pool = BlockPool(20)
    first = pool.allocate(3)
    other = pool.allocate(3)
    first += pool.allocate(2, after=first[-1])
    other += pool.allocate(2, after=other[-1])
    for blocks in (first, other):
        assert blocks == list(range(blocks[0], blocks[0] + 5))
