"""The tasks by name. Adding one is adding its name to ``TaskConfig.task``, a row here, and a module with a ``run``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.config.run import RunConfig
    from megatron.core.parallel.context import ParallelContext
    from tasks.result import TaskResult


DEFAULTS: Mapping[str, Any] = {"use_checkpoint_args": True, "micro_batch_size": 8}
"""Where nothing is trained: the model is the checkpoint's, whatever flags leave open, and any batch gives the same."""


class RunTask(Protocol):
    """What a task does on every rank, beginning with settings and a mesh."""

    def __call__(self, config: RunConfig, context: ParallelContext) -> TaskResult:
        """Load what ``config`` names, measure it, and return the same result on every rank. A collective."""
        ...


@dataclass(frozen=True)
class Task:
    """A task before anything heavy is imported.

    ``module``: whose ``run`` is its :class:`RunTask`. ``groups``: settings beside those of every run and of every task,
    as of a model family. ``defaults``: values by field where flags' own defaults don't suit it.
    """

    module: str
    groups: tuple[type, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)

    def load(self) -> RunTask:
        """Import what runs it."""
        run: RunTask = importlib.import_module(self.module).run
        return run


TASKS: Mapping[str, Task] = {
    "WIKITEXT103": Task("tasks.zero_shot.wikitext"),
    "LAMBADA": Task("tasks.zero_shot.lambada"),
    "LM": Task("tasks.zero_shot.lm"),
    **dict.fromkeys(("RACE", "MNLI", "QQP"), Task("tasks.fine_tuning.run", defaults={"use_checkpoint_args": True})),
}
