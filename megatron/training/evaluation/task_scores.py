"""Scores of zero-shot tasks while a model trains, on the training ranks and with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.eval_tasks import EvalTask, eval_tasks_of
from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.inference.scoring import Sample
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import model_in_training
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.zero_shot.task import Asked, ZeroShotTask, likelihoods
from megatron.training.evaluation.zero_shot.tasks import ZERO_SHOT_TASKS
from megatron.training.run.run import Run

FLAG = "--eval-tasks"


@dataclass(frozen=True)
class _Read:
    """A task whose file has been read and cut into samples."""

    named: EvalTask
    task: ZeroShotTask
    samples: Sequence[Sample]


def read_task(named: EvalTask) -> ZeroShotTask:
    """The task with its file read. Raises DataError for one that doesn't fit it."""
    return ZERO_SHOT_TASKS[named.name](Asked(files=(Path(named.file),), flag=FLAG))


class TaskScores:
    """Measures the model on ``--eval-tasks`` every ``--eval-tasks-interval`` iterations and after the last one.

    Files are read once. Constructor and ``write_if_due`` are collectives. Raises ConfigError for a model that continues
    no texts, DataError for a file that doesn't fit its task.
    """

    def __init__(self, run: Run) -> None:
        reporting, self._run, self._read = run.config.reporting, run, list[_Read]()
        self._interval = reporting.eval_tasks_interval or run.config.training.eval_interval
        if not reporting.eval_tasks:
            return
        if not run.train_spec.continues_texts:
            raise ConfigError(
                f"{FLAG} {' '.join(reporting.eval_tasks)}: a {run.train_spec.name} model continues no texts; leave the "
                "flag out"
            )
        self._read = [
            run_on_all(lambda named=named: self._cut(named), run.context.mesh)  # type: ignore[misc]
            for named in eval_tasks_of(reporting.eval_tasks)
        ]
        self._evaluator = Evaluator(model_in_training(run))

    def _cut(self, named: EvalTask) -> _Read:
        task = read_task(named)
        return _Read(named, task, task.samples(self._run.tokenizer, length=self._run.config.data.seq_length))

    def write_if_due(self) -> None:
        """Report scores if the run's iteration is a multiple of the interval, or its last. A collective."""
        run, iteration = self._run, self._run.progress.iteration
        if not self._read or (iteration % self._interval and iteration != run.config.train_iters):
            return
        found, values = list[str](), dict[str, float]()
        with run.reporter.aside("evaluate-tasks"):
            for model in run.models:
                model.eval()
            run.optimizer.gather.make_whole()
            for each in self._read:
                table = likelihoods(self._evaluator, each.samples, compare=each.task.compares, reports=False)
                metrics = each.task.scores(table).metrics
                numbers = {name: float(metrics[name]) for name in each.task.shown}
                values |= {f"{each.named.label} {name}": value for name, value in numbers.items()}
                found.append(f"{each.named.label}: " + ", ".join(f"{n} {v:.6g}" for n, v in numbers.items()))
            for model in run.models:
                model.train()
        run.reporter.numbers(f" tasks at iteration {iteration} | " + " | ".join(found), values, iteration=iteration)
