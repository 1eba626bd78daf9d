"""What training keeps of a rank's models: flat buffers, the sums of gradients in them, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatron.config.lora import LoraConfig
from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import FlatBuffer, build_buffers, counted_weights, frozen_parts
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.distributed.unit_memory import ShardedUnits, UnitWeights
from megatron.core.distributed.units import UnitBorders, units_of
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.fp8_linear import weight_quantizers
from megatron.training.run.stages import named_parameters


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Where a rank's parameters lie, and what changes them; fields as of ``Run``."""

    buffers: list[FlatBuffer]
    frozen: list[FlatBuffer]
    grad_sync: GradSync
    borders: UnitBorders
    optimizer: Optimizer


def build_training_state(config: RunConfig, models: Sequence[nn.Module], context: ModelContext) -> TrainingState:
    """Move the parameters of ``models`` into flat buffers, and build what sums their gradients and updates them.

    A collective where stages share parameters.
    """
    parallel, stage = config.parallel, config.parallel.zero_stage
    named = list(named_parameters(models))
    policies = parameter_policies(named, config.optimizer, width_multiplier=config.model.width_multiplier)
    build = partial(
        build_buffers,
        named,
        context,
        grad_dtype=gradient_dtype(config, context),
        bucket_size=parallel.ddp_bucket_size,
        pads_buckets=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        registers=parallel.use_nccl_ub,
        quantizers=weight_quantizers(models) if config.fp8.fp8_param_gather else None,
        policies=policies,
        units={each: unit.name for model in models for unit in units_of(model) for each in unit.parameters},
        zero_stage=stage,
        seed=config.training.seed,
        divides_state=parallel.outer_dp_sharding_strategy == "optim",
    )
    buffers, frozen = build(), build(of_frozen=True, quantizers=None) if stage == 3 else []
    grad_sync = GradSync(
        buffers,
        context,
        sharded=stage > 0,
        overlap=parallel.overlap_grad_reduce,
        sums_in_fp32=parallel.ddp_reduce_scatter_with_fp32_accumulation,
        weight_gradients=context.weight_gradients,
    )
    weights = UnitWeights(
        [*buffers, *frozen],
        context.mesh,
        keeps=parallel.keeps_gathered_weights,
        prefetches=parallel.overlap_param_gather,
        low_precision=context.low_precision,
    )
    memory = ShardedUnits(weights, grad_sync.units)
    frozen_weights = counted_weights(frozen)
    if stage < 3 and not config.part(LoraConfig).has_quantized_base:  # whose numbers are given up
        frozen_weights = frozen_parts(named, policies, context)
    optimizer = Optimizer(
        buffers,
        config.optimizer,
        config.precision,
        context,
        sharded=stage > 0,
        count_zeros=config.reporting.log_num_zeros_in_grad,
        frozen=frozen_weights,
        low_precision=context.low_precision,
        units=weights,
    )
    for model in models if parallel.overlap_param_gather else ():
        optimizer.gather.overlap_forward(model)
    borders = UnitBorders(models if stage > 1 else [], memory, context.weight_gradients)
    return TrainingState(buffers, frozen, grad_sync, borders, optimizer)


def gradient_dtype(config: RunConfig, context: ParallelContext) -> torch.dtype:
    """Dtype in which gradients are accumulated and reduced: fp32 for 16-bit weights unless bf16 is asked for."""
    if context.dtype == torch.bfloat16 and config.precision.grad_reduce_in_bf16:
        return torch.bfloat16
    return torch.promote_types(context.dtype, torch.float32)
