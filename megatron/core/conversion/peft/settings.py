"""The settings of a PEFT folder: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megatron.core.conversion.matching import Pattern, matches_of
from megatron.errors import CheckpointError
from megatron.small_files import as_kind, read_json

SETTINGS = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MOST_RANK = 65536
_LEAST_ALPHA, _MOST_ALPHA = 1e-30, 1e30  # their quotients are still numbers
_READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "bias"),
    *("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "init_lora_weights", "use_dora", "target_parameters"),
)
# These change nothing of what a finished adapter computes: what tensors are says the rest.
_IDLE = (
    *("task_type", "auto_mapping", "revision", "peft_version", "inference_mode", "megatron_config", "megatron_core"),
    *("fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying"),
)
# The first weights of these are taken out of the base's.
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LITERAL = re.compile(r"(?:\w|\\\.)*")  # patterns that match one name
_Matches = Mapping[str, str | None]  # names that a pattern matches, with the number of the layer
_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class _Kinds:
    """Types of the settings that are read."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    base_model_name_or_path: str | None = None
    init_lora_weights: bool | str | None = True
    target_parameters: list[str] | None = None


@dataclass(frozen=True)
class ModuleSettings:
    """What a PEFT folder says about a module: the rank of its adapter, the factor of what that adds, and whether it has
    one at all.
    """

    rank: int
    scale: float
    is_named: bool


@dataclass(frozen=True)
class PeftSettings:
    """What a PEFT folder says about its adapters. ``where``: its file. ``base``: the name of the model beside which it
    was trained.
    """

    where: str
    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    targets: str | Sequence[str] = ()
    excluded: str | Sequence[str] = ()
    layers: Sequence[int] | None = None
    layers_patterns: Sequence[str] = ()
    saved: Sequence[str] = ()
    base: str | None = None

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds, where no pattern says another."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def of_modules(self, modules: Collection[str]) -> dict[str, ModuleSettings]:
        """What the settings say about modules of the base.

        Raises CheckpointError for a pattern that is no regular expression, or takes too long.
        """
        kinds = {
            "ranks": _ends_with(self.rank_pattern),
            "alphas": _ends_with(self.alpha_pattern),
            "excluded": _whole(self.excluded),
            "targets": [] if self.takes_all else _whole(self.targets),
            "layers": [Pattern(each, r"(?:^|.*?\.)", r"\.(?P<number>\d+)\.") for each in self.layers_patterns],
        }
        matches = iter(matches_of([each for kind in kinds.values() for each in kind], modules, where=self.where))
        found = {name: {each.text: next(matches) for each in kind} for name, kind in kinds.items()}
        ranks = _by_pattern(self.rank_pattern, modules, self.rank, found["ranks"])
        alphas = _by_pattern(self.alpha_pattern, modules, self.alpha, found["alphas"])
        named = self._named(modules, found)
        return {
            module: ModuleSettings(
                int(ranks[module]),
                alphas[module] / (math.sqrt(ranks[module]) if self.rank_stabilized else ranks[module]),
                module in named,
            )
            for module in modules
        }

    @property
    def takes_all(self) -> bool:
        """Whether every linear layer has an adapter."""
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    def _named(self, modules: Collection[str], found: Mapping[str, Mapping[str, _Matches]]) -> set[str]:
        """The modules that the settings give an adapter."""
        excluded = _among(modules, self.excluded, found["excluded"]) if self.excluded else set()
        if self.takes_all:
            return {*modules} - excluded
        named = _among(modules, self.targets, found["targets"]) - excluded
        if isinstance(self.targets, str) or self.layers is None:
            return named
        numbers = self._layer_numbers(named, found["layers"].values())
        return {module for module in named if numbers.get(module) in self.layers}

    def _layer_numbers(self, modules: Collection[str], found: Iterable[_Matches]) -> dict[str, int]:
        """The number of each module's layer, as the first of ``layers_patterns`` that matches it finds it."""
        if not self.layers_patterns:
            matches = {module: _LAYER.match(module) for module in modules}
            return {module: int(match["number"]) for module, match in matches.items() if match}
        numbers: dict[str, int] = {}
        for of_pattern in found:
            for module, number in of_pattern.items():
                if number is not None:
                    numbers.setdefault(module, int(number))
        return numbers


def _ends_with(patterns: Iterable[str]) -> list[Pattern]:
    """Patterns of the ends of names; names alone are looked up instead."""
    return [Pattern(each, r"(.*\.)?(", ")$") for each in patterns if not _LITERAL.fullmatch(each)]


def _whole(names: str | Sequence[str]) -> list[Pattern]:
    return [Pattern(names, whole=True)] if isinstance(names, str) and names else []


