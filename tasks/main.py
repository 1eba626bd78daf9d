"""Measure a trained model: ``python tasks/main.py --task NAME --load DIR --valid-data …``, or under torchrun."""

from __future__ import annotations

# Started as a script, Python looks for modules beside it; the tasks are imported by name, from the folder above.
import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import logging
import time
from collections.abc import Sequence

from megatron.config.parse import value_given
from megatron.config.run import RunConfig
from megatron.config.task import TaskConfig
from megatron.core.parallel.environment import launch_environment, told_once_a_node
from megatron.errors import run_command
from megatron.training.pretrain import parse
from tasks.registry import DEFAULTS, TASKS, Task
from tasks.result import check_predictions_dir, check_result_file

PROG = "tasks/main.py"


def main(argv: Sequence[str]) -> int:
    """Check the settings, then measure; the process's exit code."""
    started = time.monotonic()
    with told_once_a_node():
        task = TASKS.get(value_given(argv, TaskConfig, "task") or "")
        config = settings(argv, task)
        if not config.command.dry_run:
            check_result_file(config.group(TaskConfig).result_file)
            check_predictions_dir(config.group(TaskConfig).predictions_dir)
    assert task is not None, "without a known task there are no settings"
    if config.command.dry_run:
        from megatron.config.dry_run import dry_run_report
        from megatron.training.pipeline import schedule_facts

        print(dry_run_report(config, schedule=schedule_facts))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    measure(config, task, started=started)
    return 0


def settings(argv: Sequence[str], task: Task | None) -> RunConfig:
    """The run that ``argv`` describes; raises ConfigError for an unknown task."""
    groups, defaults = (task.groups, task.defaults) if task is not None else ((), DEFAULTS)
    if value_given(argv, TaskConfig, "epochs") == 0:
        defaults = DEFAULTS
    return parse(argv, prog=PROG, groups=(TaskConfig, *groups), defaults=defaults)


def measure(config: RunConfig, task: Task, *, started: float) -> None:
    """Join the other ranks, run the task, print its result on the last rank and write it down."""
    from megatron.core.parallel.launch import parallel_context
    from megatron.training.agreement import check_ranks_agree
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
