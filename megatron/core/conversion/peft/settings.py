"""The settings of a PEFT folder: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megatron.errors import CheckpointError
from megatron.small_files import as_kind, read_json

SETTINGS = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MOST_RANK = 65536
_LONGEST_PATTERN = 1000
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

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of what a module's adapter adds."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def names(self, module: str) -> bool:
        """Whether the settings give a module an adapter."""
        if self.excluded and _is_named(module, self.excluded):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or _is_named(module, self.targets)
        if not _is_named(module, self.targets):
            return False
        if self.layers is None:
            return True
        patterns = [re.compile(rf"(?:^|.*?\.){each}\.(?P<number>\d+)\.") for each in self.layers_patterns] or [_LAYER]
        found = next((match for match in (each.match(module) for each in patterns) if match), None)
        return found is not None and int(found["number"]) in self.layers


def _by_pattern(patterns: Mapping[str, float], module: str, usual: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def _is_named(module: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


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
        if not (alpha > 0 and math.isfinite(alpha)):
            raise CheckpointError(f"{where}: {name} is {alpha}; it must be a positive number")
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
    for pattern in _patterns(found):
        _check_pattern(pattern, where)


def _patterns(found: _Kinds) -> Collection[str]:
    texts = [each for each in (found.target_modules, found.exclude_modules) if isinstance(each, str)]
    return [*texts, *_as_list(found.layers_pattern), *(found.rank_pattern or {}), *(found.alpha_pattern or {})]


def _check_pattern(pattern: str, where: str) -> None:
    try:
        if len(pattern) > _LONGEST_PATTERN:
            raise CheckpointError(f"{where}: a pattern has {len(pattern):,} characters; at most {_LONGEST_PATTERN:,}")
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{where}: {pattern[:100]!r} is no regular expression ({error})") from None
