"""Which layers each pipeline stage holds; a layer can be neither lost nor held twice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A consecutive part of a model: its layers by global number, and whether it holds the ends."""

    layers: range
    is_first: bool
    is_last: bool


def balanced_stages(num_layers: int, num_stages: int) -> list[Stage]:
    """``num_layers`` over ``num_stages``, sizes differing by one at most, the middle stages taking the surplus."""
    small, surplus = divmod(num_layers, num_stages)
    sizes = [small] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: abs(stage - (num_stages - 1) / 2))
    for stage in middle_first[:surplus]:
        sizes[stage] += 1
    return stages_of(sizes)


def stages_of(sizes: list[int]) -> list[Stage]:
    """Stages with the given numbers of layers, in order."""
    stages, start = [], 0
    for number, size in enumerate(sizes):
        stages.append(Stage(range(start, start + size), number == 0, number == len(sizes) - 1))
        start += size
    return stages
