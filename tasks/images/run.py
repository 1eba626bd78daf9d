"""A task about images of ``tasks/main.py``: read the files, load the model, ask it."""

from __future__ import annotations

from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.files.durable import write_errors
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.trained_model import load_model
from megatron.training.evaluation.image_tasks.tasks import IMAGE_TASKS, AskedOfImages, Measured
from tasks.result import TaskResult, framed
from tasks.settings import TaskConfig


def asked_of_images(settings: TaskConfig) -> AskedOfImages:
    """What the flags ask for."""
    return AskedOfImages(
        files=tuple(map(Path, settings.valid_data)),
        folder=settings.image_folder,
        without_images=settings.without_images,
        tokens=settings.tokens_to_generate,
        template=settings.chat_template,
    )


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Ask the model that the settings name. A collective."""
    settings = config.group(TaskConfig)
    task = IMAGE_TASKS[settings.task](asked_of_images(settings))
    trained = load_model(config, family_of(config.extra).train_spec, context)
    task.prepare(trained)
    measured = task.measure()
    scores = measured.scores
    written = _predictions(settings, measured, context)
    return TaskResult(
        lines=(*measured.by_file, *written, *framed(scores.line)),
        metrics=scores.metrics,
        data=task.asked.files,
        checkpoint=trained.folder,
    )


def _predictions(settings: TaskConfig, measured: Measured, context: ParallelContext) -> list[str]:
    """Write ``NAME.jsonl`` of each file on the last rank, and return a line about each.

    Raises DataError on that rank when a file can't be written.
    """
    lines = list[str]()
    if settings.predictions_dir is None:
        return lines
    for source, said in measured.seen.items():
        path = Path(settings.predictions_dir) / f"{source.name.partition('.')[0]}.jsonl"
        if context.mesh.world_rank == context.mesh.world_size - 1:
            with write_errors(path, remedy="name another --predictions-dir"):
                path.write_text(measured.answers_of(source), encoding="utf-8")
        lines.append(f" > predictions for {source.name}: {len(said.questions)} in {path}")
    return lines
