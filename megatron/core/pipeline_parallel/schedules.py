"""Orders in which ranks run their microbatches, as lists of actions. Pure: no tensors, no ranks, no clocks.

With forward and backward passes of equal length on all stages, waiting over computing time is (pp-1)/m for GPipe and
1F1B, and (pp-1)/(m·v) interleaved with v chunks a rank.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Action, PipelineSchedule, Placement


def gpipe(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """All forward passes, then all backward passes: every microbatch's activations at once (arXiv:1811.06965)."""
    order = [Action(kind, 0, microbatch) for kind in ("F", "B") for microbatch in range(num_microbatches)]
    return PipelineSchedule("gpipe", (tuple(order),) * num_ranks, Placement.looped(num_ranks))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Forward passes until the pipeline is full, then one backward a forward (PipeDream-flush, arXiv:2006.09503).

    Rank r keeps pp-r microbatches. On one rank this is ``F0 B0 F1 B1 …``: gradient accumulation.
    """
    forward = [Action("F", 0, microbatch) for microbatch in range(num_microbatches)]
    backward = [Action("B", 0, microbatch) for microbatch in range(num_microbatches)]
    orders = [one_after_another(forward, backward, ahead=num_ranks - rank - 1) for rank in range(num_ranks)]
    return PipelineSchedule("1f1b", tuple(orders), Placement.looped(num_ranks))


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, group_size: int | None = None
) -> PipelineSchedule:
    """1F1B over ``num_chunks`` shorter chunks a rank, with a bubble ``num_chunks`` times smaller (arXiv:2104.04473).

    ``group_size`` microbatches go through a chunk before the next chunk's turn; None: as many as there are ranks. Any
    size and any number of microbatches are allowed: a group smaller than the number of ranks takes as many turns as
    there are ranks, without the actions of microbatches that don't exist. Leaving those out can't make a schedule hang.
    """
    group_size = min(group_size or num_ranks, num_microbatches)
    groups = [
        [*range(start, min(start + group_size, num_microbatches))] for start in range(0, num_microbatches, group_size)
    ]
    forward, backward = [], []
    for group in groups:
        places = [*group, *[-1] * (num_ranks - len(group))]  # turns without a microbatch are left out below
        forward += [Action("F", chunk, each) for chunk in range(num_chunks) for each in places]
        backward += [Action("B", chunk, each) for chunk in reversed(range(num_chunks)) for each in places]
    orders = []
    for rank in range(num_ranks):
        ahead = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * max(group_size, num_ranks)
        order = one_after_another(forward, backward, ahead=ahead)
        orders.append(tuple(action for action in order if action.microbatch >= 0))
    return PipelineSchedule("interleaved", tuple(orders), Placement.looped(num_ranks, num_chunks))


def one_after_another(forward: list[Action], backward: list[Action], *, ahead: int) -> tuple[Action, ...]:
    """``ahead`` forward passes, then forward and backward in turns, then the other backward passes."""
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for number in range(ahead, len(forward)):
        order += [forward[number], backward[number - ahead]]
    return (*order, *backward[len(backward) - ahead :])


def forward_only(placement: Placement, num_microbatches: int) -> PipelineSchedule:
    """Evaluation: every microbatch through every stage, none back. Groups of as many microbatches as ranks go through
    chunk after chunk, which keeps all ranks busy.
    """
    size, order = placement.num_ranks, []
    for start in range(0, num_microbatches, size):
        for chunk in range(placement.num_chunks):
            order += [Action("F", chunk, each) for each in range(start, min(start + size, num_microbatches))]
    return PipelineSchedule("forward only", (tuple(order),) * size, placement)
