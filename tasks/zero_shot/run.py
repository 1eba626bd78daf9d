"""A zero-shot task of ``tasks/main.py``: read the files, load the model, score it."""

from __future__ import annotations

from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.trained_model import load_model
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.zero_shot.task import Asked, likelihoods
from megatron.training.evaluation.zero_shot.tasks import ZERO_SHOT_TASKS
from tasks.result import TaskResult, framed
from tasks.settings import TaskConfig


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Score the model that the settings name. A collective."""
    settings = config.group(TaskConfig)
    asked = Asked(
        files=tuple(map(Path, settings.valid_data)),
        stride=settings.overlapping_eval,
        whole_word=settings.strict_lambada,
        json_key=settings.json_key,
    )
    task = ZERO_SHOT_TASKS[settings.task](asked)
    evaluator = Evaluator(load_model(config, family_of(config.extra).train_spec, context))
    samples = task.samples(evaluator.trained.tokenizer, length=config.data.seq_length)
    scores = task.scores(likelihoods(evaluator, samples, compare=task.compares))
    return TaskResult(
        lines=framed(scores.line), metrics=scores.metrics, data=asked.files, checkpoint=evaluator.trained.folder
    )
