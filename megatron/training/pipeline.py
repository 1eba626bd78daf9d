"""A run's pipeline: which schedule its settings mean, this rank's plan for any number of microbatches, and memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.estimate import ScheduleFacts
from megatron.config.pipeline import chunks_per_rank, schedule_name
from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.actions import PipelineSchedule, Placement
from megatron.core.pipeline_parallel.lower import Plan, lower
from megatron.core.pipeline_parallel.schedules import forward_only, training_placement, training_schedule
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True)
class PipelineSettings:
    """What of a run's settings decides its schedule."""

    name: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    overlap: bool

    @classmethod
    def of(cls, config: RunConfig) -> PipelineSettings:
        """Those of ``config``."""
        parallel = config.parallel
        return cls(
            schedule_name(config),
            parallel.pipeline_model_parallel_size,
            chunks_per_rank(config),
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            parallel.overlap_p2p_communication,
        )

    @property
    def placement(self) -> Placement:
        """Where the stages are."""
        return training_placement(self.name, num_ranks=self.num_ranks, num_chunks=self.num_chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.name in ("zb-h1", "zb-v")

    def schedule(self, num_microbatches: int) -> PipelineSchedule:
        """The training schedule."""
        return training_schedule(
            self.name,
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
            group_size=self.group_size,
        )


class Plans:
    """One rank's plans, made when a number of microbatches first comes up (batch ramp-up changes it)."""

    def __init__(self, settings: PipelineSettings, rank: int) -> None:
        self.settings = settings
        self._rank = rank
        self._made: dict[tuple[bool, int], Plan] = {}

    def training(self, num_microbatches: int) -> Plan:
        """Forward and backward passes of a step."""
        return self._plan(True, num_microbatches)

    def evaluation(self, num_microbatches: int) -> Plan:
        """Forward passes alone."""
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
    """Pairs of ranks (source, target) between which messages move, forward and back."""
    pairs = {(one.rank, next_one.rank) for one, next_one in zip(placement.seats, placement.seats[1:])}
    return {pair for one, other in pairs if one != other for pair in ((one, other), (other, one))}


def schedule_facts(config: RunConfig, stage_bytes: Sequence[float]) -> ScheduleFacts:
    """What the run's schedule costs, if a microbatch keeps ``stage_bytes`` of each stage and all take equally long."""
    training = config.training
    microbatches = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
    return _facts(PipelineSettings.of(config), max(microbatches, 1), tuple(stage_bytes))


@functools.lru_cache(maxsize=512)
def _facts(settings: PipelineSettings, num_microbatches: int, stage_bytes: tuple[float, ...]) -> ScheduleFacts:
    simulated = _simulated(settings, num_microbatches)
    return ScheduleFacts(simulated.bubble, simulated.peak_live(lambda stage: stage_bytes[stage]))


@functools.lru_cache(maxsize=8)
def _simulated(settings: PipelineSettings, num_microbatches: int) -> Simulation:
    return simulate(settings.schedule(num_microbatches))
