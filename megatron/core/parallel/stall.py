"""Which ranks a stalled run waits for, from the reports of all ranks. Pure: no threads, no clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankReport:
    """What a rank is doing: see ``Activity``; ``stack`` of its main thread, innermost call last."""

    coordinates: str
    place: str
    collective: str
    group: tuple[int, ...]
    seconds_waited: float
    stack: str

    @property
    def doing(self) -> str:
        """What the rank is doing, in words."""
        return f"{self.place}: " + (f"waiting in {self.collective}" if self.collective else "not in a collective")


def describe_stall(asker: int, reports: Mapping[int, RankReport], *, world_size: int) -> str:
    """The report of a stall: which ranks wait for which, where each is, and all stacks, equal ones once: first of those
    that others wait for.

    ``asker``: the rank that has waited too long. Ranks without a report did not answer.
    """
    waiting = reports[asker]
    silent = [rank for rank in range(world_size) if rank not in reports]
    missing = missing_ranks(asker, reports, world_size=world_size)
    lines = [
        f"rank {asker} ({waiting.coordinates}) has waited {waiting.seconds_waited:.0f} s in {waiting.collective} of "
        f"ranks {ranges(waiting.group)} ({waiting.place}); "
        + (f"missing: {_ranks(missing)}" if missing else "all ranks are waiting, but in different collectives")
    ]
    by_doing: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        by_doing.setdefault(report.doing, []).append(rank)
    lines += [f"  {_ranks(ranks)}: {doing}" for doing, ranks in by_doing.items()]
    if silent:
        lines.append(f"  {_ranks(silent)}: no answer; the process is gone, stopped, or its machine is unreachable")
    by_stack: dict[str, list[int]] = {}
    culprits = [rank for rank in missing if rank in reports] or [ranks[0] for ranks in by_doing.values()]
    for rank in (*culprits, *sorted(reports)):
        held = by_stack.setdefault(reports[rank].stack.rstrip(), [])
        held += [rank] if rank not in held else []
    for stack, ranks in by_stack.items():  # those that others wait for first
        where = f" ({reports[ranks[0]].coordinates})" if len(ranks) == 1 else ""
        lines += [f"  stack of {_ranks(ranks)}{where}:", stack]
    return "\n".join(lines)


def missing_ranks(asker: int, reports: Mapping[int, RankReport], *, world_size: int) -> list[int]:
    """The ranks that others wait for: those without a report, else those in no collective, else those of the asker's
    group that wait in another collective; may be empty.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        return silent
    busy = [rank for rank, report in sorted(reports.items()) if not report.collective]
    if busy:
        return busy
    waiting = reports[asker]
    return [rank for rank in waiting.group if reports[rank].collective != waiting.collective]


def ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks in short: ``0-3, 6``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
