"""The families of models by name. A family is a folder whose modules are imported when they are asked for.

A family is built in, passed by the script that trains it (``register``), or installed: an entry point of
``megatron.families`` names a ``Family`` under the family's name. Names choose among these, so a checkpoint, which
stores a name, never leads to code that isn't installed. Installed ones are looked up when a name isn't built in.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron.config.family import FamilyConfig
from megatron.config.flags import flags_of
from megatron.config.run import RunConfig
from megatron.config.suggestions import did_you_mean
from megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from megatron.core.models.train_spec import TrainSpec

ENTRY_POINTS = "megatron.families"


@dataclass(frozen=True)
class Family:
    """A family of models.

    ``name``: in checkpoints, and in its settings (``FamilyConfig.name``). ``package``: the folder of its modules.
    ``config`` has its ``GROUPS`` of settings, and imports neither torch nor numpy; ``train_spec`` its ``TRAIN_SPEC``.
    """

    name: str
    package: str

    @property
    def groups(self) -> tuple[type, ...]:
        """Settings that no other family has, among them the ``FamilyConfig`` that names the family."""
        found: tuple[type, ...] = self.module("config").GROUPS
        named = [kind.name for kind in _own(found) if kind.name]
        if named != [self.name]:
            raise ConfigError(
                f"{self.package}.config: one class of GROUPS must be a FamilyConfig with name = {self.name!r}, "
                f"as its runs are told by that name; there {'is' if len(named) == 1 else 'are'} "
                f"{' and '.join(map(repr, named)) or 'none'}"
            )
        return found

    @property
    def settings(self) -> type[FamilyConfig]:
        """The group that names the family."""
        return next(_own(self.groups))

    @property
    def title(self) -> str:
        """The family's name in messages and for ``--model-type``."""
        return self.settings.title

    @property
    def train_spec(self) -> TrainSpec:
        """The family's model, data and loss."""
        found: TrainSpec = self.module("train_spec").TRAIN_SPEC
        return found

    def has(self, part: str) -> bool:
        """Whether its folder has a module of this name."""
        return find_spec(f"{self.package}.{part}") is not None

    def module(self, part: str) -> Any:
        """One of the modules in its folder."""
        return import_module(f"{self.package}.{part}")


def _own(groups: Iterable[type]) -> Iterator[type[FamilyConfig]]:
    return (kind for kind in groups if issubclass(kind, FamilyConfig))


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt", "megatron.core.models.gpt"),
        Family("bert", "megatron.core.models.bert"),
        Family("t5", "megatron.core.models.t5"),
        Family("vlm", "megatron.core.models.vlm"),
    )
}
"""The families that are built in."""

_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a script's own family known to this process, as tools need it that are called from a script.

    Raises ConfigError when another family has its name.
    """
    other = FAMILIES.get(family.name) or _REGISTERED.get(family.name)
    if other not in (None, family):
        raise ConfigError(f"the family {family.name} of {family.package} has the name of {other.package}: rename it")
    if other is None:
        _REGISTERED[family.name] = family


def _installed() -> EntryPoints:
    return _entry_points(tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def _entry_points(path: tuple[tuple[str, int | None], ...]) -> EntryPoints:
    """Families of the packages on ``path``, as its folders are since these times: it may hold hundreds of packages."""
    from importlib.metadata import entry_points  # which takes longer to import than --help to answer

    return entry_points(group=ENTRY_POINTS)


def find_family(name: str) -> Family | None:
    """The family of this name, if it is known; ConfigError for one whose package is installed but broken."""
    known = FAMILIES.get(name) or _REGISTERED.get(name)
    if known is not None:
        return known
    for point in _installed().select(name=name):
        try:
            family = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the family {name} is installed as {point.value}, which cannot be imported ({error}): install its "
                "package again, or remove it"
            ) from error
        if not isinstance(family, Family) or family.name != name:
            raise ConfigError(
                f"the entry point {name} of {ENTRY_POINTS} names {point.value}, which is {family!r}: it must be a "
                f"Family called {name!r}"
            )
        return family
    return None


def all_families() -> tuple[Family, ...]:
    """Every family that is built in, registered or installed."""
    names = dict.fromkeys((*FAMILIES, *_REGISTERED, *_installed().names))
    return tuple(family for family in map(find_family, names) if family is not None)


def family_titled(title: str, *, where: str = "--model-type") -> Family:
    """The family that ``--model-type`` calls ``title``, or whose name that is; ConfigError where there is none.

    ``where``: what the user gave ``title`` for, in the message.
    """
    titles = {family.title: family for family in (*FAMILIES.values(), *_REGISTERED.values())}
    found = titles.get(title) or find_family(title)
    if found is None:
        choices = (*titles, *_installed().names)
        raise ConfigError(
            f"{where} cannot be {title!r}{did_you_mean(title, choices)}; choose {', '.join(choices)}, or install "
            "the package of another family"
        )
    return found


def family_named(name: str, *, where: str) -> Family:
    """The family that a checkpoint calls ``name``; CheckpointError for one that isn't known."""
    found = find_family(name)
    if found is not None:
        return found
    body, _, task = name.partition("-")
    if body in FAMILIES and task:
        title, task = FAMILIES[body].title, task.upper()
        raise CheckpointError(
            f"{where} holds a {title} that was fine-tuned on {task}, which only tasks/main.py --task {task} loads"
        )
    raise CheckpointError(
        f"{where} holds a model of the family {name!r}, which is neither built in ({', '.join(FAMILIES)}) nor "
        "installed: install its package, or use the script that trains it"
    )


def family_of(groups: Iterable[object]) -> Family:
    """The family that the groups of a run or a model name; GPT where there are no settings of a family.

    Raises ConfigError for one that isn't known.
    """
    name = next((group.name for group in groups if isinstance(group, FamilyConfig)), "gpt")
    found = find_family(name)
    if found is None:
        raise ConfigError(f"the family {name!r} is not installed: install its package, or register it")
    return found


def with_all_groups(groups: Sequence[object]) -> tuple[object, ...]:
    """All groups of the family that ``groups`` name, in its order: those given, and the defaults of the others.

    Raises ConfigError for a family that isn't known.
    """
    kinds = family_of(groups).groups
    return tuple(next((group for group in groups if isinstance(group, kind)), kind()) for kind in kinds)


def owner_of(spelling: str) -> str | None:
    """Titles and commands of the families that have a flag of this spelling of their own, if there are any.

    Packages of installed families aren't imported for a mistyped flag.
    """
    owners = [
        f"{family.title} (pretrain_{family.name}.py)"
        for family in FAMILIES.values()
        if any(spelling in spec.spellings() for group in family.groups for spec in flags_of(group))
    ]
    return " and ".join(owners) or None


def saved_run(data: Mapping[str, Any], *, name: str, where: str) -> RunConfig:
    """The run of a checkpoint's settings ``data``, with those that only the family called ``name`` has.

    Raises CheckpointError for a family that isn't known, ConfigError as ``RunConfig.from_json``.
    """
    groups = family_named(name, where=where).groups
    return RunConfig.from_json(data, groups=groups, where=f"{where}: the saved settings")
