"""The published formats of all families: found by model type or by settings, and read and written by them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.config_reader import Json
from megatron.core.conversion.huggingface.format import HuggingFaceFormat
from megatron.core.conversion.huggingface.nearest import unknown_type
from megatron.core.conversion.huggingface.quantized import check_quantization
from megatron.core.models.registry import FAMILIES, Family, all_families, family_of
from megatron.errors import CheckpointError

# Settings of a source that may contradict the written ones.
_NOT_KEPT = (
    *("rope_parameters", "rope_scaling", "original_max_position_embeddings"),
    "time_step_limit",
    *("dtype", "torch_dtype", "transformers_version", "auto_map", "quantization_config"),
)


def format_of(model_type: str) -> HuggingFaceFormat | None:
    """The format of models whose config.json says ``model_type``, if they are known."""
    return next((each for each in _formats() if model_type in each.types), None)


def format_for(groups: Sequence[object]) -> HuggingFaceFormat:
    """The format of the family that the settings in ``groups`` are of; CheckpointError for a family without one."""
    family = family_of(groups)
    if not family.has("huggingface"):
        raise CheckpointError(
            f"a {family.title} has no Hugging Face format: {family.package} has no module huggingface"
        )
    return _format(family)


def _formats() -> Iterator[HuggingFaceFormat]:
    return (found for _, found in formats())


def formats() -> Iterator[tuple[Family, HuggingFaceFormat]]:
    """Every family with a format. Those that are built in come first: others are looked up when none of them is the
    one.
    """
    yield from ((family, _format(family)) for family in FAMILIES.values())
    others = (family for family in all_families() if family.name not in FAMILIES and family.has("huggingface"))
    yield from ((family, _format(family)) for family in others)


def _format(family: Family) -> HuggingFaceFormat:
    found: HuggingFaceFormat = family.module("huggingface").FORMAT
    return found


def as_published(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Settings with a ``model_type``: those of transformers, also for files that a model's authors wrote otherwise."""
    if "model_type" in config:
        return config
    known = (each.of_authors(config, where) for described in _formats() for each in described.types.values())
    return dict(next((found for found in known if found is not None), config))


def model_from_config(config: Json, *, where: str, tensors: Collection[str] = ()) -> ModelConfig:
    """The architecture that a config.json describes; CheckpointError for a type or a setting that isn't available.

    ``where``: the file, for messages. ``tensors``: names of the model's, which tell which type is nearest.
    """
    model_type = str(config.get("model_type"))
    known_format = format_of(model_type)
    if known_format is None:
        raise unknown_type(config, tensors, list(_formats()), where=where)
    check_quantization(config, where=where)
    return known_format.model_from_config(known_format.reader(config, where=where), model_type)


def config_from_model(
    model: ModelConfig, groups: Sequence[object] = (), *, dtype: str, source: Json, tokens: Json
) -> dict[str, Any]:
    """The config.json of a model, with what else stood in the one it came from (``source``, or empty).

    ``groups``: settings of its family alone. ``tokens``: ids of special tokens, where the source has none. Raises
    CheckpointError for an architecture that no published model has.
    """
    described = format_for(groups).config_from_model(model, groups, source)
    padding, wanted = tokens.get("pad_token_id"), described.get("pad_token_id")
    if padding is not None and wanted not in (None, padding):
        raise CheckpointError(
            f"a {described['model_type']} of this architecture has the padding id {wanted}, and the tokenizer's is "
            f"{padding}: positions begin after it, so train with --position-embedding-offset {padding + 1}"
        )
    published = format_for(groups)
    shared = published.types[described["model_type"]].shared_settings
    kept = dict(source) if source.get("model_type") == described["model_type"] else {}
    for dropped in _NOT_KEPT:
        kept.pop(dropped, None)
    return {
        **published.unknown_tokens,
        **tokens,
        **{theirs: getattr(model, ours) for theirs, ours in shared.items()},
        **kept,
        **described,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "vocab_size": model.vocab_size,
        "torch_dtype": dtype,
    }
