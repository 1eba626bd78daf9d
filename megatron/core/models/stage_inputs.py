"""What chains of layers have in common: hidden states between their stages, and the workload of a microbatch."""

from __future__ import annotations

import torch

from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Workload
from megatron.core.pipeline_parallel.chunk import TensorSpec


def hidden_stage_inputs(
    run: RunConfig, stage: Stage, context: ParallelContext, *, sequences: int = 1
) -> dict[str, TensorSpec]:
    """Hidden states ``[s, b, h]`` between stages; ``sequences``: of one sample."""
    if stage.is_first:
        return {}
    return {"hidden": hidden_spec(run, context, length=run.data.seq_length, sequences=sequences)}


def hidden_spec(
    run: RunConfig, context: ParallelContext, *, length: int, sequences: int = 1, normed: bool = False
) -> TensorSpec:
    """This rank's part of the hidden states of ``length`` tokens, on the residual stream or, ``normed``, behind it."""
    mesh, model = context.mesh, run.model
    held = length // mesh.size("cp") // context.sequence_parts
    wide = model.fp32_residual_connection and not normed
    dtype = torch.promote_types(context.dtype, torch.float32) if wide else context.dtype
    return TensorSpec((held, run.training.micro_batch_size * sequences, model.hidden_size), dtype)


def workload_of(
    run: RunConfig, context: ParallelContext, *, sequences: int = 1, has_padding: bool = False, predicted: float = 1.0
) -> Workload:
    """Workload of a microbatch of samples of ``sequences`` sequences; ``Workload`` explains the other arguments."""
    wide = run.model.fp32_residual_connection and context.dtype.itemsize < 4
    return Workload(
        context=context,
        batch=run.training.micro_batch_size * sequences,
        length=run.data.seq_length,
        stream_itemsize=4 if wide else context.dtype.itemsize,
        has_padding=has_padding,
        has_documents=run.data.reset_attention_mask,
        sees_ahead=run.family.sees_ahead(run),
        predicted=predicted,
    )
