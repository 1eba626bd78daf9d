"""Lowering of a schedule to each rank's plan, transfers included, such that no plan can hang. Pure.

All plans are taken from one global order, the simulator's: a message moves when the action that makes it ends. Each
rank's plan is its part of that order, so both ends of every message agree, and the messages from one rank to another
are sent and received in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from megatron.core.pipeline_parallel.actions import Action, PipelineSchedule, StageLocation
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage sends another for a microbatch: ``stage_inputs``, or ``gradients`` of those that it received."""

    content: Literal["stage_inputs", "gradients"]
    microbatch: int
    from_stage: int
    to_stage: int
    source: StageLocation
    target: StageLocation

    @override
    def __str__(self) -> str:
        return f"{self.content} of microbatch {self.microbatch} from stage {self.from_stage} to stage {self.to_stage}"


@dataclass(frozen=True, slots=True)
class _Transfer:
    message: Message


class Send(_Transfer):
    """Start sending."""


class Receive(_Transfer):
    """Start receiving."""


class Finish(_Transfer):
    """Wait until a message that this rank sends or receives has moved."""


class HandOver(_Transfer):
    """Give the output of one chunk of this rank to another of its chunks."""


Instruction = Action | Send | Receive | Finish | HandOver
Plan = tuple[Instruction, ...]
Transfers = dict[int, list[Instruction]]
"""Instructions of one rank, by the index of the action they precede; the last index: those after all actions."""


@dataclass
class _Rank:
    """What happens on one rank: its actions, and messages with the number of actions that started before they move."""

    actions: list[Action] = field(default_factory=list)
    moves: list[tuple[int, Send | Receive | HandOver]] = field(default_factory=list)


def lower(schedule: PipelineSchedule, *, overlap: bool = True) -> tuple[Plan, ...]:
    """Each rank's plan.

    With ``overlap`` a message is received while the action before the one that needs it runs, or earlier, and a sent
    one is waited for an action later. Without, both ends wait at once.
    """
    plans: list[Plan] = []
    for rank in _events(simulate(schedule)):
        at = _overlapped(rank) if overlap else _blocking(rank)
        plan = [each for number, action in enumerate(rank.actions) for each in (*at[number], action)]
        plans.append((*plan, *at[len(rank.actions)]))
    return tuple(plans)


def _events(simulation: Simulation) -> list[_Rank]:
    placement = simulation.schedule.placement
    stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    ranks = [_Rank() for _ in stages]
    events = [
        (time, is_start, interval.number, rank, interval.action)
        for rank, row in enumerate(simulation.rows)
        for interval in row
        for time, is_start in ((interval.start, True), (interval.end, False))
    ]
    # Ends before starts of the same time; every action takes some time.
    for _, is_start, _, rank, action in sorted(events, key=lambda event: event[:3]):
        here = ranks[rank]
        if is_start:
            here.actions.append(action)
            continue
        stage = stages[rank][action.chunk]
        neighbour = stage + 1 if action.kind == "F" else stage - 1
        if action.kind == "W" or not 0 <= neighbour < placement.num_stages:
            continue  # it makes nothing for another stage
        content: Literal["stage_inputs", "gradients"] = "stage_inputs" if action.kind == "F" else "gradients"
        source, target = placement.locations[stage], placement.locations[neighbour]
        message = Message(content, action.microbatch, stage, neighbour, source, target)
        if message.target.rank == rank:
            here.moves.append((len(here.actions), HandOver(message)))
            continue
        there = ranks[message.target.rank]
        here.moves.append((len(here.actions), Send(message)))
        there.moves.append((len(there.actions), Receive(message)))
    return ranks


def _blocking(rank: _Rank) -> Transfers:
    """Transfers of which both ends wait as soon as a message is made. The plans are parts of one order in which
    everything could run serially, so none waits for ever.
    """
    at: Transfers = defaultdict(list)
    for position, move in rank.moves:
        at[position] += [move] if isinstance(move, HandOver) else [move, Finish(move.message)]
    return at


def _overlapped(rank: _Rank) -> Transfers:
    """Receives start earlier than in the blocking plan, waits come later, and each channel keeps its order. So no rank
    waits for ever: a sender waits no earlier than in the blocking plan, and its receiver is ready no later. An early
    receive blocks no other message, since each pair of ranks has a channel for each direction.
    """
    number = {action: number for number, action in enumerate(rank.actions)}
    receives: Transfers = defaultdict(list)
    waits: Transfers = defaultdict(list)
    moves: Transfers = defaultdict(list)
    latest: dict[int, int] = defaultdict(int)
    for position, move in rank.moves:
        if isinstance(move, Receive):
            source, (possible, needed) = move.message.source.rank, _possible_and_needed(move.message, number)
            latest[source] = max(latest[source], min(position, max(possible, needed - 1)))
            receives[latest[source]].append(move)
            waits[needed].append(Finish(move.message))
            continue
        moves[position].append(move)
        if isinstance(move, Send):
            waits[min(position + 1, len(rank.actions))].append(Finish(move.message))
    return {place: moves[place] + receives[place] + waits[place] for place in range(len(rank.actions) + 1)}


def _possible_and_needed(message: Message, number: Mapping[Action, int]) -> tuple[int, int]:
    """The first action, by number, before which a message can be received, since its shape is known; and the one that
    needs it.
    """
    forward = number[Action("F", message.target.chunk, message.microbatch)]
    if message.content == "stage_inputs":
        return 0, forward
    backward = (Action(kind, message.target.chunk, message.microbatch) for kind in ("B", "I"))
    return forward + 1, next(number[action] for action in backward if action in number)
