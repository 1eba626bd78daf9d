"""Measure a trained model: ``python tasks/main.py --task NAME --load DIR --valid-data …``, or under torchrun."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.lora import LoraConfig
from megatron.config.moe import MoEConfig
from megatron.config.parse import read_given
from megatron.config.run import RunConfig
from megatron.config.typed_spellings import errors_as_typed
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.models.registry import FAMILIES, family_of
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import kept_on_interrupt, run_command
from megatron.training.pretrain import dry_run, parse
from tasks.registry import DEFAULTS, TASKS, Task, family_to_evaluate
from tasks.result import check_predictions_dir, check_result_file
from tasks.settings import FINE_TUNING, OF_IMAGES, ZERO_SHOT, FineTunedBertConfig, TaskConfig

if TYPE_CHECKING:
    from megatron.core.models.train_spec import TrainSpec
    from megatron.training.run.preflight import Findings

PROG = "tasks/main.py"


def main(argv: Sequence[str]) -> int:
    """Check the settings, then run the task; the process's exit code."""
    started = time.monotonic()
    with errors_once_per_node():
        task = TASKS.get(read_given(argv, TaskConfig).value("task"))
        config = settings(argv, task)
        assert task is not None, "without a known task there are no settings"
        own = config.group(TaskConfig)
        if config.command.dry_run:
            dry_run(config, train_spec(config), more=lambda found: check_own_files(own, found))
            return 0
        check_result_file(own.result_file)
        check_predictions_dir(own.predictions_dir)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with kept_on_interrupt(lambda: "no score is written"), errors_as_typed(config):
        measure(config, task, started=started)
    return 0


def settings(argv: Sequence[str], task: Task | None) -> RunConfig:
    """The run that ``argv`` describes; raises ConfigError for an unknown task."""
    groups: tuple[type, ...] = (TaskConfig, *FAMILIES["gpt"].groups)
    defaults, given = DEFAULTS, read_given(argv, TaskConfig)
    if given.value("task") in (*ZERO_SHOT, *OF_IMAGES):
        groups = (TaskConfig, *family_to_evaluate(argv, TaskConfig).groups)
    elif task is not None:
        groups = (TaskConfig, FineTunedBertConfig, TokenTypesConfig, MoEConfig, LoraConfig)
        defaults = DEFAULTS if given.value("epochs") == 0 else task.defaults
    return parse(argv, prog=PROG, about=__doc__ or "", groups=groups, defaults=defaults)


def train_spec(config: RunConfig) -> TrainSpec:
    """The train spec of the model that the task fine-tunes or evaluates."""
    settings = config.group(TaskConfig)
    if settings.task not in FINE_TUNING:
        return family_of(config.extra).train_spec
    from tasks.fine_tuning.train_spec import ClassificationSpec, LabelledData

    return ClassificationSpec(settings.task, LabelledData())


def check_own_files(settings: TaskConfig, found: Findings) -> None:
    """Check the files that only tasks read and write, for a dry run; ``found`` receives lines and errors."""
    found.check(lambda: check_result_file(settings.result_file, make=False))
    found.check(lambda: check_predictions_dir(settings.predictions_dir, make=False))
    if settings.task in FINE_TUNING:
        from tasks.fine_tuning.run import read

        data = found.check(lambda: read(settings))
        if data is not None:
            sets = [*([data.train] if data.train else []), *data.valid.values()]
            found.lines += [f"data: {texts.describe()}" for texts in sets]
        return
    if settings.task in OF_IMAGES:
        from megatron.training.evaluation.image_tasks.tasks import IMAGE_TASKS
        from tasks.images.run import asked_of_images

        task = found.check(lambda: IMAGE_TASKS[settings.task](asked_of_images(settings)))
        if task is not None:
            found.lines += [f"data: {path}, {len(each):,} questions" for path, each in task.sets.items()]
        return
    from megatron.training.evaluation.zero_shot.files import read_documents

    for path in map(Path, settings.valid_data):
        documents = found.check(lambda path=path: list(read_documents(path, key=settings.json_key)))  # type: ignore[misc]
        if documents is not None:
            found.lines.append(f"data: {path}, {len(documents):,} document{'' if len(documents) == 1 else 's'}")


def measure(config: RunConfig, task: Task, *, started: float) -> None:
    """Join the other ranks, run the task, print its result on the last rank and write ``--result-file``."""
    from megatron.core.parallel.launch import parallel_context
    from megatron.training.run.agreement import check_ranks_agree
    from tasks.result import write_result

    precision, seed = config.precision.params_dtype, config.training.seed
    with parallel_context(config.parallel, launch_environment(), params_dtype=precision, seed=seed) as context:
        check_ranks_agree(config, context)
        result = task.load()(config, context)
        if context.mesh.world_rank == context.mesh.world_size - 1:
            for line in result.lines:
                print(line, flush=True)
            write_result(result, config, context, seconds=time.monotonic() - started)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
