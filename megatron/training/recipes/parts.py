"""What recipes of models that are one chain of layers have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.core.models.build import build_model
from megatron.core.models.stage import Stage
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import Microbatch, Wires, WireSpec
from megatron.core.transformer.block import RecomputePlan


def hidden_wires(run: RunConfig, stage: Stage, context: ParallelContext, *, sequences: int = 1) -> dict[str, WireSpec]:
    """Hidden states ``[s, b, h]`` between stages; ``sequences``: of one sample."""
    if stage.is_first:
        return {}
    return {"hidden": hidden_wire(run, context, length=run.data.seq_length, sequences=sequences)}


def hidden_wire(
    run: RunConfig, context: ParallelContext, *, length: int, sequences: int = 1, normed: bool = False
) -> WireSpec:
    """This rank's part of the hidden states of ``length`` tokens, on the residual stream or, ``normed``, behind it."""
    mesh, model = context.mesh, run.model
    held = length // mesh.size("cp") // (mesh.size("tp") if context.sequence_parallel else 1)
    wide = model.fp32_residual_connection and not normed
    dtype = torch.promote_types(context.dtype, torch.float32) if wide else context.dtype
    return WireSpec((held, run.training.micro_batch_size * sequences, model.hidden_size), dtype)


def run_bert(model: nn.Module, wires: Wires, microbatch: Microbatch) -> Any:
    """Tokens of sentences (or the previous stage's hidden states) through a stage of a BERT, whatever its head."""
    tensors = microbatch.tensors
    output = model(
        tensors.get("text"),
        tensors.get("types"),
        padding_mask=tensors["padding_mask"].bool(),
        key=microbatch.key,
        hidden=wires.get("hidden"),
    )
    return {"hidden": output} if isinstance(output, Tensor) else output


def build_part(run: RunConfig, stage: Stage, context: ParallelContext) -> nn.Module:
    """The part of the run's model that ``stage`` names, with its initial weights."""
    return build_model(
        run.model, run.extra, context, stage=stage, recompute=recompute_plan(run), seed=run.training.seed
    )


def recompute_plan(run: RunConfig) -> RecomputePlan:
    """Which activations ``--recompute-…`` asks to recompute."""
    training = run.training
    return RecomputePlan(
        granularity=training.recompute_granularity,
        method=training.recompute_method or "uniform",
        num_layers=training.recompute_num_layers or 1,
    )
