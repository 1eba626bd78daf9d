"""An architecture of TensorRT-LLM: what its config.json says of a model, and what its code does with every model.

A model is written as the first architecture whose config.json, read back, describes the same model. Families list
theirs in a module ``tensorrt_llm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.family import PartConfig
from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.core.models.registry import all_families, family_of
from megatron.errors import CheckpointError

Settings = Mapping[str, Any]
"""Fields of config.json."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of TensorRT-LLM.

    ``name``: in config.json. ``facts``: settings of ours that all such models have. ``write``: its fields of
    config.json; ``read``, ``groups``: settings of ours, and groups of settings, that fields say.
    ``norms``: the names of a layer's norms, by ours. ``splits_words``: whether ranks divide the word
    embedding.
    """

    name: str
    facts: Mapping[str, Any]
    write: Callable[[ModelConfig, Sequence[object]], dict[str, Any]]
    read: Callable[[Settings], Mapping[str, Any]]
    groups: Callable[[Settings], Sequence[object]] = lambda config: ()
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_layernorm"}
    )
    splits_words: bool = False


_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_size": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "norm_epsilon": "norm_epsilon",
}
_MOST_NAMED = 5
UNREAD = ("apply_layernorm_1p",)
"""Settings that the numbers in the files contain."""


def known_architectures() -> Iterator[Architecture]:
    """The architectures of all families."""
    for family in all_families():
        if family.has("tensorrt_llm"):
            yield from family.module("tensorrt_llm").ARCHITECTURES


def architecture_for(model: ModelConfig, groups: Sequence[object]) -> Architecture:
    """The architecture that a model is written as; CheckpointError names what makes it another than the nearest."""
    family, best = family_of(groups), list[str]()
    nearest = ""
    own: Sequence[Architecture] = family.module("tensorrt_llm").ARCHITECTURES if family.has("tensorrt_llm") else ()
    for each in own:
        wrong = differences(model, groups, each)
        if not wrong:
            return each
        if not nearest or len(wrong) < len(best):
            nearest, best = each.name, wrong
    known = ", ".join(dict.fromkeys(each.name for each in known_architectures()))
    said = "; ".join(best[:_MOST_NAMED]) + (f"; and {len(best) - _MOST_NAMED} more" * (len(best) > _MOST_NAMED))
    found = f"it differs from TensorRT-LLM's {nearest}: {said}" if nearest else f"it is a {family.title}"
    raise CheckpointError(
        f"this model can't be written as a TensorRT-LLM checkpoint, as {found} (written are {known}); TensorRT-LLM "
        "also serves folders of --to hf, without such a checkpoint: trtllm-serve FOLDER"
    )


def differences(model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> list[str]:
    """Settings that reading config.json wouldn't find again."""
    config = fields_of(model, groups, architecture)
    sizes = {ours: config[theirs] for theirs, ours in _SIZES.items()}
    # Ties are no setting there: both tables are in the files.
    tied = {"untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights}
    own: dict[str, Any] = {**sizes, **tied, "group_query_attention": model.group_query_attention}
    if read_groups := architecture.groups(config):
        own["ffn_hidden_size"] = model.ffn_hidden_size  # layers have experts, of a width of their own
    again = ModelConfig(**{**own, **architecture.facts, **architecture.read(config)})
    found = _different(model, again)
    read = {type(group): group for group in read_groups}
    for group in groups:
        if isinstance(group, PartConfig):
            found += _different(group, read.get(type(group), type(group)()))
    return found


def fields_of(model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> dict[str, Any]:
    """What config.json says of a model, without types, ranks and quantization."""
    return {
        "architecture": architecture.name,
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        **architecture.write(model, groups),
    }


def _different(own: object, again: object) -> list[str]:
    return [
        f"{spec.positive} is {mine} and not {theirs}"
        for spec in flags_of(type(own))
        if spec.options.architecture
        and spec.field not in UNREAD
        and not _same(mine := getattr(own, spec.field), theirs := getattr(again, spec.field))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
