"""The tasks by name. To add one, add its name to ``TaskConfig.task``, a row here, and a module with a ``run``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.config.parse import read_given
from megatron.core.models.registry import FAMILIES, Family
from tasks.settings import OF_IMAGES, ZERO_SHOT

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.config.run import RunConfig
    from megatron.core.parallel.context import ParallelContext
    from tasks.result import TaskResult


DEFAULTS: Mapping[str, Any] = {"use_checkpoint_args": True, "micro_batch_size": 8}
"""Defaults where nothing is trained: the architecture is the checkpoint's, and the batch size changes no result."""


@dataclass(frozen=True)
class Task:
    """A task, whose module is imported when it runs. ``defaults``: by field, in place of those of the flags."""

    module: str
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)

    def load(self) -> Callable[[RunConfig, ParallelContext], TaskResult]:
        """The module's ``run``: load the model that the settings name, measure it, and return the same result on every
        rank. A collective.
        """
        run: Callable[[RunConfig, ParallelContext], TaskResult] = importlib.import_module(self.module).run
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
    **dict.fromkeys(ZERO_SHOT, Task("tasks.zero_shot.run")),
    **dict.fromkeys(OF_IMAGES, Task("tasks.images.run")),
    **dict.fromkeys(("RACE", "MNLI", "QQP"), Task("tasks.fine_tuning.run", defaults={"use_checkpoint_args": True})),
}
