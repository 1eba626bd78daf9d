"""The families of models by name. A family is a folder whose modules are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.config.flags import flags_of, group_name
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.models.train_spec import TrainSpec


@dataclass(frozen=True)
class Family:
    """A family of models.

    ``name``: what checkpoints call it; its command is ``pretrain_NAME.py``. ``title``: what people and ``--model-type``
    call it. ``package``: the folder of its modules. ``config`` has its ``GROUPS`` of settings, ``train_spec`` its
    ``TRAIN_SPEC``; neither torch nor numpy is imported for the first.
    """

    name: str
    title: str
    package: str

    @property
    def groups(self) -> tuple[type, ...]:
        """Settings that no other family has."""
        found: tuple[type, ...] = self.module("config").GROUPS
        return found

    @property
    def train_spec(self) -> TrainSpec:
        """Its model, data and loss."""
        found: TrainSpec = self.module("train_spec").TRAIN_SPEC
        return found

    def module(self, part: str) -> Any:
        """One of the modules in its folder."""
        return import_module(f"{self.package}.{part}")


_GPT = Family("gpt", "GPT", "megatron.core.models.gpt")
FAMILIES = {
    family.name: family
    for family in (
        _GPT,
        Family("bert", "BERT", "megatron.core.models.bert"),
        Family("t5", "T5", "megatron.core.models.t5"),
    )
}


def family_named(name: str, *, where: str) -> Family:
    """The family that a checkpoint calls ``name``; CheckpointError for one that this version doesn't know."""
    body, _, task = name.partition("-")
    if body in FAMILIES and task:
        title, task = FAMILIES[body].title, task.upper()
        raise CheckpointError(
            f"{where} holds a {title} that was fine-tuned on {task}, which only tasks/main.py --task {task} loads"
        )
    if name not in FAMILIES:
        raise CheckpointError(f"{where} holds a {name} model; this version knows {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(groups: Iterable[object]) -> Family:
    """The family that the groups of a run are of: the one whose own are among them, else GPT."""
    kinds = {type(group) for group in groups}
    return next((family for family in FAMILIES.values() if family.groups and kinds.issuperset(family.groups)), _GPT)


def owner_of(spelling: str) -> str | None:
    """Titles and commands of the families that have a flag of this spelling of their own, if there are any."""
    owners = [
        f"{family.title} (pretrain_{family.name}.py)"
        for family in FAMILIES.values()
        if any(spelling in spec.spellings() for group in family.groups for spec in flags_of(group))
    ]
    return " and ".join(owners) or None


def saved_run(data: Mapping[str, Any]) -> RunConfig:
    """The run of a checkpoint's settings, with those that only its family has; ConfigError as ``from_json``."""
    groups = (group for family in FAMILIES.values() for group in family.groups if group_name(group) in data)
    return RunConfig.from_json(data, groups=tuple(groups))
