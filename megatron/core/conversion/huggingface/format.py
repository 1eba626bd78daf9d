"""What a family of models tells about its published models: their settings and the names of their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.known import KINDS, Json, Known
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.models.registry import FAMILIES, Family, all_families, family_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError


class HuggingFaceFormat(ABC):
    """The published models of one family. ``model_type``: one of ``model_types``, as config.json has it.

    ``kinds``: types and bounds of the settings that it reads beside those of several families.
    ``unused``: ends of names of tensors that no model needs, such as buffers of older versions. ``tied_copies``:
    tensors that files may hold a second time. ``heads``: beginnings of names that are outside the bare model.
    """

    model_types: tuple[str, ...]
    kinds: Mapping[str, Any] = {}
    unused: tuple[str, ...] = ()
    tied_copies: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("lm_head.",)

    def settings(self, config: Json, *, where: str) -> Known:
        """What a config.json says; CheckpointError for a setting of another type. ``where``: the file."""
        return Known(config, self.defaults(config["model_type"]), where, kinds={**KINDS, **self.kinds})

    @abstractmethod
    def defaults(self, model_type: str) -> Mapping[str, Any]:
        """What transformers takes for a setting that a config.json leaves out."""

    @abstractmethod
    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The architecture that a config.json describes; CheckpointError for a setting that isn't here."""

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """Settings of the family alone, as settings and names of tensors tell them; CheckpointError for a model that
        lacks a part.
        """
        return ()

    @abstractmethod
    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Type, class and settings of a model that came from the config.json ``source``, or none; CheckpointError for
        an architecture that no published model has.
        """

    @abstractmethod
    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """Which of their tensors are which of ours."""

    def prefix(self, model_type: str) -> str:
        """What names of the bare model begin with inside the model with its heads."""
        return "model."

    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """The architecture with what only the names of the files' tensors tell; aliases are added to ``tensors``."""
        return model

    def is_unused(self, name: str) -> bool:
        """Whether no model needs the tensor of this name."""
        return name.endswith(self.unused)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Ids of special tokens in config.json, beside those of every model."""
        return {}


def format_of(model_type: str) -> HuggingFaceFormat | None:
    """The format of models whose config.json says ``model_type``, if they are known."""
    return next((each for each in _formats() if model_type in each.model_types), None)


def format_for(groups: Sequence[object]) -> HuggingFaceFormat:
    """The format of the family that the settings in ``groups`` are of; CheckpointError for a family without one."""
    family = family_of(groups)
    if not family.has("huggingface"):
        raise CheckpointError(
            f"a {family.title} has no Hugging Face format: {family.package} has no module huggingface"
        )
    return _format(family)


def model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is known."""
    return tuple(name for each in _formats() for name in each.model_types)


def _formats() -> Iterator[HuggingFaceFormat]:
    """Those that are built in come first: others are looked up when none of them is the one."""
    yield from map(_format, FAMILIES.values())
    yield from (_format(each) for each in all_families() if each.name not in FAMILIES and each.has("huggingface"))


def _format(family: Family) -> HuggingFaceFormat:
    found: HuggingFaceFormat = family.module("huggingface").FORMAT
    return found
