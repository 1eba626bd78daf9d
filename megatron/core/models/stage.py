"""Which layers each pipeline stage holds; a layer can be neither lost nor held twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.pipeline import stage_sizes
from megatron.config.run import RunConfig


@dataclass(frozen=True)
class Stage:
    """A consecutive part of a model: its layers by global number, and whether it holds the ends."""

    layers: range
    is_first: bool
    is_last: bool


def model_stages(run: RunConfig) -> list[Stage]:
    """The model cut into consecutive parts, as many as pipeline ranks and their chunks hold."""
    return stages_of(stage_sizes(run))


def stages_of(sizes: Sequence[int]) -> list[Stage]:
    """Stages with the given numbers of layers, in order (``config.pipeline`` says how many each gets)."""
    stages, start = [], 0
    for number, size in enumerate(sizes):
        stages.append(Stage(range(start, start + size), number == 0, number == len(sizes) - 1))
        start += size
    return stages
