"""The tasks by name. Adding one is adding its name to ``TaskConfig.task``, a row here, and a module with a ``run``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.config.parse import read_given
from megatron.core.models.registry import FAMILIES, Family

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


def family_to_evaluate(argv: Sequence[str], group: type) -> Family:
    """The family of the model that the flags name, a user's own included; GPT where parsing will report them.

    ``group``: the command's settings. Raises CheckpointError for a family that isn't known, or is no causal language
    model.
    """
    given = read_given(argv, group)
    load, pretrained, step = map(given.value, ("load", "pretrained_checkpoint", "ckpt_step"))
    gpt = FAMILIES["gpt"]
    if not load and not pretrained:
        return gpt
    from megatron.core.checkpointing.find import find_checkpoint, is_unused
    from megatron.training.checkpoints.trained_model import usable_family

    named = [(load, step, "--load"), (pretrained, None, "--pretrained-checkpoint")]
    for root, iteration, flag in named:
        if root and not is_unused(root):
            folder = find_checkpoint(root, step=iteration, verify=False, flag=flag)
            return usable_family(folder, {gpt.name: gpt.train_spec})
    return gpt


TASKS: Mapping[str, Task] = {
    "WIKITEXT103": Task("tasks.zero_shot.wikitext"),
    "LAMBADA": Task("tasks.zero_shot.lambada"),
    "LM": Task("tasks.zero_shot.lm"),
    **dict.fromkeys(("RACE", "MNLI", "QQP"), Task("tasks.fine_tuning.run", defaults={"use_checkpoint_args": True})),
}
