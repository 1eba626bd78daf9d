"""What a model of an unknown type has in common with the known types: its settings and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.tables import matches
from megatron.errors import CheckpointError, MegatronError
from megatron.small_files import shown

if TYPE_CHECKING:
    from megatron.core.conversion.huggingface.format import HuggingFaceFormat

_TABLE_EACH = "its encoder and its decoder have a table of positions each, and here both read one"
_NOT_ATTENTION = "its linear attention is of a kind that is not available here"
_MAMBA_1 = "its state-space layers are Mamba-1, and only Mamba-2 is available here"
_SHARED_BLOCKS = "its attention layers share their weights, with adapters of each use, and also read the embeddings"
_NOT_TEXT = (
    "it reads images or sound, and of such models only llava, llava_next, internvl, paligemma and gemma3 convert"
)
_THREE_AXES = (
    "its positions have three axes, each with a part of every head's channels, and its images any number of patches "
    "whose own positions are rotary; internvl with the same Qwen as language model converts"
)
_OLD_FALCON = (
    "it is a Falcon whose files are from before transformers had that type: download the model anew, whose config.json "
    "says falcon today, with other names of its settings"
)
REASONS = {
    "bart": _TABLE_EACH,
    "mbart": _TABLE_EACH,
    "umt5": "each of its layers has relative positions of its own, and here those of a stack share them",
    "RefinedWeb": _OLD_FALCON,
    "RefinedWebModel": _OLD_FALCON,
    "exaone4": "its norms come after attention and network as in olmo2, but those of queries and keys are of each "
    "head, and layers with full attention may have no positions",
    "albert": "all its layers share their weights",
    "codegen": "its queries, keys and values lie in four slices of one matrix",
    "llama4": "its layers have chunked attention, and only some have positions",
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _MAMBA_1),
    "falcon_h1": "its layers compute attention and Mamba-2 side by side, each with multipliers of its own",
    **dict.fromkeys(("zamba", "zamba2"), _SHARED_BLOCKS),
    **dict.fromkeys(("rwkv", "recurrent_gemma"), "its recurrent layers are neither Mamba-2 nor gated delta nets"),
    "lfm2": "most of its layers are gated convolutions",
    **dict.fromkeys(("minimax", "kimi_linear"), _NOT_ATTENTION),
    **dict.fromkeys(("clip", "siglip", "vit", "whisper", "wav2vec2", "mllama"), _NOT_TEXT),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _THREE_AXES),
}
"""Why models of types that are often asked for don't convert."""

