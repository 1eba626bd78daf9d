"""A family's published models: ``config.json`` and our architecture, each from the other, and the names of tensors.

A type of models is mostly tables, which are read in both directions. What a table can't say is refused: a field of our
architecture that no table and no code of the family converts must have the value that it has in all these models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.flags import flags_of
from megatron.config.model import Activation, ModelConfig
from megatron.core.conversion.bounds import KINDS, Count
from megatron.core.conversion.huggingface.known import Json, Known
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.models.registry import FAMILIES, Family, all_families, family_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError

# Fields that every format converts: the ties by ``tie_word_embeddings``, the order of rotary pairs by moving rows.
_BY_ALL = ("untie_embeddings_and_output_weights", "rotary_interleaved")
_BY_ALL_KINDS: dict[str, Any] = {"model_type": str, "vocab_size": Count, "tie_word_embeddings": bool}
# Why a model isn't of a type, by field or by field and the value that the type has.
_REASONS: dict[Any, str] = {
    ("position_embedding_type", "learned_absolute"): "positions are not learned",
    ("position_embedding_type", "rope"): "positions are not rotary",
    ("position_embedding_type", "relative"): "positions are not relative",
    "rotary_percent": "only a part of each head is rotated",
    ("normalization", "LayerNorm"): "norms are not LayerNorm",
    ("normalization", "RMSNorm"): "norms are not RMSNorm",
    "apply_layernorm_1p": "norm weights are stored with one subtracted",
    ("apply_residual_connection_post_layernorm", False): "the residuals branch off after the norms",
    ("add_bias_linear", True): "linear layers have no biases",
    ("add_bias_linear", False): "linear layers have biases",
    ("add_qkv_bias", True): "linear layers have no biases",
    ("add_qkv_bias", False): "linear layers have biases",
    ("activation", "gelu_tanh"): "the MLP is not plain GELU",
    ("activation", "swiglu"): "the MLP is not SwiGLU",
    ("softmax_scale", None): "attention scores have another scale",
    ("softmax_scale", 1.0): "scores are scaled (--softmax-scale 1 is not given)",
    ("qk_layernorm", False): "queries and keys are normalized",
    "kv_channels": "heads are not hidden size / heads wide",
    "num_query_groups": "keys and values are shared by heads",
    "untie_embeddings_and_output_weights": "the output weights are not the word embeddings'",
}


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """Models with one ``model_type`` in config.json.

    ``architecture``: their class in transformers. ``table``: which of their modules are which of ours. ``settings``: by
    field of our architecture, the setting that holds it. ``optional``: settings that may be null, where the field then
    follows from others. ``activation``, ``activations``: the setting, and ours by its values. ``by_code``: fields that
    the format's ``fields`` and ``own_settings`` convert. ``fixed``: values of other fields in all these models, where
    they aren't the default. ``expected``: settings whose other values aren't available. ``written``: settings of all
    these models. ``defaults``: what transformers takes for a missing setting. ``prefix``: what names of the bare model
    begin with inside the model with its heads.
    """

    architecture: str
    table: Sequence[Row]
    settings: Mapping[str, str]
    optional: Collection[str] = ()
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=dict)
    by_code: Collection[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = "model."

    def differences(self, model: ModelConfig) -> list[str]:
        """What ``model`` has that no model of this type has."""
        converted = {*self.settings, *self.by_code, *_BY_ALL} - self.fixed.keys()
        fields = {**{name: getattr(model, name) for name in converted}, **self.fixed}
        if self.activations:
            named = self.activations.values()
            fields["activation"] = model.activation if model.activation in named else next(iter(named))
        usual = ModelConfig(**fields)
        found = []
        for flag in flags_of(ModelConfig):
            name, wanted, own = flag.field, getattr(usual, flag.field), getattr(model, flag.field)
            of_rope = name.startswith(("rotary", "rope", "use_rope")) and usual.position_embedding_type != "rope"
            said_elsewhere = of_rope or name == "group_query_attention"  # num_query_groups says how many
            if flag.options.architecture and own != wanted and not said_elsewhere:
                reason = _REASONS.get((name, wanted)) or _REASONS.get(name)
                found.append(reason or f"{flag.positive} is {own} and not {wanted}")
        return list(dict.fromkeys(found))


class HuggingFaceFormat:
    """The published models of one family.

    ``types``: by ``model_type``; where several have the same architecture, the first is written. ``kinds``: types and
    bounds of the settings that only code reads. ``unused``: ends of names of tensors that no model needs, such as
    buffers of older versions. ``tied_copies``: tensors that files may hold a second time. ``heads``: beginnings of
    names that are outside the bare model.
    """

    types: Mapping[str, ModelType]
    kinds: Mapping[str, Any] = {}
    unused: tuple[str, ...] = ()
    tied_copies: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("lm_head.",)

    def kinds_of(self, model_type: str) -> dict[str, Any]:
        """Types and bounds of all settings that are read."""
        described = self.types[model_type]
        by_table = {theirs: KINDS[ours] for ours, theirs in described.settings.items()}
        return {**_BY_ALL_KINDS, **by_table, described.activation: str, **self.kinds}

    def known(self, config: Json, *, where: str) -> Known:
        """The settings of a config.json; CheckpointError for one of another type. ``where``: the file."""
        model_type = config["model_type"]
        return Known(config, self.types[model_type].defaults, where, kinds=self.kinds_of(model_type))

    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The architecture that a config.json describes; CheckpointError for a setting that isn't available."""
        described = self.types[model_type]
        known.expect(**described.expected)
        found = {"untie_embeddings_and_output_weights": not known.get("tie_word_embeddings", True), **described.fixed}
        for ours, theirs in described.settings.items():
            if theirs not in described.optional or known.get(theirs):
                found[ours] = known(theirs)
        if described.activations:
            found["activation"] = known.one_of(described.activation, described.activations)
        found |= self.fields(known, model_type)
        heads, groups = found["num_attention_heads"], found.get("num_query_groups")
        if groups and heads % groups:
            names = described.settings
            advice = f"{names['num_attention_heads']} = {heads} is not divisible by it"
            raise known.refuse(names["num_query_groups"], advice)
        return ModelConfig(**found, group_query_attention=groups not in (None, heads))

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Type, class and settings of a model that came from the config.json ``source``, or none; CheckpointError for
        an architecture that no published model has.
        """
        wrong = {
            name: [*each.differences(model), *self.differences(model, groups)] for name, each in self.types.items()
        }
        fitting = [name for name, reasons in wrong.items() if not reasons]
        if not fitting:
            raise CheckpointError(self.refusal(wrong, title=family_of(groups).title))
        model_type = source["model_type"] if source.get("model_type") in fitting else fitting[0]
        described = self.types[model_type]
        names = {ours: theirs for theirs, ours in [*described.activations.items()][::-1]}  # the first of several
        return {
            "architectures": [described.architecture],
            "model_type": model_type,
            **{theirs: getattr(model, ours) for ours, theirs in described.settings.items()},
            **({described.activation: names[model.activation]} if names else {}),
            **described.written,
            **self.own_settings(model, groups, model_type),
        }

    def refusal(self, wrong: Mapping[str, list[str]], *, title: str) -> str:
        """A sentence about a model of none of the types. ``wrong``: reasons by type. ``title``: the family's."""
        return f"Hugging Face has no {title} of this architecture: {'; '.join(common_reasons(wrong.values()))}"

    def fields(self, known: Known, model_type: str) -> dict[str, Any]:
        """The fields of our architecture that no table converts."""
        return {}

    def own_settings(self, model: ModelConfig, groups: Sequence[object], model_type: str) -> dict[str, Any]:
        """The settings that no table converts."""
        return {}

    def differences(self, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Differences from all published models of the family that the tables don't cover."""
        return []

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """Settings of the family alone, from settings and names of tensors; CheckpointError for a model that
        lacks a part.
        """
        return ()

    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """Which of their modules are which of ours."""
        return self.types[model_type].table

    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """The architecture, completed from the names of the files' tensors; aliases are added to ``tensors``."""
        return model

    def is_unused(self, name: str) -> bool:
        """Whether no model needs the tensor of this name."""
        return name.endswith(self.unused)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Ids of special tokens in config.json, beside those of every model."""
        return {}


def common_reasons(wrong: Collection[list[str]]) -> list[str]:
    """The reasons that hold for each of several types; all reasons where there is none."""
    everywhere = [reason for reason in next(iter(wrong)) if all(reason in reasons for reasons in wrong)]
    return everywhere or list(dict.fromkeys(reason for reasons in wrong for reason in reasons))


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


def model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is known."""
    return tuple(name for each in _formats() for name in each.types)


def _formats() -> Iterator[HuggingFaceFormat]:
    """Those that are built in come first: others are looked up when none of them is the one."""
    yield from map(_format, FAMILIES.values())
    yield from (_format(each) for each in all_families() if each.name not in FAMILIES and each.has("huggingface"))


def _format(family: Family) -> HuggingFaceFormat:
    found: HuggingFaceFormat = family.module("huggingface").FORMAT
    return found


def model_from_config(config: Json, *, where: str) -> ModelConfig:
    """The architecture that a config.json describes; CheckpointError for a type or a setting that isn't available.

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
    return known_format.model_from_config(known_format.known(config, where=where), model_type)


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
