"""The part of a run's model that is on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from megatron.config.objective import name_in_checkpoints
from megatron.config.pipeline import Stage, model_stages
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import ShardedState, Sharding, persistent_buffers, sharded_parameters, sharding_of
from megatron.core.transformer.block import RecomputePlan
from megatron.training.run.agreement import check_stages


def stages_here(run: RunConfig, context: ParallelContext) -> list[Stage]:
    """The stages that this rank holds, by chunk."""
    return [stage for stage in model_stages(run) if stage.rank == context.mesh.rank("pp")]


def build_stages(run: RunConfig, train_spec: TrainSpec, context: ModelContext) -> tuple[list[Stage], list[nn.Module]]:
    """This rank's stages and their models with initial weights, recomputing what ``--recompute-…`` asks for.

    Models on one rank share tied parameters. A collective, which checks that the ranks hold the whole model.
    """
    stages = stages_here(run, context)
    check_stages(run, stages, context)
    recompute, seed = RecomputePlan.of(run.training), run.training.seed
    models = [
        train_spec.build_model(run.model, run.extra, context, stage=stage, recompute=recompute, seed=seed)
        for stage in stages
    ]
    share_tied_parameters(models)
    share_tied_parameters(beside for model in models if (beside := train_spec.beside(model)) is not None)
    return stages, models


def layout_of(*models: nn.Module) -> dict[str, Sharding]:
    """The layout of every parameter of the parts of a model, by its global name; tied copies share one."""
    shardings = ((name, sharding_of(parameter)) for name, parameter in named_parameters(models))
    return {sharding.tied or name: sharding for name, sharding in shardings}


def model_state(*models: nn.Module) -> Iterator[ShardedState]:
    """Every parameter of the parts of a model under its name in a checkpoint; tied copies share one."""
    for name, parameter in named_parameters(models):
        sharding = sharding_of(parameter)
        yield ShardedState(name_in_checkpoints(sharding.tied or name), parameter.detach(), sharding)


def buffer_state(*models: nn.Module) -> Iterator[ShardedState]:
    """Every buffer that is part of the state of a rank's modules, which all ranks hold alike."""
    for model in models:
        for name, buffer in persistent_buffers(model):
            yield ShardedState(f"model.{name}", buffer.detach(), Sharding(tuple(buffer.shape)))


def named_parameters(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of a rank's parts of the model with its global name; one that parts share, once."""
    seen: set[nn.Parameter] = set()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def share_tied_parameters(models: Iterable[nn.Module]) -> None:
    """Replace copies of a tied parameter in the models of one rank by one parameter."""
    held: dict[str, nn.Parameter] = {}
    for model in models:
        for name, parameter, sharding in list(sharded_parameters(model)):
            if sharding.tied is not None and held.setdefault(sharding.tied, parameter) is not parameter:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, held[sharding.tied])
