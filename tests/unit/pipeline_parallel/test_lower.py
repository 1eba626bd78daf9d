"""Plans of ranks: whatever the schedule, both ends of every message agree and nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from megatron.config.parallel import PipelineScheduleName
from megatron.core.pipeline_parallel.actions import Action, PipelineSchedule, Placement
from megatron.core.pipeline_parallel.lower import Finish, HandOver, Message, Plan, Receive, Send, lower
from megatron.core.pipeline_parallel.schedules import forward_only, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.settings import PipelineSettings

RANKS = [1, 2, 3, 4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (5, 6, 7, 8))]


def execute(plans: tuple[Plan, ...]) -> list[list[Action]]:
    """Run all plans side by side, strictly: a message moves only when both ends have started it and it is at the head
    of its channel at both, and a rank stands still until what it waits for has moved. Returns the actions by rank.
    """
    sending: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    receiving: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    moved: set[tuple[Message, int]] = set()
    places, done = [0] * len(plans), [[] for _ in plans]  # type: list[int], list[list[Action]]
    waiting = set(range(len(plans)))
    while waiting:
        before = list(places)
        for rank in sorted(waiting):
            while places[rank] < len(plans[rank]):
                instruction = plans[rank][places[rank]]
                if isinstance(instruction, Action):
                    done[rank].append(instruction)
                elif isinstance(instruction, Finish):
                    if (instruction.message, rank) not in moved:
                        break
                elif not isinstance(instruction, HandOver):
                    message = instruction.message
                    channel = (message.source.rank, message.target.rank)
                    mine, theirs = (sending, receiving) if isinstance(instruction, Send) else (receiving, sending)
                    assert rank == channel[isinstance(instruction, Receive)]
                    if theirs[channel]:
                        assert theirs[channel][0] == message, "the ends of a channel disagree on the order"
                        theirs[channel].popleft()
                        moved |= {(message, end) for end in channel}
                    else:
                        mine[channel].append(message)
                places[rank] += 1
            if places[rank] == len(plans[rank]):
                waiting.discard(rank)
        assert places != before, f"ranks {sorted(waiting)} wait for ever"
    assert not any(sending.values()) and not any(receiving.values())
    return done


def check(schedule: PipelineSchedule) -> None:
    """Plans run to their end, hold the schedule's actions in its order, and have what each action needs."""
    placement = schedule.placement
    for overlap in (False, True):
        plans = lower(schedule, overlap=overlap)
        assert execute(plans) == [list(order) for order in schedule.orders]
        for rank, plan in enumerate(plans):
            stages = placement.stages_of(rank)
            there, made = set(), set()
            for instruction in plan:
                if isinstance(instruction, Action):
                    stage, each, forward = stages[instruction.chunk], instruction.microbatch, instruction.kind == "F"
                    first, last = stage == 0, stage == placement.num_stages - 1
                    if instruction.kind != "W" and not (first if forward else last):
                        assert (forward, stage, each) in there
                    made.add((forward, stage, each))
                elif isinstance(instruction, (Finish, HandOver)) and instruction.message.target.rank == rank:
                    there.add(
                        (
                            instruction.message.content == "stage_inputs",
                            instruction.message.to_stage,
                            instruction.message.microbatch,
                        )
                    )
                elif isinstance(instruction, Send):
                    forward = instruction.message.content == "stage_inputs"
                    assert (forward, instruction.message.from_stage, instruction.message.microbatch) in made


def numbers(ranks: int) -> range:
    """Numbers of microbatches up to four a rank and four more: a pipeline fills, runs in turns and empties in fewer."""
    return range(1, 4 * ranks + 5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("ranks", RANKS)
def test_no_plan_hangs(name: PipelineScheduleName, ranks: int) -> None:
    """On a cluster a hang shows after ten minutes, and says nothing."""
    for microbatches in numbers(ranks):
        check(PipelineSettings(name, ranks).schedule(microbatches))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_no_interleaved_plan_hangs(ranks: int, chunks: int) -> None:
    """Every rank is the neighbour of the first and last, too."""
    for microbatches in numbers(ranks):
        check(interleaved(ranks, microbatches, chunks))
        if microbatches % 5 == 0:
            check(interleaved(ranks, microbatches, chunks, group_size=3))


@pytest.mark.parametrize("ranks", RANKS)
def test_no_evaluation_hangs(ranks: int) -> None:
    """Forward passes alone, through every placement."""
    for microbatches in numbers(ranks):
        check(forward_only(Placement.vee(ranks), microbatches))
        check(forward_only(Placement.looped(ranks, 3), microbatches))


def test_one_rank_moves_nothing() -> None:
    """Without a pipeline a plan is the schedule."""
    assert lower(one_f_one_b(1, 3))[0] == one_f_one_b(1, 3).orders[0]


def test_messages_overlap_actions() -> None:
    """Receives are started while the action before runs; a sent message is waited for an action later."""
    plan = [text(instruction) for instruction in lower(one_f_one_b(2, 3))[1]]
    assert " ".join(plan) == "R0s F0s 0F0 R1s 0B0 S0g F1s 0F1 R2s F0g 0B1 S1g F2s 0F2 F1g 0B2 S2g F2g"
    blocking = [text(instruction) for instruction in lower(one_f_one_b(2, 3), overlap=False)[1]]
    assert " ".join(blocking) == "R0s F0s 0F0 R1s F1s 0B0 S0g F0g 0F1 0B1 S1g F1g R2s F2s 0F2 0B2 S2g F2g"


def text(instruction: object) -> str:
    """``S0g``: send the gradients of microbatch 0."""
    if isinstance(instruction, Action):
        return str(instruction)
    assert isinstance(instruction, (Send, Receive, Finish))
    return type(instruction).__name__[0] + f"{instruction.message.microbatch}{instruction.message.content[0]}"
