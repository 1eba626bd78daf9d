"""The one place that chooses what a run trains for."""

from __future__ import annotations

from importlib import import_module

from megatron.config.objective import chosen
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.base import Objective


def objective_of(run: RunConfig, family: TrainSpec) -> TrainSpec:
    """What the run trains: the objective that its settings choose around the train spec of its ``family``, or that
    itself. An objective is returned as it is.
    """
    if isinstance(family, Objective):
        return family
    for settings in chosen(run.extra):
        built: Objective = import_module(settings.module).build(family, run)
        return built
    return family
