"""A schedule on a clock: when each action runs, how long ranks wait, what they keep; or where it hangs. Pure.

An action starts when its rank has done those before it in its list and when what it needs has arrived: a forward pass
its input, a backward pass the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.core.pipeline_parallel.actions import Action, Kind, PipelineSchedule, Placement
from megatron.errors import MegatronError


class DeadlockError(MegatronError):
    """A schedule in which some rank waits for ever; the message draws what each rank has done by then."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """How long one chunk takes for one microbatch, and how long its output travels to another rank, in any unit."""

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Duration of one action."""
        if kind == "B":
            return self.input_backward + self.weight_backward
        return {"F": self.forward, "I": self.input_backward, "W": self.weight_backward}[kind]


@dataclass(frozen=True, slots=True)
class Interval:
    """An action with its start and end; ``number`` breaks ties: an action has a higher one than those it needs."""

    action: Action
    start: float
    end: float
    number: int


@dataclass(frozen=True)
class Simulation:
    """A schedule's course: ``rows[rank]`` lists the rank's actions with start and end."""

    schedule: PipelineSchedule
    rows: tuple[tuple[Interval, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(interval.end - interval.start for interval in self.rows[rank])

    @cached_property
    def bubble(self) -> float:
        """Waiting over computing time, of the rank that computes longest: 0.5 means that a step takes 1.5 times as
        long as its work.
        """
        longest = max(map(self.busy, range(len(self.rows))))
        return self.makespan / longest - 1.0

    @cached_property
    def idle_within(self) -> tuple[float, ...]:
        """Each rank's waiting time between its own first start and its own last end."""
        return tuple(row[-1].end - row[0].start - self.busy(rank) for rank, row in enumerate(self.rows))

    def peak_live(self, weight: Callable[[int], float] = lambda stage: 1.0) -> tuple[float, ...]:
        """The most activations that each rank holds at a time, a microbatch of a stage counting ``weight(stage)``.

        They live from the forward pass to the end of the backward pass, with a split one to the end of ``W``.
        """
        peaks = []
        for rank, order in enumerate(self.schedule.orders):
            weights = [weight(stage) for stage in self.schedule.placement.stages_of(rank)]
            held = highest = 0.0
            for action in order:
                if action.kind == "F":
                    held += weights[action.chunk]
                    highest = max(highest, held)
                elif action.kind != "I":
                    held -= weights[action.chunk]
            peaks.append(highest)
        return tuple(peaks)


_EVERYTHING_TAKES_ONE = Durations()


def simulate(schedule: PipelineSchedule, durations: Durations = _EVERYTHING_TAKES_ONE) -> Simulation:
    """Run a schedule on a clock.

    Raises DeadlockError when some action can never run, with what every rank had done by then drawn over time.
    """
    orders, placement = schedule.orders, schedule.placement
    stages = [placement.stages_of(rank) for rank in range(len(orders))]
    done: dict[tuple[Kind, int, int], float] = {}
    rows: list[list[Interval]] = [[] for _ in orders]
    clocks = [0.0] * len(orders)
    number, waiting = 0, set(range(len(orders)))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            order, row = orders[rank], rows[rank]
            while len(row) < len(order):
                action = order[len(row)]
                stage = stages[rank][action.chunk]
                ready = _ready(action, stage, placement, done, durations.transfer)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                end = clocks[rank] = start + durations.of(action.kind)
                row.append(Interval(action, start, end, number))
                number += 1
                for kind in ("I", "W") if action.kind == "B" else (action.kind,):  # "B" is both of its halves
                    done[kind, stage, action.microbatch] = end
                moved = True
            if len(row) == len(order):
                waiting.discard(rank)
        if not moved:
            raise DeadlockError(_describe(schedule, rows, sorted(waiting), durations))
    return Simulation(schedule, tuple(map(tuple, rows)))


def _ready(
    action: Action,
    stage: int,
    placement: Placement,
    done: dict[tuple[Kind, int, int], float],
    transfer: float,
) -> float | None:
    """When what the action needs is there; None when not all of it has been computed yet."""
    kind, microbatch = action.kind, action.microbatch
    if kind == "W":
        return done.get(("I", stage, microbatch))
    if kind == "F":
        neighbour, own = stage - 1, 0.0
    else:
        neighbour, own = stage + 1, done.get(("F", stage, microbatch), -1.0)
        if own < 0.0:
            return None
    if not 0 <= neighbour < len(placement.locations):
        return own
    arrived = done.get(("F" if kind == "F" else "I", neighbour, microbatch))
    if arrived is None:
        return None
    return max(
        own, arrived + (transfer if placement.locations[neighbour].rank != placement.locations[stage].rank else 0.0)
    )


def _describe(
    schedule: PipelineSchedule, rows: Sequence[Sequence[Interval]], stuck: Sequence[int], durations: Durations
) -> str:
    never = {each: schedule.orders[each][len(rows[each])] for each in stuck}

    def blame(rank: int) -> tuple[bool, float]:
        """First an action that its own rank's order puts before the one it needs, then whoever is stuck earliest."""
        before, action = [interval.action for interval in rows[rank]], never[rank]
        own = Action("I" if action.kind == "W" else "F", action.chunk, action.microbatch)
        return action.kind == "F" or own in before, rows[rank][-1].end if rows[rank] else 0.0

    rank = min(stuck, key=blame)
    action = never[rank]
    stage = schedule.placement.stages_of(rank)[action.chunk]
    grid = draw(rows, unit=min(durations.forward, durations.input_backward, durations.weight_backward), stuck=never)
    return (
        f"deadlock at {action} of rank {rank} (stage {stage}, microbatch {action.microbatch}) in schedule "
        f"{schedule.name}: what it needs is never computed\n{grid}"
    )


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

    def label(action: Action) -> str:
        return str(action)[1:] if single else str(action)

    texts = [[label(interval.action) for interval in row] for row in rows]
    width = 1 + max((len(text) for row in texts for text in row), default=0)
    lines = []
    for rank, (row, labels) in enumerate(zip(rows, texts)):
        cells: list[str] = []
        for interval, text in zip(row, labels):
            start, end = round(interval.start / unit), round(interval.end / unit)
            cells += ["."] * (start - len(cells)) + [text] + ["-"] * (end - start - 1)
        cut = " …" if len(cells) > max_cells else ""
        line = "".join(cell.ljust(width) for cell in cells[:max_cells]).rstrip() + cut
        never = f" {label(stuck[rank])}?" if stuck and rank in stuck else ""
        lines.append(f"rank {rank:<2} {line}{never}")
    return "\n".join(lines)
