"""The families of models, the one list of them that settings, checkpoints and tools go by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config.bert import BertConfig
from megatron.config.flags import flags_of
from megatron.config.t5 import T5Config
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """A family of models.

    ``name``: what checkpoints call it; its recipe is ``training.recipes.NAME``, its command ``pretrain_NAME.py``.
    ``title``: what people and ``--model-type`` call it. ``groups``: settings that no other family has.
    """

    name: str
    title: str
    groups: tuple[type, ...] = ()


_GPT = Family("gpt", "GPT")
_OTHERS = (Family("bert", "BERT", (BertConfig,)), Family("t5", "T5", (T5Config,)))
FAMILIES = {family.name: family for family in (_GPT, *_OTHERS)}


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


def owner_of(spelling: str) -> Family | None:
    """The family, if there is one, that has a flag of this spelling of its own."""
    for family in FAMILIES.values():
        if any(spelling in spec.spellings() for group in family.groups for spec in flags_of(group)):
            return family
    return None