def _by_pattern(
    patterns: Mapping[str, float], modules: Collection[str], usual: float, found: Mapping[str, _Matches]
) -> dict[str, float]:
    """The value of the first pattern that matches the end of a module's name, for each module."""
    order = {pattern: position for position, pattern in enumerate(patterns)}
    literal = {pattern.replace("\\.", "."): place for pattern, place in order.items() if _LITERAL.fullmatch(pattern)}
    places = {module: [literal[end] for end in ends_of(module) if end in literal] for module in modules}
    for pattern, matches in found.items():
        for module in matches:
            places[module].append(order[pattern])
    values = [*patterns.values()]
    return {module: values[min(places[module])] if places[module] else usual for module in modules}


def _among(modules: Collection[str], names: str | Sequence[str], found: Mapping[str, _Matches]) -> set[str]:
    """The modules that a pattern matches, or that have one of the names or end with it."""
    if isinstance(names, str):
        return {*found.get(names, {})}
    known = {*names}
    return {module for module in modules if not known.isdisjoint(ends_of(module))}


def ends_of(module: str) -> list[str]:
    """The module's name, and what follows each of its dots."""
    parts = module.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def read_settings(folder: Path) -> PeftSettings:
    """The settings of a PEFT folder. Raises CheckpointError for a folder that isn't one, and for a setting under which
    its tensors would mean something else than they do here.
    """
    path = folder / SETTINGS
    where = str(path)
    try:
        body = read_json(path, dict[str, Any], error=CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {SETTINGS}, so it is no PEFT folder: give the folder that save_pretrained of a PEFT "
            "model wrote"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read ({error.strerror})") from None
    if body.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {body.get('peft_type')!r}, and only LORA adapters are read")
    _refuse_unknown(body, where)
    known = {name: value for name, value in body.items() if name in _Kinds.__dataclass_fields__}
    found = cast(_Kinds, as_kind(_with_defaults(known), _Kinds, where=where, error=CheckpointError))
    _check(found, where)
    layers = found.layers_to_transform
    return PeftSettings(
        where=where,
        rank=found.r,
        alpha=found.lora_alpha,
        dropout=found.lora_dropout,
        rank_stabilized=found.use_rslora,
        rank_pattern=found.rank_pattern or {},
        alpha_pattern=found.alpha_pattern or {},
        targets=found.target_modules or (),
        excluded=found.exclude_modules or (),
        layers=[layers] if isinstance(layers, int) else layers or None,
        layers_patterns=_as_list(found.layers_pattern),
        saved=found.modules_to_save or (),
        base=found.base_model_name_or_path,
    )


def _with_defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: spec.default for name, spec in _Kinds.__dataclass_fields__.items()}
    return {**defaults, **known}


def _as_list(given: str | Sequence[str] | None) -> Sequence[str]:
    return [given] if isinstance(given, str) else given or ()


def _refuse_unknown(body: Mapping[str, Any], where: str) -> None:
    if body.get("use_dora"):
        raise CheckpointError(
            f"{where}: use_dora: DoRA adapters are not read; merge them into the base with peft's merge_and_unload, "
            "and take that"
        )
    if body.get("target_parameters"):
        raise CheckpointError(
            f"{where}: target_parameters {body['target_parameters']}: adapters beside stacked parameters are not read; "
            "name modules (target_modules), an expert's as they are in the model's files"
        )
    for name, value in body.items():
        if name not in _READ and name not in _IDLE and value:
            raise CheckpointError(
                f"{where}: {name} is {json.dumps(value)[:100]}, and adapters with this setting are not read; merge "
                "them into the base with peft's merge_and_unload, and take that"
            )


def _check(found: _Kinds, where: str) -> None:
    ranks = {"r": found.r, **{f"rank_pattern {key}": value for key, value in (found.rank_pattern or {}).items()}}
    for name, rank in ranks.items():
        if not 1 <= rank <= _MOST_RANK:
            raise CheckpointError(f"{where}: {name} is {rank}; a rank is 1 to {_MOST_RANK}")
    alphas = {"lora_alpha": found.lora_alpha, **(found.alpha_pattern or {})}
    for name, alpha in alphas.items():
        if not _LEAST_ALPHA <= alpha <= _MOST_ALPHA:
            raise CheckpointError(
                f"{where}: {name} is {alpha}; it must be a positive number from {_LEAST_ALPHA} to {_MOST_ALPHA:g}"
            )
    if not 0 <= found.lora_dropout < 1:
        raise CheckpointError(f"{where}: lora_dropout is {found.lora_dropout}; it must be from 0 to below 1")
    first = str(found.init_lora_weights).lower()
    if first.startswith(_OTHER_BASES):
        raise CheckpointError(
            f"{where}: init_lora_weights is {found.init_lora_weights!r}, so the adapter belongs to a base whose "
            "weights were changed before training: save it again as a plain adapter "
            "(peft's path_initial_model_for_weight_conversion)"
        )
    if found.bias not in ("none", "all", "lora_only"):
        raise CheckpointError(f"{where}: bias is {found.bias!r}; peft has none, all and lora_only")
