"""RACE, MNLI and QQP: fine-tune a pretrained BERT and score it after each epoch, or score one that was fine-tuned."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.config.run import RunConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.parallel.context import ParallelContext
from megatron.errors import DataError
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.metrics import Evaluation
from megatron.training.run.run import Run
from tasks.fine_tuning.dataset import batches_of_an_epoch
from tasks.fine_tuning.files import LabelledTexts, joined, read_labelled
from tasks.fine_tuning.predictions import Predictions
from tasks.fine_tuning.train_spec import ACCURACY, LOSS, ClassificationSpec, LabelledData
from tasks.result import TaskResult
from tasks.settings import TaskConfig


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Train for ``--epochs`` and score ``--valid-data`` after each; the result is the last one's."""
    started, task = time.monotonic(), config.group(TaskConfig)
    data = read(task)
    config = in_iterations(config, data.train)
    scores = Scores(config.training.eval_interval if task.epochs else None)
    predictions = None if task.predictions_dir is None else Predictions(task, data.valid, context.device)
    train_spec = ClassificationSpec(task.task, data, note=None if predictions is None else predictions.note)
    finished = train_from_start_to_end(config, train_spec, context, started=started, evaluated=scores.report)
    lines = () if predictions is None else predictions.write(context)
    saved = config.checkpoint.save if task.epochs else finished.loaded_from
    files = {text.path: None for texts in data.valid.values() for text in texts.texts}
    return TaskResult(
        lines=lines,  # scores were printed after each epoch
        metrics=scores.metrics,
        data=tuple(files),
        checkpoint=None if saved is None else find_checkpoint(saved, mesh=context.mesh, verify=False),
    )


def read(task: TaskConfig) -> LabelledData:
    """The files of ``--train-data``, if epochs are trained, and of ``--valid-data``; DataError for bad files."""
    train = joined([read_labelled(task.task, path) for path in task.train_data]) if task.epochs else None
    valid: dict[str, LabelledTexts] = {}
    for path in task.valid_data:
        texts = read_labelled(task.task, path, needs_labels=task.predictions_dir is None)
        if texts.name in valid:
            raise DataError(f"--valid-data {valid[texts.name].source} and {path} would both get the name {texts.name}")
        valid[texts.name] = texts
    return LabelledData(train, valid)


def in_iterations(config: RunConfig, train: LabelledTexts | None) -> RunConfig:
    """The run whose length, evaluations and checkpoints are given in iterations instead of epochs."""
    data = replace(config.data, full_validation=True)
    if train is None:
        return replace(config, data=data)
    training, checkpoint = config.training, config.checkpoint
    epoch = batches_of_an_epoch(len(train.texts), training.global_batch_size)
    epochs = config.group(TaskConfig).epochs or 0
    return replace(
        config,
        data=data,
        training=replace(training, train_iters=epochs * epoch, eval_interval=epoch),
        checkpoint=replace(checkpoint, save_interval=checkpoint.save_interval or epoch),
    )


@dataclass
class Scores:
    """Prints scores as Megatron-LM does, and keeps the last ones.

    ``epoch``: iterations of an epoch; None if nothing is trained, which is epoch −1 in the scores.
    """

    epoch: int | None
    metrics: dict[str, float] = field(default_factory=dict)

    def report(self, run: Run, found: Mapping[str, Evaluation]) -> None:
        """Print the accuracy of each set with labels, and of all together."""
        number = -1 if self.epoch is None else run.progress.iteration // self.epoch - 1
        lines, correct, total, loss = [], 0, 0, 0.0
        self.metrics = {}
        for name, evaluation in found.items():
            if not evaluation.totals[ACCURACY][1]:
                continue
            right, count = (round(each) for each in evaluation.totals[ACCURACY])
            lines.append(
                f" > |epoch: {number}| metrics for {name}: {_share(right, count)}, "
                f"elapsed time (sec): {evaluation.seconds:.3f}"
            )
            self.metrics |= {f"{name} correct": right, f"{name} total": count, f"{name} accuracy": right / count}
            correct, total, loss = correct + right, total + count, loss + evaluation.totals[LOSS][0]
        if total:
            lines.append(f" >> |epoch: {number}| overall: {_share(correct, total)}")
            self.metrics |= {"correct": correct, "total": total, "accuracy": correct / total, "loss": loss / total}
            run.reporter.say("\n".join(lines))


def _share(correct: int, total: int) -> str:
    return f"correct / total = {correct} / {total} = {100 * correct / total:.4f} %"
