"""This rank's plan of the pipeline schedule for any number of microbatches."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Placement
from megatron.core.pipeline_parallel.lower import Plan, lower
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.core.pipeline_parallel.settings import PipelineSettings


class Plans:
    """One rank's plans, cached by number of microbatches, which batch ramp-up changes."""

    def __init__(self, settings: PipelineSettings, rank: int) -> None:
        self.settings = settings
        self._rank = rank
        self._made: dict[tuple[bool, int], Plan] = {}

    def training(self, num_microbatches: int) -> Plan:
        """Forward and backward passes of a step."""
        return self._plan(True, num_microbatches)

    def evaluation(self, num_microbatches: int) -> Plan:
        """Forward passes only."""
        return self._plan(False, num_microbatches)

    def _plan(self, trains: bool, num_microbatches: int) -> Plan:
        key = (trains, num_microbatches)
        if key not in self._made:
            settings = self.settings
            schedule = (
                settings.schedule(num_microbatches) if trains else forward_only(settings.placement, num_microbatches)
            )
            self._made[key] = lower(schedule, overlap=settings.overlap)[self._rank]
        return self._made[key]


def routes(placement: Placement) -> set[tuple[int, int]]:
    """Pairs of ranks (source, target) between which messages are sent, in both directions."""
    pairs = {(one.rank, next_one.rank) for one, next_one in zip(placement.locations, placement.locations[1:])}
    return {pair for one, other in pairs if one != other for pair in ((one, other), (other, one))}