# Sizes with which a model is built for the names of its tensors.
_SIZES = {
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_attention_heads", "num_query_groups"), 4),
    "kv_channels": 16,
    "num_layers": 2,
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Settings of any model, on which its architecture doesn't depend.
_OF_ANY_MODEL = re.compile(
    r"_.*|.*token_ids?|architectures|auto_map|model_type|(torch_)?dtype|transformers_version|use_cache|pretraining_tp|"
    r"output_.*|return_.*|id2label|label2id|initializer_.*|task_specific_params|tokenizer_class|.*dropout.*|"
    r".*pdrop|summary_.*|classifier_.*|is_encoder_decoder|quantization_config|router_.*_coef|.*_ignore_index"
)


@dataclass(frozen=True)
class _Differences:
    """What a model lacks of a type's tensors and settings, and what it has beyond them; layers' numbers are N.

    As text, a part of a sentence about the model.

    ``shared``: how many tensors have the same names.
    """

    model_type: str
    lacks: tuple[str, ...]
    more: tuple[str, ...]
    missing_settings: tuple[str, ...]
    more_settings: tuple[str, ...]
    shared: int

    @property
    def is_another_model(self) -> bool:
        """Whether most tensors have other names, or without any whether needed settings do: then nothing is near."""
        return self.shared < len(self.lacks) if self.shared or self.lacks else bool(self.missing_settings)

    @property
    def distance(self) -> tuple[bool, int, int]:
        """Sort key of types: by tensors, and by settings where equally many differ or most tensors have other names."""
        tensors = 0 if self.is_another_model else len(self.lacks) + len(self.more)
        return self.is_another_model, tensors, len(self.missing_settings) + len(self.more_settings)

    @override
    def __str__(self) -> str:
        said = {
            "lacks the tensors": self.lacks,
            "also has the tensors": self.more,
            "lacks the settings": self.missing_settings,
            "also has the settings": self.more_settings,
        }
        parts = [f"{what} {listed(names, most=4)}" for what, names in said.items() if names]
        judged = "settings and tensors" if self.shared else "settings"
        if parts:
            nearest = f"the nearest type that does, by its {judged}, is {self.model_type}"
            return f"{nearest}, but this model {', '.join(parts)}"
        return f"its {judged} have the names of a {self.model_type}'s, but its own code may compute something else"


def unknown_type(
    config: Mapping[str, Any], tensors: Collection[str], formats: Iterable[HuggingFaceFormat], *, where: str
) -> CheckpointError:
    """The error for a config.json of a type that no format has, which names the nearest type and what differs.

    ``tensors``: names of those in the model's files, or none where there are no files. ``where``: the config.json.
    """
    formats = tuple(formats)
    named = config.get("model_type")
    said = f"{where} describes a model of type {named!r}, which does not convert"
    if named is None:
        said = f"{where} has no model_type, without which it does not convert"
    inner = config.get("text_config")
    if reason := REASONS.get(str(named)):
        said += f": {reason}"
    elif isinstance(inner, dict) and inner.get("model_type"):
        does = any(inner["model_type"] in known.types for known in formats)
        whether = "which converts from a folder of its own" if does else "which doesn't convert, either"
        said += f"; its text model is a {inner['model_type']}, {whether}"
    else:
        found = [_differences(config, tensors, known, name) for known in formats for name in known.types]
        nearest = min((each for each in found if each), key=lambda each: each.distance)
        what = "tensors" if tensors else "settings"
        said += f"; by its {what} no type that does is near it" if nearest.is_another_model else f"; {nearest}"
    if config.get("auto_map"):
        said += "; the code that comes with it (auto_map) is never executed"
    return CheckpointError(f"{said} (tools/checkpoint/convert.py --list prints the types that convert)")


def unread(config: Mapping[str, Any], read: Collection[str], within: str = "") -> list[str]:
    """Settings of ``config`` that say something and are not among those that were ``read``, with their values."""
    found = []
    for name, value in sorted(config.items()):
        if name in read and isinstance(value, dict):
            found += unread(value, read, f"{within}{name}.")
        elif name not in read and value and not _OF_ANY_MODEL.fullmatch(name):
            found.append(f"{within}{name} = {shown(value)}")
    return found


def _differences(
    config: Mapping[str, Any], tensors: Collection[str], known: HuggingFaceFormat, model_type: str
) -> _Differences | None:
    """A model's differences from one type; None where not even a small model of it can be described."""
    described = known.types[model_type]
    held = {_NUMBER.sub("N", name) for name in described.current_names(tensors).values()}
    rows = [(row.theirs,) if isinstance(row.theirs, str) else row.theirs for row in described.table]
    possible = {re.sub(r"\{\w+\}", "N", module) for modules in rows for module in modules}
    exact = _wanted(config, held, known, model_type)
    wanted = exact or _wanted({}, possible, known, model_type)
    if wanted is None:
        return None
    more = [
        name
        for name in sorted(held - wanted)
        if (exact or name.rpartition(".")[0] not in possible)
        and not known.is_unused(name, model_type)
        and name not in described.tied_copies
    ]
    defaults = described.merged("defaults")
    names = {*known.kinds_of(model_type), *described.expected, *described.written, *defaults}
    needed = {name for name in described.settings.values() if name not in {*described.optional, *defaults}}
    return _Differences(
        model_type,
        lacks=tuple(sorted(wanted - held)) if tensors else (),
        more=tuple(more),
        missing_settings=tuple(sorted(needed - config.keys())),
        more_settings=tuple(unread({name: config[name] for name in config.keys() - names}, ())),
        shared=len(held & wanted),
    )


def _wanted(
    config: Mapping[str, Any], held: Collection[str], known: HuggingFaceFormat, model_type: str
) -> set[str] | None:
    """Names of the tensors of a small model of the type with the settings of ``config``; None where the type can't have
    them. ``held``: names of tensors, by which some families tell their heads.
    """
    described = known.types[model_type]
    sizes = {described.settings[ours]: size for ours, size in _SIZES.items() if ours in described.settings}
    layers = config.get(described.settings.get("num_layers", "num_hidden_layers"))
    few = {
        name: 2 if name.endswith("layers") else value[:2] if isinstance(value, list) and len(value) == layers else value
        for name, value in config.items()
        if name not in described.optional
    }
    try:
        settings = known.reader({**few, **sizes, "model_type": model_type}, where="")
        model = known.model_from_config(settings, model_type)
        groups = known.groups_from_config(settings, held, where="")
        found = matches(known.table(model_type, model, groups), model, groups, where="")
    except MegatronError:
        return None
    return {_NUMBER.sub("N", name) for match in found for name in match.theirs}
