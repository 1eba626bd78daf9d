"""The part of a run's model that is on this rank."""

from __future__ import annotations

from torch import nn

from megatron.config.run import RunConfig
from megatron.core.models.stage import Stage
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.transformer.block import RecomputePlan


def stages_here(run: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> list[Stage]:
    """The stages that this rank holds, by chunk."""
    stages = train_spec.stages(run)
    placement = PipelineSettings.of(run).placement
    return [stages[number] for number in placement.stages_of(context.mesh.rank("pp"))]


def build_stage(run: RunConfig, train_spec: TrainSpec, stage: Stage, context: ParallelContext) -> nn.Module:
    """A stage of the run's model with its initial weights, recomputing what ``--recompute-…`` asks for."""
    return train_spec.build_model(
        run.model, run.extra, context, stage=stage, recompute=RecomputePlan.of(run.training), seed=run.training.seed
    )
