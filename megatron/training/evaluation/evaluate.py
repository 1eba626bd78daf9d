"""Loss on validation and test data."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.training.run.run import Run
from megatron.training.step import GlobalLoss, global_loss


def evaluate(run: Run, batches: Iterator[list[Microbatch]]) -> GlobalLoss:
    """The mean losses over ``batches`` of this rank's microbatches, without dropout. A collective."""
    for model in run.models:
        model.eval()
    total: LossSum | None = None
    for microbatches in batches:
        loss = run.runner.step(run.plans.evaluation(len(microbatches)), microbatches)
        if loss is not None:
            total = loss if total is None else total.plus(loss)
    for model in run.models:
        model.train()
    return global_loss(total, run.train_spec.loss_names(run.config), run.context)
