"""Objectives: settings of what a run trains for in place of its family's own loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.rules.sentence import changed_flags


class ObjectiveConfig(PartConfig):
    """Base of the settings of an objective. A family lists those that its models may be trained for among its groups.

    With the default of every field the run has no such objective. ``module``: of the code, imported when it is chosen;
    its ``build(family, run)`` makes the ``Objective``.
    """

    is_added: ClassVar[bool] = True
    module: ClassVar[str]

    @property
    def is_chosen(self) -> bool:
        """Whether the run trains for it."""
        return False

    @override
    def rules(self) -> Sequence[Rule]:
        """A run has at most one objective."""
        return (self._is_the_only_one,)

    def _is_the_only_one(self, run: Any) -> str | None:
        first, *others = chosen(run.extra) or (self,)
        if type(self) not in map(type, others):
            return None
        given, other = (next(iter(changed_flags(run, type(each))), type(each).__name__) for each in (self, first))
        return f"{given} and {other} both say what is trained for: leave one of them out"


PARAMETERS = "objective_"
"""How the names of parameters begin that an objective trains beside the model, such as projections of hidden states."""


def name_in_checkpoints(parameter: str) -> str:
    """The name of a parameter's values in checkpoints: ``model.NAME`` for the model's own. Those that an objective
    trains beside the model are not part of it, so other runs and commands don't ask for them.
    """
    return parameter if parameter.startswith(PARAMETERS) else f"model.{parameter}"


def is_of_objective(name: str) -> bool:
    """Whether a name in checkpoints is that of what an objective trains beside the model, or of its master weight."""
    return name.removeprefix("optimizer.fp32_param.").startswith(PARAMETERS)


def chosen(groups: Iterable[object]) -> tuple[ObjectiveConfig, ...]:
    """The objectives that groups of settings choose."""
    return tuple(group for group in groups if isinstance(group, ObjectiveConfig) and group.is_chosen)


def without_objectives(groups: Iterable[object]) -> tuple[object, ...]:
    """Groups of settings of the same model, trained for its family's own loss."""
    return tuple(group for group in groups if not isinstance(group, ObjectiveConfig))
