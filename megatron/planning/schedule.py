"""Waiting time and memory of a pipeline schedule, by simulation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True)
class ScheduleFacts:
    """``bubble``: waiting time over computing time. ``peaks``: the most bytes that each rank keeps at a time."""

    bubble: float
    peaks: tuple[float, ...]


def schedule_facts(config: RunConfig, stage_bytes: Sequence[float]) -> ScheduleFacts:
    """Facts of the run's schedule, if a microbatch keeps ``stage_bytes`` in each stage and all take equally long."""
    microbatches = config.training.global_batch_size // config.batch_unit
    return _facts(PipelineSettings.of(config), max(microbatches, 1), tuple(stage_bytes))


@functools.lru_cache(maxsize=512)
def _facts(settings: PipelineSettings, num_microbatches: int, stage_bytes: tuple[float, ...]) -> ScheduleFacts:
    simulated = _simulated(settings, num_microbatches)
    return ScheduleFacts(simulated.bubble, simulated.peak_live(lambda stage: stage_bytes[stage]))


@functools.lru_cache(maxsize=8)
def _simulated(settings: PipelineSettings, num_microbatches: int) -> Simulation:
    return simulate(settings.schedule(num_microbatches))
