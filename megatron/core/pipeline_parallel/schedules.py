"""Orders in which one rank runs its microbatches. Pure: no tensors, no ranks, no clocks."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Action


def one_f_one_b(rank: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Forward passes until the pipeline is full, then one backward a forward (PipeDream-flush, arXiv:2006.09503).

    With one stage this is ``F0 B0 F1 B1 …``: gradient accumulation.
    """
    warmup = min(num_stages - rank - 1, num_microbatches)
    order = [Action("F", 0, microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, num_microbatches):
        order += [Action("F", 0, microbatch), Action("B", 0, microbatch - warmup)]
    return order + [Action("B", 0, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)]


def forward_only(num_microbatches: int) -> list[Action]:
    """Evaluation: every microbatch forward, none backward."""
    return [Action("F", 0, microbatch) for microbatch in range(num_microbatches)]
