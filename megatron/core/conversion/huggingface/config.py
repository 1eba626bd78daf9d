"""``config.json`` of a Hugging Face model and our architecture, each from the other; what one can't say is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.format import format_for, format_of, model_types
from megatron.core.conversion.huggingface.known import Json
from megatron.errors import CheckpointError


def model_from_config(config: Json, *, where: str) -> ModelConfig:
    """The architecture that a config.json describes; CheckpointError for a type or a setting that isn't here.

    ``where``: the file, for messages.
    """
    model_type = str(config.get("model_type"))
    known_format = format_of(model_type)
    if known_format is None:
        raise CheckpointError(
            f"{where} describes a model of type {config.get('model_type')!r}; the types that can be converted are "
            f"{', '.join(model_types())}"
        )
    if "quantization_config" in config:
        raise CheckpointError(f"{where} has quantized weights; convert the model in bf16, fp16 or fp32")
    return known_format.model_from_config(known_format.settings(config, where=where), model_type)


def config_from_model(
    model: ModelConfig, groups: Sequence[object] = (), *, dtype: str, source: Json, tokens: Json
) -> dict[str, Any]:
    """The config.json of a model, with what else stood in the one it came from (``source``, or empty).

    ``groups``: settings of its family alone. ``tokens``: ids of special tokens, where the source has none. Raises
    CheckpointError for an architecture that no published model has.
    """
    described = format_for(groups).config_from_model(model, groups, source)
    kept = dict(source) if source.get("model_type") == described["model_type"] else {}
    for dropped in ("rope_parameters", "rope_scaling", "dtype", "torch_dtype", "transformers_version"):
        kept.pop(dropped, None)
    return {
        **tokens,
        **kept,
        **described,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "vocab_size": model.vocab_size,
        "torch_dtype": dtype,
    }
