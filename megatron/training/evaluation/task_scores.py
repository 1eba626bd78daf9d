"""Scores of tasks while a model trains, on the training ranks and with their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron.config.eval_tasks import OF_IMAGES, EvalTask, eval_tasks_of
from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.inference.scoring import Sample
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import PlacedModel, model_in_training
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.image_tasks.tasks import IMAGE_TASKS, AskedOfImages, ImageTask
from megatron.training.evaluation.zero_shot.task import Asked, ZeroShotTask, likelihoods
from megatron.training.evaluation.zero_shot.tasks import ZERO_SHOT_TASKS
from megatron.training.run.run import Run

FLAG = "--eval-tasks"


class _Measure(Protocol):
    """A task whose file has been read, and the model that it measures."""

    @property
    def shown(self) -> Sequence[str]:
        """Metrics that are worth a curve."""

    def metrics(self) -> Mapping[str, float]:
        """The numbers of the model as it is now. A collective."""


def read_task(named: EvalTask) -> ZeroShotTask:
    """The task with its file read. Raises DataError for one that doesn't fit it."""
    return ZERO_SHOT_TASKS[named.name](Asked(files=(Path(named.file),), flag=FLAG))


def check_file(named: EvalTask) -> bool:
    """True for a file that fits its task; raises DataError for another."""
    if named.name in OF_IMAGES:
        _image_task(named)
    else:
        read_task(named)
    return True


@dataclass(frozen=True)
class _OfTexts:
    """A zero-shot task whose file has been cut into samples."""

    task: ZeroShotTask
    samples: Sequence[Sample]
    evaluator: Evaluator[PlacedModel]

    @property
    def shown(self) -> Sequence[str]:
        """Metrics that are worth a curve."""
        return self.task.shown

    def metrics(self) -> Mapping[str, float]:
        """Scores of all samples."""
        table = likelihoods(self.evaluator, self.samples, compare=self.task.compares, reports=False)
        return self.task.scores(table).metrics


@dataclass(frozen=True)
class _OfImages:
    """A task about images."""

    task: ImageTask

    @property
    def shown(self) -> Sequence[str]:
        """Metrics that are worth a curve."""
        return self.task.shown

    def metrics(self) -> Mapping[str, float]:
        """Scores of all questions."""
        return self.task.measure(reports=False).scores.metrics


def _of_texts(named: EvalTask, placed: PlacedModel) -> _OfTexts:
    task = read_task(named)
    samples = task.samples(placed.tokenizer, length=placed.config.data.seq_length)
    return _OfTexts(task, samples, Evaluator(placed))


def _image_task(named: EvalTask) -> ImageTask:
    return IMAGE_TASKS[named.name](AskedOfImages(files=(Path(named.file),), flag=FLAG))


def _of_images(named: EvalTask, placed: PlacedModel) -> _OfImages:
    task = run_on_all(partial(_image_task, named), placed.context.mesh)
    task.prepare(placed)
    return _OfImages(task)


class TaskScores:
    """Measures the model on ``--eval-tasks`` every ``--eval-tasks-interval`` iterations and after the last one.

    Files are read once. Constructor and methods are collectives. Raises ConfigError for a model that continues
    no texts, DataError for a file that doesn't fit its task.
    """

    def __init__(self, run: Run) -> None:
        reporting, self._run, self._read = run.config.reporting, run, dict[str, _Measure]()
        self._interval = reporting.eval_tasks_interval or run.config.training.eval_interval
        if not reporting.eval_tasks:
            return
        tasks = eval_tasks_of(reporting.eval_tasks)
        if not run.train_spec.continues_texts and any(each.name not in OF_IMAGES for each in tasks):
            raise ConfigError(
                f"{FLAG} {' '.join(reporting.eval_tasks)}: a {run.train_spec.name} model continues no texts; leave the "
                "flag out"
            )
        placed = model_in_training(run)
        for named in tasks:
            if named.name in OF_IMAGES:
                self._read[named.label] = _of_images(named, placed)
            else:
                read = partial(_of_texts, named, placed)
                self._read[named.label] = run_on_all(read, run.context.mesh)

    def write_if_due(self) -> None:
        """Report scores if the run's iteration is a multiple of the interval, or its last. A collective."""
        iteration = self._run.progress.iteration
        if iteration % self._interval == 0 or iteration == self._run.config.train_iters:
            self.write()

    def write(self) -> None:
        """Report scores, if there are tasks. A collective."""
        run, iteration = self._run, self._run.progress.iteration
        if not self._read:
            return
        found, values = list[str](), dict[str, float]()
        with run.reporter.aside("evaluate-tasks"), run.evaluating():
            for label, each in self._read.items():
                metrics = each.metrics()
                numbers = {name: float(metrics[name]) for name in each.shown if name in metrics}
                values |= {f"{label} {name}": value for name, value in numbers.items()}
                found.append(f"{label}: " + ", ".join(f"{n} {v:.6g}" for n, v in numbers.items()))
        run.reporter.numbers(f" tasks at iteration {iteration} | " + " | ".join(found), values, iteration=iteration)
