"""Schedules that split the backward pass and compute gradients of weights while a rank would wait. Pure.

Zero Bubble Pipeline Parallelism (arXiv:2401.10241) and, for stages placed in a V, arXiv:2405.15362. With forward,
input-backward and weight-backward of one length t, a 1F1B step has a bubble of 3t·(pp-1), ZB-H1 of t·(pp-1), and ZB-V,
whose chunks are half as long, of t/2·(pp-1): the time until the first microbatch reaches the last rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron.core.pipeline_parallel.actions import Action, Kind, PipelineSchedule, Placement


def zb_h1(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B in which rank r delays r weight-backward passes, and computes them at the end, where it would wait.

    Every rank keeps activations of up to pp microbatches; under 1F1B only the first rank does.
    """
    orders = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank - 1, num_microbatches)
        order = [Action("F", 0, microbatch) for microbatch in range(ahead)]
        weights = 0
        for done in range(num_microbatches):
            if ahead + done < num_microbatches:
                order.append(Action("F", 0, ahead + done))
            order.append(Action("I", 0, done))
            late = rank if ahead + done < num_microbatches else 0
            if weights <= done - late:
                order.append(Action("W", 0, weights))
                weights += 1
        order += [Action("W", 0, microbatch) for microbatch in range(weights, num_microbatches)]
        orders.append(tuple(order))
    return PipelineSchedule("zb-h1", tuple(orders), Placement.looped(num_ranks))


def zb_v(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Two chunks a rank, the stages in a V: the last is beside the first, so backward passes reach every rank early.

    No rank keeps more than 2·pp chunks' activations; 1F1B's first rank keeps as much.

    Forward and input-backward passes come in the order of ``_Rank.plan``. A weight-backward pass is inserted wherever,
    with all passes equally long, the next pass of the plan can't run yet or would exceed the memory limit.
    """
    placement = Placement.vee(num_ranks)
    ranks = [_Rank(rank, placement, num_microbatches) for rank in range(num_ranks)]
    finished: set[tuple[Kind, int, int]] = set()
    while any(rank.has_work for rank in ranks):
        running = [rank.next_action(finished) for rank in ranks]
        assert any(running), "a schedule that was built in order of time can go on"
        for rank, action in zip(ranks, running):
            if action is not None:
                rank.order.append(action)
                finished.add((action.kind, rank.stages[action.chunk], action.microbatch))
    return PipelineSchedule("zb-v", tuple(tuple(rank.order) for rank in ranks), placement)


class _Rank:
    """One rank while ZB-V's order is built, one unit of time after the other."""

    def __init__(self, rank: int, placement: Placement, num_microbatches: int) -> None:
        self.order: list[Action] = []
        self.stages = placement.stages_of(rank)
        self._last_stage = placement.num_stages - 1
        self._num_microbatches = num_microbatches
        self._most_kept = placement.num_stages
        self._plan = list(self.plan(rank, placement.num_ranks, num_microbatches))
        self._planned = 0
        self._done: Counter[tuple[Kind, int]] = Counter()

    @staticmethod
    def plan(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[Kind, int]]:
        """Forward and input-backward passes as (kind, chunk), until no forward pass is left.

        First as many through chunk 0 as fit before the first microbatch reaches chunk 1, then both chunks in turns;
        then chunk 1's backward passes as they become possible; then every pass in turns.
        """
        count: Counter[tuple[Kind, int]] = Counter()

        def take(kind: Kind, chunk: int) -> Iterator[tuple[Kind, int]]:
            before = {("F", 0): num_microbatches, ("F", 1): count["F", 0]}
            before |= {("I", 1): count["F", 1], ("I", 0): count["I", 1]}
            if count[kind, chunk] < before[kind, chunk]:
                count[kind, chunk] += 1
                yield kind, chunk

        for _ in range(2 * (num_ranks - rank) - 1):
            yield from take("F", 0)
        for _ in range(rank):
            yield from take("F", 1)
            yield from take("F", 0)
        for _ in range(num_ranks - rank):
            yield from take("F", 1)
            yield from take("I", 1)
        while count["F", 1] < num_microbatches:
            yield from take("F", 0)
            yield from take("I", 0)
            yield from take("F", 1)
            yield from take("I", 1)

    @property
    def has_work(self) -> bool:
        """Whether an action is left."""
        return len(self.order) < 6 * self._num_microbatches

    def next_action(self, finished: set[tuple[Kind, int, int]]) -> Action | None:
        """What to run in this unit of time, given the (kind, stage, microbatch) that all ranks have finished."""
        if self._planned < len(self._plan):
            kind, chunk = self._plan[self._planned]
            if self._can_run(kind, chunk, finished):
                self._planned += 1
                return self._take(kind, chunk)
        else:
            for chunk in (1, 0):
                if self._can_run("I", chunk, finished):
                    return self._take("I", chunk)
        for chunk in (0, 1):
            if self._done["W", chunk] < self._done["I", chunk]:
                return self._take("W", chunk)
        return None

    def _can_run(self, kind: Kind, chunk: int, finished: set[tuple[Kind, int, int]]) -> bool:
        microbatch, stage = self._done[kind, chunk], self.stages[chunk]
        if microbatch == self._num_microbatches:
            return False
        if kind == "F":
            kept = sum(self._done["F", each] - self._done["W", each] for each in (0, 1))
            return kept < self._most_kept and (stage == 0 or ("F", stage - 1, microbatch) in finished)
        needed = ("F", stage, microbatch) if stage == self._last_stage else ("I", stage + 1, microbatch)
        return needed in finished

    def _take(self, kind: Kind, chunk: int) -> Action:
        self._done[kind, chunk] += 1
        return Action(kind, chunk, self._done[kind, chunk] - 1)
