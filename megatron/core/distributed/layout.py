"""Where parameters lie in a flat buffer: in order, in buckets that can be divided into equal shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Elements. Parameters start on cache lines, and shards are whole SIMD vectors: no element of a fused update is computed
# by a kernel's tail loop in one layout and by its vector loop in another, which would round differently.
ALIGNMENT = 64


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a flat tensor."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """The view of ``flat``."""
        return flat[self.start : self.stop]

    def part(self, index: int, count: int) -> Span:
        """Part ``index`` of ``count`` equal ones."""
        size = self.size // count
        return Span(self.start + index * size, self.start + (index + 1) * size)

    def overlap(self, other: Span) -> Span | None:
        """What both spans hold; None when that is nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def moved(self, offset: int) -> Span:
        """The span seen from a tensor that starts ``offset`` elements earlier."""
        return Span(self.start + offset, self.stop + offset)


def usual_bucket_size(ranks: int) -> int:
    """Elements of a bucket that ``ranks`` reduce together, unless the run says how many: Megatron-LM's choice."""
    return max(40_000_000, 1_000_000 * ranks)


class PlannedBucket(NamedTuple):
    """Where a bucket and its members will lie."""

    span: Span
    members: tuple[Span, ...]


def lay_out(sizes: Sequence[tuple[int, str | None]], *, bucket_size: int, multiple: int) -> list[PlannedBucket]:
    """Place parameters of the given (elements, key) in order; a bucket closes when it holds ``bucket_size`` elements,
    or, where a key is given, with the last parameter in a row that has this key, however large it is.

    A tied parameter's name is its key: copies of it then have the same shards on every stage. Buckets are padded to a
    multiple of ``multiple``.
    """
    groups: list[list[int]] = []
    filled, last = 0, None
    for size, key in sizes:
        if not groups or key != last or (key is None and filled >= bucket_size):
            groups.append([])
            filled = 0
        groups[-1].append(size)
        filled += size
        last = key
    planned, start = [], 0
    for group in groups:
        spans, position = [], start
        for size in group:
            spans.append(Span(position, position + size))
            position += _round_up(size, ALIGNMENT)
        stop = start + _round_up(position - start, multiple)
        planned.append(PlannedBucket(Span(start, stop), tuple(spans)))
        start = stop
    return planned


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
