"""Actions over time, and how they look as text: a line for each rank, a cell for each unit of time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action


@dataclass(frozen=True, slots=True)
class Interval:
    """An action with its start and end; ``number`` breaks ties: an action has a higher one than those it needs."""

    action: Action
    start: float
    end: float
    number: int


def draw(
    rows: Sequence[Sequence[Interval]],
    *,
    unit: float = 1.0,
    stuck: Mapping[int, Action] | None = None,
    max_cells: int = 400,
) -> str:
    """One line a rank, ``0F3`` for chunk 0, forward, microbatch 3; chunks are left out where a rank has one.

    ``unit``: time of a cell. ``stuck``: actions that follow and never run, shown as ``0F3?``. A line ends in an
    ellipsis beyond ``max_cells`` cells.
    """
    actions = [*(interval.action for row in rows for interval in row), *(stuck or {}).values()]
    single = all(action.chunk == 0 for action in actions)
    texts = [[_label(interval.action, single) for interval in row] for row in rows]
    width = 1 + max((len(text) for row in texts for text in row), default=0)
    lines = []
    for rank, (row, labels) in enumerate(zip(rows, texts)):
        cells: list[str] = []
        for interval, label in zip(row, labels):
            start, end = round(interval.start / unit), round(interval.end / unit)
            cells += ["."] * (start - len(cells)) + [label] + ["-"] * (end - start - 1)
        cut = " …" if len(cells) > max_cells else ""
        text = "".join(cell.ljust(width) for cell in cells[:max_cells]).rstrip() + cut
        never = f" {_label(stuck[rank], single)}?" if stuck and rank in stuck else ""
        lines.append(f"rank {rank:<2} {text}{never}")
    return "\n".join(lines)


def _label(action: Action, single: bool) -> str:
    return str(action)[1:] if single else str(action)
