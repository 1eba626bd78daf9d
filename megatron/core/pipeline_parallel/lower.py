"""From a schedule to what each rank does, transfers included, without a way to hang. Pure.

Everything is taken from one global order, the simulator's: a message moves when the action that makes it ends. Each
rank's plan is its part of that order, so the ends of every message agree, and the messages from one rank to another
are sent and received in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.pipeline_parallel.actions import Action, PipelineSchedule, Placement, Seat
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage sends another for a microbatch: ``stage_inputs``, or ``gradients`` of those that it received."""

    content: Literal["stage_inputs", "gradients"]
    microbatch: int
    from_stage: int
    to_stage: int
    source: Seat
    target: Seat

    def __str__(self) -> str:
        return f"{self.content} of microbatch {self.microbatch} from stage {self.from_stage} to stage {self.to_stage}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Start receiving."""

    message: Message


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until a message that this rank sends or receives has moved."""

    message: Message


@dataclass(frozen=True, slots=True)
class HandOver:
    """Give the output of one chunk of this rank to another of its chunks."""

    message: Message


Instruction = Action | Send | Receive | Finish | HandOver
Plan = tuple[Instruction, ...]


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
    ranks = _events(simulate(schedule))
    return tuple(map(_overlapped if overlap else _blocking, ranks))


def _events(simulation: Simulation) -> list[_Rank]:
    placement = simulation.schedule.placement
    stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    ranks = [_Rank() for _ in range(placement.num_ranks)]
    events = [
        event
        for rank, row in enumerate(simulation.rows)
        for interval in row
        for event in ((interval.start, 1, interval.number, rank), (interval.end, 0, interval.number, rank))
    ]
    action_of = {interval.number: interval.action for row in simulation.rows for interval in row}
    # What ends at a time comes before what starts then; no action takes no time.
    for _, is_start, number, rank in sorted(events):
        here, action = ranks[rank], action_of[number]
        if is_start:
            here.actions.append(action)
            continue
        message = _message(action, stages[rank][action.chunk], placement)
        if message is None:
            continue
        if message.target.rank == rank:
            here.moves.append((len(here.actions), HandOver(message)))
            continue
        there = ranks[message.target.rank]
        here.moves.append((len(here.actions), Send(message)))
        there.moves.append((len(there.actions), Receive(message)))
    return ranks


def _message(action: Action, stage: int, placement: Placement) -> Message | None:
    """What an action makes for another stage."""
    neighbour = stage + 1 if action.kind == "F" else stage - 1
    if action.kind == "W" or not 0 <= neighbour < placement.num_stages:
        return None
    content: Literal["stage_inputs", "gradients"] = "stage_inputs" if action.kind == "F" else "gradients"
    seats = placement.seats
    return Message(content, action.microbatch, stage, neighbour, seats[stage], seats[neighbour])


def _blocking(rank: _Rank) -> Plan:
    """Both ends wait as soon as a message is made. The plans are parts of an order in which everything could happen one
    after the other, so none waits for ever.
    """
    at: dict[int, list[Instruction]] = defaultdict(list)
    for position, move in rank.moves:
        at[position] += [move] if isinstance(move, HandOver) else [move, Finish(move.message)]
    return _assembled(rank.actions, at)


def _overlapped(rank: _Rank) -> Plan:
    """Receives earlier and waits later, never the other way round, and every channel in its order: none waits for ever.

    A receive starts no later than in the blocking plan, so the sender, who waits for it no earlier than there, doesn't
    wait longer. Receiving ahead can hold up no other message, since each pair of ranks has a channel for either way.
    """
    number = {action: number for number, action in enumerate(rank.actions)}
    receives: dict[int, list[Instruction]] = defaultdict(list)
    waits: dict[int, list[Instruction]] = defaultdict(list)
    moves: dict[int, list[Instruction]] = defaultdict(list)
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
    at = {place: moves[place] + receives[place] + waits[place] for place in range(len(rank.actions) + 1)}
    return _assembled(rank.actions, at)


def _possible_and_needed(message: Message, number: Mapping[Action, int]) -> tuple[int, int]:
    """The first action, by number, before which a message can be received, since its shape is known; and the one that
    needs it.
    """
    forward = number[Action("F", message.target.chunk, message.microbatch)]
    if message.content == "stage_inputs":
        return 0, forward
    backward = (Action(kind, message.target.chunk, message.microbatch) for kind in ("B", "I"))
    return forward + 1, next(number[action] for action in backward if action in number)


def _assembled(actions: Sequence[Action], at: Mapping[int, Sequence[Instruction]]) -> Plan:
    """Actions, and before each what is to happen there; after all of them, the rest."""
    plan: list[Instruction] = []
    for number, action in enumerate(actions):
        plan += [*at.get(number, ()), action]
    return (*plan, *at.get(len(actions), ()))
