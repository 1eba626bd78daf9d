"""Waiting time and memory of a pipeline schedule, by simulation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.lower import Finish, Message, Plan, Receive, lower
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import Simulation, simulate


@dataclass(frozen=True)
class ScheduleFacts:
    """Figures of a simulated schedule. ``bubble``: waiting time over computing time. ``peaks``: the most bytes that
    each rank keeps at a time.
    """

    bubble: float
    peaks: tuple[float, ...]


def schedule_facts(config: RunConfig, stage_bytes: Sequence[float]) -> ScheduleFacts:
    """Facts of the run's schedule, if a microbatch keeps ``stage_bytes`` in each stage and all take equally long."""
    microbatches = config.training.global_batch_size // config.batch_unit
    return _facts(PipelineSettings.of(config), max(microbatches, 1), tuple(stage_bytes))


def most_held(config: RunConfig, kept: Sequence[float], received: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of activations and of messages that each rank holds while it computes.

    A microbatch keeps ``kept`` bytes in each stage, among them its input of ``received`` bytes (0 in the first stage).
    A backward pass works on the gradient of its output, which counts as its working memory.
    """
    microbatches = max(config.training.global_batch_size // config.batch_unit, 1)
    return _most_held(PipelineSettings.of(config), microbatches, tuple(kept), tuple(received))


@dataclass(frozen=True)
class StageNeeds:
    """Bytes of a stage beside activations: what its first backward pass needs while it computes, what later ones need,
    and what the first leaves for the step.
    """

    first: float = 0.0
    later: float = 0.0
    left: float = 0.0


def most_needed(
    config: RunConfig, kept: Sequence[float], received: Sequence[float], needs: Sequence[StageNeeds]
) -> tuple[float, ...]:
    """The most bytes that each rank needs: what ``most_held`` counts, and what stages need as they compute."""
    microbatches = max(config.training.global_batch_size // config.batch_unit, 1)
    return _most_held(PipelineSettings.of(config), microbatches, tuple(kept), tuple(received), tuple(needs))


@functools.lru_cache(maxsize=512)
def _most_held(
    settings: PipelineSettings,
    num_microbatches: int,
    kept: tuple[float, ...],
    received: tuple[float, ...],
    needs: tuple[StageNeeds, ...] | None = None,
) -> tuple[float, ...]:
    plans, placement = _plans(settings, num_microbatches), settings.placement
    needs = needs or (StageNeeds(),) * len(kept)
    return tuple(
        _Held(placement.stages_of(rank), kept, (*received, 0.0), needs).most(plan, rank)
        for rank, plan in enumerate(plans)
    )


@functools.lru_cache(maxsize=8)
def _plans(settings: PipelineSettings, num_microbatches: int) -> tuple[Plan, ...]:
    return lower(settings.schedule(num_microbatches), overlap=settings.overlap)


@dataclass
class _Held:
    """Bytes on one rank. ``stages``: by chunk; ``kept``, ``received``: by stage, what the stage after the last receives
    included.
    """

    stages: Sequence[int]
    kept: Sequence[float]
    received: Sequence[float]
    needs: Sequence[StageNeeds]

    def most(self, plan: Plan, rank: int) -> float:
        """Most bytes that are held at once during a plan."""
        held = highest = 0.0
        begun = set[int]()
        for each in plan:
            if isinstance(each, Action):
                during, after = self._changes(each)
                stage = self.stages[each.chunk]
                needs = self.needs[stage]
                highest = max(highest, held + during + (needs.later if stage in begun else needs.first))
                held += after
                if each.kind in ("B", "W") and stage not in begun:
                    begun.add(stage)
                    held += needs.left
            elif isinstance(each, Receive):
                held += self._size(each.message)
            elif isinstance(each, Finish) and each.message.source.rank == rank:
                held -= self._size(each.message)
        return highest

    def _changes(self, action: Action) -> tuple[float, float]:
        """What an action adds while it runs, and what it leaves."""
        stage = self.stages[action.chunk]
        kept, given, sent = self.kept[stage], self.received[stage], self.received[stage + 1]
        if action.kind == "F":  # the input is among what is kept
            return kept - given, kept - given + sent
        if action.kind == "W":
            return 0.0, -kept
        return -sent, given - sent - kept * (action.kind == "B")

    def _size(self, message: Message) -> float:
        return self.received[max(message.from_stage, message.to_stage)]


@functools.lru_cache(maxsize=512)
def _facts(settings: PipelineSettings, num_microbatches: int, stage_bytes: tuple[float, ...]) -> ScheduleFacts:
    simulated = _simulated(settings, num_microbatches)
    return ScheduleFacts(simulated.bubble, simulated.peak_live(lambda stage: stage_bytes[stage]))


@functools.lru_cache(maxsize=8)
def _simulated(settings: PipelineSettings, num_microbatches: int) -> Simulation:
    return simulate(settings.schedule(num_microbatches))
