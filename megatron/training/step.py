"""One optimizer step: gradients of the whole global batch, then one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.optimizer.grad_norm import GradientStatistics, nonfinite_gradients
from megatron.core.optimizer.optimizer import UpdateResult
from megatron.core.parallel.collectives import on_host
from megatron.core.parallel.side_losses import update_from_layer_metrics
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.errors import ConfigError
from megatron.training.evaluation.evaluate import look_ahead
from megatron.training.loss_sums import (
    GlobalLoss,
    global_layer_metrics,
    loss_sums,
    loss_weights,
    total_counts,
    waiting_for_device,
)
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.gc import release_memory
from megatron.training.run.run import Run
from megatron.training.run.stop import check_finite, nonfinite_gradient_error


def with_gradient_scales(run: Run, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """This rank's microbatches of a global batch with the factors that scale the gradients of their losses.

    A collective for several losses and for fp16; a single loss of another precision needs no counts beforehand. Raises
    ConfigError for a loss that the train spec doesn't count.
    """
    names, weights = run.loss_names, dict[str, Tensor]()
    if len(names) > 1 or run.config.precision.fp16:
        counts = [run.train_spec.counts(each, run.context) for each in microbatches]
        if lacking := [name for name in names if any(each and name not in each for each in counts)]:
            raise ConfigError(
                f"counts() of the train spec {run.train_spec.name} lacks {', '.join(lacking)}, which its loss_names() "
                "lists: return a count for every name, or remove it from loss_names()"
            )
        totals = total_counts(counts, names, run.context)
        weights = loss_weights(totals) if len(names) > 1 else {}
        if run.config.precision.fp16:
            sizes = run.context.mesh.size("dp") * run.context.mesh.size("cp")
            run.optimizer.expect(totals[names[0]].item() / sizes)
    return [replace(each, backward_scale=run.optimizer.backward_scale, loss_weights=weights) for each in microbatches]


def pass_over(run: Run) -> None:
    """An iteration of ``--iterations-to-skip``: its samples are consumed, and weights and learning rate stay."""
    progress = run.progress
    progress.consumed_samples += run.config.global_batch_size_at(progress.consumed_samples)
    progress.iteration += 1
    for skipped in run.config.training.skipped_iterations:
        if progress.iteration == skipped.start:
            what = f"{skipped.start}" if len(skipped) == 1 else f"{skipped.start} to {skipped.stop - 1}"
            run.reporter.say(f"--iterations-to-skip: the data of {what} are passed over without a step")


@dataclass(frozen=True)
class BatchSums:
    """Sums over a global batch on every rank's device, which computes them while its host goes on.

    ``losses``: as of ``loss_sums``. ``layer_metrics``: what layers report, by name. ``own``: sum and count of the loss
    on this rank alone, [2]; empty on a rank without the last stage.
    """

    losses: Tensor
    layer_metrics: Mapping[str, Tensor]
    own: Tensor


@dataclass(frozen=True)
class StepNumbers:
    """Losses and statistics of the gradients of a global batch, on the host, before anything has changed the weights.

    ``grad_norm``: L2 norm of the mean gradient.
    """

    loss: GlobalLoss
    gradients: GradientStatistics
    grad_norm: float


def forward_backward(run: Run, microbatches: Sequence[Microbatch]) -> BatchSums:
    """Run forward and backward passes over this rank's ``microbatches`` of a global batch, and sum gradients and losses
    over the ranks: gradients in ``run.buffers``, of which a distributed optimizer makes this rank's shards whole. A
    collective.
    """
    timers, plan = run.reporter.timers, run.plans.training(len(microbatches))
    microbatches = look_ahead(run, microbatches)
    run.grad_sync.zero()
    run.optimizer.gather.release()
    with timers("forward-backward", level=1):
        loss_sum = run.runner.step(plan, with_gradient_scales(run, microbatches))
        if run.scaling is not None:
            run.scaling.update()
    with timers("grads-sync", level=1):
        run.grad_sync.finish()
    layer_metrics = global_layer_metrics(loss_sum, run.layer_metric_widths, run.context)
    own = torch.empty(0) if loss_sum is None else torch.stack((loss_sum.sum, loss_sum.count.to(loss_sum.sum.dtype)))
    return BatchSums(loss_sums(loss_sum, run.loss_names, run.context), layer_metrics, own)


def train_step(run: Run, microbatches: Sequence[Microbatch]) -> StepRecord:
    """Take one optimizer step on a global batch, of which this rank has ``microbatches``; advances the run's progress.
    A collective.

    Raises NonFiniteError for a loss or gradient that is not finite, before any weight changes.
    """
    return update_weights(run, forward_backward(run, microbatches))


def read_numbers(run: Run, sums: BatchSums) -> StepNumbers:
    """Wait for the device, and read what ``forward_backward`` has left. A collective."""
    with run.reporter.timers("gradient-norm", level=1):
        gradient_sums = run.optimizer.gradient_sums()
    with waiting_for_device(run.context):  # the only time in a step
        loss_numbers, gradient_numbers, *counts = on_host(sums.losses, gradient_sums, *sums.layer_metrics.values())
    loss = GlobalLoss.of(loss_numbers, run.loss_names, layer_metrics=dict(zip(sums.layer_metrics, counts)))
    gradients = GradientStatistics.of(gradient_numbers)
    return StepNumbers(loss, gradients, gradients.norm / (loss.count * run.optimizer.backward_scale))


def update_weights(run: Run, sums: BatchSums, numbers: StepNumbers | None = None) -> StepRecord:
    """Change the weights by the gradients that ``forward_backward`` has left in the buffers, and advance the run's
    progress. ``numbers``: those of ``read_numbers``, if the caller has read them. A collective. Raises as
    ``train_step`` does.
    """
    numbers = numbers or read_numbers(run, sums)
    progress, settings, timers = run.progress, run.config.training, run.reporter.timers
    assert run.schedule is not None, "a run that only evaluates takes no steps"
    batch_size = run.config.global_batch_size_at(progress.consumed_samples)
    lr = run.schedule.learning_rate(progress.scheduled_samples)
    loss = numbers.loss
    if settings.check_for_nan_in_loss_and_grad:
        check_finite(
            loss.means,
            iteration=progress.iteration + 1,
            consumed_samples=progress.consumed_samples,
            global_batch_size=batch_size,
            learning_rate=lr,
        )
    release_memory(settings, run.context, level=2)
    with timers("optimizer", level=1):
        update = run.optimizer.update(
            count=loss.count,
            lr=lr,
            weight_decay=run.schedule.weight_decay(progress.scheduled_samples),
            decoupled_lr=run.schedule.decoupled_learning_rate(progress.scheduled_samples),
            statistics=numbers.gradients,
        )
    if update.skipped and settings.check_for_nan_in_loss_and_grad:
        raise nonfinite_gradient_error(
            nonfinite_gradients(run.buffers, run.context.mesh),
            iteration=progress.iteration + 1,
            consumed_samples=progress.consumed_samples,
            global_batch_size=batch_size,
        )
    if not update.skipped:
        update_from_layer_metrics(run.updated_from_counts, sums.layer_metrics)
    return _advanced(run, numbers, update, batch_size=batch_size)


def leave_weights(run: Run, numbers: StepNumbers) -> StepRecord:
    """Advance the run's progress past a batch whose gradients are not used. A collective."""
    run.optimizer.leave()
    batch_size = run.config.global_batch_size_at(run.progress.consumed_samples)
    update = UpdateResult(numbers.grad_norm, skipped=True, num_zeros=numbers.gradients.num_zeros)
    return _advanced(run, numbers, update, batch_size=batch_size)


def _advanced(run: Run, numbers: StepNumbers, update: UpdateResult, *, batch_size: int) -> StepRecord:
    progress, schedule, loss = run.progress, run.schedule, numbers.loss
    assert schedule is not None, "a run that only evaluates takes no steps"
    progress.iteration += 1
    progress.consumed_samples += batch_size
    progress.scheduled_samples += 0 if update.skipped else batch_size
    return StepRecord(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        global_batch_size=batch_size,
        losses=loss.means,
        learning_rate=schedule.learning_rate(progress.scheduled_samples),
        decoupled_learning_rate=schedule.decoupled_learning_rate(progress.scheduled_samples),
        loss_scale=run.optimizer.loss_scale,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        params_norm=run.optimizer.parameter_norm() if run.config.reporting.log_params_norm else None,
        skipped=update.skipped,
        layer_metrics=loss.layer_metrics,
    )
