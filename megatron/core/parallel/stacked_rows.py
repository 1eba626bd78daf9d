"""Rows of a split dimension that ranks divide or share: stacked matrices, and groups whose last rows are shared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


class UndividedError(ValueError):
    """Ranks can't divide a stacked part or groups of rows, which is its argument."""


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of the split dimension, from ``start``, which ``sharers`` neighbouring ranks hold."""

    start: int
    rows: int
    sharers: int = 1


@dataclass(frozen=True)
class SharedRows:
    """Dimension 0 consists of ``groups`` equal groups of rows; the last ``rows`` of a group cannot be divided.

    With more ranks than groups, the ranks of a group divide its first rows and each hold its last ones: a key/value
    head that serves query heads of several ranks. The gradient of shared rows is partial on each of them.

    ``matrices``: the runs of rows of every group, (number of the logical matrix that they belong to, rows); none: all
    rows are one matrix.
    """

    groups: int
    rows: int
    matrices: tuple[tuple[int, int], ...] = ()

    def runs(self, rows: int, *, ranks: int, rank: int) -> list[RowRun]:
        """Rows of ``rows`` that a rank holds, in local order. Raises UndividedError where ranks can't."""
        height, sharers = rows // self.groups, max(1, ranks // self.groups)
        divided = height - self.rows
        if max(ranks, self.groups) % min(ranks, self.groups) or divided % sharers:
            raise UndividedError(self)
        if ranks <= self.groups:
            return [RowRun(rows // ranks * rank, rows // ranks)]
        group, place = divmod(rank, sharers)
        own = divided // sharers
        return [
            RowRun(group * height + place * own, own),
            RowRun((group + 1) * height - self.rows, self.rows, sharers),
        ]


@dataclass(frozen=True)
class StackedPart:
    """One of several matrices stacked on the split dimension: ``rows`` of them, which ranks divide equally.

    ``groups``: equal groups of rows that cannot be divided. With more ranks than groups, the ranks of a group each hold
    all of its rows, such as the input matrix of a state-space layer that serves heads of several ranks; the gradient of
    such rows is partial on each of them.
    """

    rows: int
    groups: int | None = None

    def local_rows(self, ranks: int) -> int:
        """Rows that each of ``ranks`` holds."""
        return self.rows * self.sharers(ranks) // ranks

    def sharers(self, ranks: int) -> int:
        """Neighbouring ranks that hold the same rows."""
        return 1 if self.groups is None else max(1, ranks // self.groups)

    def fits(self, ranks: int) -> bool:
        """Whether ``ranks`` can hold equally many rows each."""
        whole = self.groups or self.rows
        return self.rows % whole == 0 and (whole % ranks == 0 or (self.groups is not None and ranks % whole == 0))


def runs_of_parts(parts: Sequence[StackedPart], *, ranks: int, rank: int) -> list[RowRun]:
    """Rows that a rank holds of each of the stacked ``parts``. Raises UndividedError where ranks can't."""
    for part in parts:
        if not part.fits(ranks):
            raise UndividedError(part)
    firsts = [0, *itertools.accumulate(part.rows for part in parts)]
    held = [(part.local_rows(ranks), part.sharers(ranks)) for part in parts]
    return [RowRun(first + rank // sharers * width, width, sharers) for first, (width, sharers) in zip(firsts, held)]
