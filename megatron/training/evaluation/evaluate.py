"""Loss on data that isn't trained on."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.training.run.run import Run
from megatron.training.step import GlobalLoss, evaluation_step, global_loss


def evaluate(run: Run, batches: Iterator[list[Microbatch]]) -> GlobalLoss:
    """Losses over ``batches`` of this rank's microbatches, dropout off. A collective."""
    for model in run.models:
        model.eval()
    total: LossSum | None = None
    for microbatches in batches:
        loss = evaluation_step(run, microbatches)
        if loss is not None:
            total = loss if total is None else total.plus(loss)
    for model in run.models:
        model.train()
    return global_loss(total, run.train_spec.loss_names(run.config), run.context)
