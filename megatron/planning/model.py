"""A run's model without values: every parameter with its layout, and whether it is trained."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType
from megatron.config.parameter_names import TrainedNames
from megatron.config.pipeline import Stage, model_stages
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.launch import DTYPES
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.latent_attention import LatentAttention


@dataclass(frozen=True)
class _Layout:
    """The part of a run's layout that its stages depend on; runs with an equal one share the built stages."""

    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    sequence_parallel: bool
    cp_comm_types: tuple[CpCommType, ...]
    cp_sizes: tuple[int, ...]
    dtype: torch.dtype
    fp8: Fp8Config
    num_layers: int
    fuses_accumulation: bool

    @classmethod
    def of(cls, run: RunConfig) -> _Layout:
        parallel = run.parallel
        divides_experts = parallel.expert_model_parallel_size > 1 or parallel.expert_tensor_parallel_size is not None
        return cls(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            run.data_parallel_size if divides_experts else 1,
            parallel.expert_model_parallel_size,
            parallel.etp,
            parallel.sequence_parallel,
            parallel.cp_comm_type,
            parallel.hierarchical_context_parallel_sizes or (),
            DTYPES[run.precision.params_dtype],
            run.fp8,
            run.num_layers if run.fp8.is_on else 0,
            run.parallel.fuses_accumulation(is_faster=True),
        )


def planned_context(run: RunConfig) -> ModelContext:
    """The first of the ranks that share a replica's layers, on the meta device: its tensors have shapes and no values,
    and nothing is communicated.
    """
    return _context(_Layout.of(run))


@functools.lru_cache(maxsize=64)
def _context(layout: _Layout) -> ModelContext:
    mesh = Mesh.of(tp=layout.tp, cp=layout.cp, dp=layout.dp, ep=layout.ep, etp=layout.etp)
    return ModelContext(
        mesh=mesh,
        rng=RngStreams(0, mesh, torch.device("cpu")),
        device=torch.device("meta"),
        dtype=layout.dtype,
        sequence_parallel=layout.sequence_parallel,
        cp_comm_types=layout.cp_comm_types,
        cp_sizes=layout.cp_sizes,
        low_precision=LowPrecision(layout.fp8, layout.num_layers),
        weight_gradients=WeightGradients(fuses_accumulation=layout.fuses_accumulation),
    )


def whole_model(run: RunConfig, train_spec: TrainSpec) -> nn.Module:
    """The whole model as one stage, in training mode."""
    return stage_model(run, train_spec, Stage(range(run.num_layers), is_first=True, is_last=True))


def latents_sent(run: RunConfig, train_spec: TrainSpec) -> list[str]:
    """What context-parallel ranks send in place of keys and values, in words; nothing where they send these."""
    modules = (each for each in whole_model(run, train_spec).modules() if isinstance(each, LatentAttention))
    return list(dict.fromkeys(said for each in modules if (said := each.describe_sent())))


def stage_models(run: RunConfig, train_spec: TrainSpec, *, pipeline_rank: int | None = None) -> list[nn.Module]:
    """All stages, first to last, or those of one pipeline rank."""
    return [stage_model(run, train_spec, stage) for stage in model_stages(run) if pipeline_rank in (None, stage.rank)]


def stage_model(run: RunConfig, train_spec: TrainSpec, stage: Stage) -> nn.Module:
    """One stage of the run's model, in training mode."""
    recompute = RecomputePlan.of(run.training)
    return _build(train_spec, run.model, run.extra, _Layout.of(run), stage, recompute, run.optimizer.trained)


@functools.lru_cache(maxsize=1024)
def _build(
    train_spec: TrainSpec,
    model: ModelConfig,
    groups: tuple[object, ...],
    layout: _Layout,
    stage: Stage,
    recompute: RecomputePlan,
    trained: TrainedNames,
) -> nn.Module:
    built = train_spec.build_model(model, groups, _context(layout), stage=stage, recompute=recompute)
    for name, parameter, sharding in sharded_parameters(built):
        parameter.requires_grad_(parameter.requires_grad and (sharding.tied or name) in trained)
    return built
