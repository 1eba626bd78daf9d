"""What a pipeline schedule costs, found by simulating it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True)
class ScheduleFacts:
    """What a pipeline schedule costs: waiting over computing time, and what each rank keeps at a time at most."""

    bubble: float
    peaks: tuple[float, ...]


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
