"""A family's published models: ``config.json`` and our architecture, each from the other, and the names of tensors.

A type of models is mostly tables, which are read in both directions. What a table can't say is refused: a field of our
architecture that no table and no code of the family converts must have the value that it has in all these models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron.config.activation import Activation
from megatron.config.flags import flags_of
from megatron.config.model import LAYER_BIASES, ModelConfig
from megatron.config.positions import ROTARY_FIELDS
from megatron.config.rules.positions import rotated_channels
from megatron.core.conversion.bounds import KINDS, Count
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Feature, Json
from megatron.core.conversion.huggingface.parts import PublishedPart
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError

# Fields that every format converts: the ties by ``tie_word_embeddings``, the order of rotary pairs by moving rows.
_BY_ALL = ("untie_embeddings_and_output_weights", "rotary_interleaved")
_BY_ALL_KINDS: dict[str, Any] = {"model_type": str, "vocab_size": Count, "tie_word_embeddings": bool}
USUAL_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
"""Names that most types have: see ``ModelType.settings``."""
# Why a model isn't of a type, by field or by field and the value that the type has.
_REASONS: dict[Any, str] = {
    ("position_embedding_type", "learned_absolute"): "positions are not learned",
    ("position_embedding_type", "rope"): "positions are not rotary",
    ("position_embedding_type", "relative"): "positions are not relative",
    ("position_embedding_offset", 0): "its table of positions has rows before position 0",
    "rotary_percent": "only a part of each head is rotated",
    "no_rope_freq": "some layers have no rotary positions",
    "rotary_base_local": "layers with a window have a rotary base of their own",
    ("normalization", "LayerNorm"): "norms are not LayerNorm",
    ("normalization", "RMSNorm"): "norms are not RMSNorm",
    "apply_layernorm_1p": "norm weights are stored with one subtracted",
    ("apply_residual_connection_post_layernorm", False): "the residuals branch off after the norms",
    ("multi_latent_attention", False): "keys and values are computed from latents",
    ("mtp_num_layers", 0): "it predicts several tokens",
    ("parallel_attention", False): "attention and MLP are computed in parallel",
    ("parallel_attention", True): "attention and MLP are computed one after the other",
    ("parallel_layernorm", False): "attention and MLP, in parallel, have a norm each",
    ("parallel_layernorm", True): "attention and MLP have one norm together",
    ("embedding_norm", False): "the embedding has a norm",
    ("embedding_norm", True): "the embedding has no norm",
    ("first_attention_norm", True): "the first layer's attention has no norm",
    ("first_attention_norm", False): "the first layer's attention has a norm",
    ("add_bias_linear", True): "linear layers have no biases",
    ("add_bias_linear", False): "linear layers have biases",
    **{(each, True): "linear layers have no biases" for each in LAYER_BIASES},
    **{(each, False): "linear layers have biases" for each in LAYER_BIASES},
    ("add_output_layer_bias", False): "the output layer has a bias",
    ("add_output_layer_bias", True): "the output layer has no bias",
    ("activation", "gelu_tanh"): "the MLP is not plain GELU",
    ("activation", "swiglu"): "the MLP is not SwiGLU",
    ("softmax_scale", None): "attention scores have another scale",
    ("softmax_scale", 1.0): "scores are scaled (--softmax-scale 1 is not given)",
    ("qk_layernorm", False): "queries and keys are normalized",
    ("word_embedding_size", None): "word embeddings have another width than hidden states",
    "kv_channels": "heads are not hidden size / heads wide",
    "num_query_groups": "keys and values are shared by heads",
    "untie_embeddings_and_output_weights": "the output weights are not the word embeddings'",
}


@dataclass(frozen=True, kw_only=True)
class ModelType(Feature):
    """Models with one ``model_type`` in config.json.

    For the documentation, ``about`` says which of them convert, and ``example`` is a repository of one.

    ``architecture``: their class in transformers. ``table``: which of their modules are which of ours. ``settings``: by
    field of our architecture, the setting that holds it. ``optional``: settings that may be null, where the field then
    follows from others. ``activation``, ``activations``: the setting, and ours by its values. ``expected``: settings
    whose other values aren't available. ``written``: settings of all these models. ``shared_settings``: settings
    without a field of their own here, and the field whose value they get where the source doesn't say them.
    ``idle``: settings on which what a model computes doesn't depend.
    ``spellings``: settings of which several combinations mean the same model; then the source's are kept.

    What no table can say is in ``features`` that other types have, too, and in the type's own fields as a feature,
    which come after those. ``rows`` of a model replace those of the table. ``groups``: parts with settings of their
    own, such as experts.

    ``as_released``: all tensors under the names that the table has, from those of files that other programs wrote.
    ``prefix``: what names of the bare model begin with inside the model with its heads; ``heads``: beginnings of names
    outside the bare model. ``unused``: ends of names of tensors that no model needs, such as buffers of older versions.
    ``later_rows``: from all rows, and the settings of a model and its groups, those of multi-token prediction.
    ``later_layers``: how many of its layers a model has, from the names of the tensors (and the file, for errors), of a
    type whose settings don't say it.
    ``tied_copies``: tensors that files may hold a second time. ``copies``: tensors that files hold a
    second time, and which. ``aliases``: other names of tensors, and those in files.
    ``other_prefixes``: what those names begin with elsewhere, as in memory.
    ``older_settings``: former names of settings, and today's. ``of_authors``: the settings from those of files that the
    model's authors wrote for themselves (and the name of the file), or None for other settings. ``attention``: the
    implementation of transformers that proofs compare with.
    """

    architecture: str
    table: Sequence[Row]
    settings: Mapping[str, str]
    optional: Collection[str] = ()
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=dict)
    features: Sequence[Feature] = ()
    groups: Sequence[PublishedPart[Any]] = ()
    expected: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    shared_settings: Mapping[str, str] = field(default_factory=dict)
    idle: Collection[str] = ()
    spellings: Collection[str] = ()
    rows: Callable[[ModelConfig], Sequence[Row]] = lambda model: ()
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("lm_head.",)
    unused: tuple[str, ...] = ()
    later_rows: Callable[[Sequence[Row], ModelConfig, Sequence[object]], Sequence[Row]] = lambda rows, model, groups: ()
    later_layers: Callable[[ModelConfig, Collection[str], str], int] = lambda model, tensors, where: (
        model.mtp_num_layers
    )
    tied_copies: tuple[str, ...] = ()
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda model: {}
    aliases: Mapping[str, str] = field(default_factory=dict)
    as_released: Callable[[dict[str, LazyTensor]], dict[str, LazyTensor]] = lambda tensors: tensors
    older_settings: Mapping[str, str] = field(default_factory=dict)
    of_authors: Callable[[Json, str], Json | None] = lambda config, where: None
    attention: str = "eager"
    about: str = ""
    example: str = ""

    @property
    def parts(self) -> tuple[Feature, ...]:
        """The features, and last the type itself, whose values go before theirs."""
        return (*self.features, self)

    def merged(self, name: Literal["fixed", "defaults", "kinds"]) -> dict[str, Any]:
        """A mapping of all parts."""
        return {key: value for each in self.parts for key, value in getattr(each, name).items()}

    def converted(self) -> set[str]:
        """Fields of our architecture that tables and code convert."""
        by_code = {name for each in self.parts for name in each.by_code}
        shared = {"group_query_attention"} if "num_query_groups" in self.settings else set()
        return {*self.settings, *by_code, *shared, *_BY_ALL}

    def current_names(self, names: Iterable[str]) -> dict[str, str]:
        """Each name of a tensor with the one that it has in today's language model: the bare model's lack its prefix,
        and TensorFlow's norms had others.
        """
        names = list(names)
        whole = any(name.startswith(self.prefix) for name in names)
        found = {}
        for name in names:
            today = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            for other in self.other_prefixes:
                today = f"{self.prefix}{today.removeprefix(other)}" if today.startswith(other) else today
            is_whole = whole or today.startswith((self.prefix, *self.heads))
            today = today if is_whole else f"{self.prefix}{today}"
            found[name] = self.aliases.get(today, today)
        return found

    def differences(self, model: ModelConfig) -> list[str]:
        """What ``model`` has that no model of this type has."""
        converted = self.converted()
        fields = {**{name: getattr(model, name) for name in converted}, **self.merged("fixed")}
        if "position_embedding_type" in converted and model.is_rotary:  # whatever scales the frequencies
            fields["position_embedding_type"] = model.position_embedding_type
        if self.activations:
            named = self.activations.values()
            fields["activation"] = model.activation if model.activation in named else next(iter(named))
        usual = ModelConfig(**fields)
        found = []
        for flag in flags_of(ModelConfig):
            name, wanted, own = flag.field, getattr(usual, flag.field), getattr(model, flag.field)
            of_rope = name in ROTARY_FIELDS and not usual.is_rotary
            said_elsewhere = of_rope or name == "group_query_attention"  # num_query_groups says how many
            if flag.options.architecture and own != wanted and not said_elsewhere:
                reason = _REASONS.get((name, wanted)) or _REASONS.get(name)
                found.append(reason or f"{flag.positive} is {own} and not {wanted}")
        refused = [reason for each in self.parts for reason in each.refuse(model)]
        return list(dict.fromkeys([*found, *refused]))


class HuggingFaceFormat:
    """The published models of one family.

    ``types``: by ``model_type``; where several have the same architecture, the first is written. ``unknown_tokens``:
    ids of special tokens where neither a source nor a tokenizer tells them, and transformers' own may not exist.
    """

    types: Mapping[str, ModelType]
    unknown_tokens: Mapping[str, Any] = MappingProxyType({})

    def kinds_of(self, model_type: str) -> dict[str, Any]:
        """Types and bounds of all settings that are read."""
        described = self.types[model_type]
        by_table = {theirs: KINDS[ours] for ours, theirs in described.settings.items()}
        return {**_BY_ALL_KINDS, **by_table, described.activation: str, **described.merged("kinds")}

    def reader(self, config: Json, *, where: str) -> ConfigReader:
        """The settings of a config.json; CheckpointError for one of another type. ``where``: the file."""
        model_type = config["model_type"]
        described = self.types[model_type]
        older = {today: config[name] for name, today in described.older_settings.items() if name in config}
        return ConfigReader({**older, **config}, described.merged("defaults"), where, kinds=self.kinds_of(model_type))

    def model_from_config(self, reader: ConfigReader, model_type: str) -> ModelConfig:
        """The architecture that a config.json describes; CheckpointError for a setting that isn't available."""
        described = self.types[model_type]
        reader.expect(**described.expected)
        untied = not reader.get("tie_word_embeddings", True)
        found = {"untie_embeddings_and_output_weights": untied, **described.merged("fixed")}
        for ours, theirs in described.settings.items():
            if theirs not in described.optional or reader.get(theirs):
                found[ours] = reader(theirs)
        if described.activations:
            found["activation"] = reader.one_of(described.activation, described.activations)
        for each in described.parts:
            found |= each.read(reader)
        heads, groups = found["num_attention_heads"], found.get("num_query_groups")
        if groups and heads % groups:
            names = described.settings
            advice = f"{names['num_attention_heads']} = {heads} is not divisible by it"
            raise reader.refuse(names["num_query_groups"], advice)
        model = ModelConfig(**found, group_query_attention=groups not in (None, heads))
        if wrong := rotated_channels(model):
            raise reader.error(wrong)
        return model

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Type, class and settings of a model that came from the config.json ``source``, or none; CheckpointError for
        an architecture that no published model has.
        """
        lacking = {name: self.lacks(name, model, groups) for name in self.types}
        wrong = {
            name: [*each.differences(model), *lacking[name], *self.differences(name, model, groups)]
            for name, each in self.types.items()
        }
        fitting = [name for name, reasons in wrong.items() if not reasons]
        if not fitting:
            nearest = min(wrong, key=lambda name: (len(lacking[name]), len(wrong[name])))
            raise CheckpointError(
                f"Hugging Face has no {family_of(groups).title} of this architecture. For {nearest}, the nearest type, "
                + "; ".join(wrong[nearest])
            )
        model_type = source["model_type"] if source.get("model_type") in fitting else fitting[0]
        described = self.types[model_type]
        names = [theirs for theirs, ours in described.activations.items() if ours == model.activation]
        if source.get(described.activation) in names:  # of several with one meaning
            names = [source[described.activation]]
        written = {
            "architectures": [described.architecture],
            "model_type": model_type,
            **{theirs: getattr(model, ours) for ours, theirs in described.settings.items()},
            **({described.activation: names[0]} if names else {}),
            **described.written,
            **{theirs: value for each in described.parts for theirs, value in each.write(model).items()},
            **self.settings_of_groups(groups, model_type, model),
        }
        return self._as_in_source(written, source)

    def _as_in_source(self, written: dict[str, Any], source: Json) -> dict[str, Any]:
        """The settings ``written``, with the spellings of ``source`` where these mean the same model."""
        model_type = written["model_type"]
        if source.get("model_type") != model_type:
            return written
        names = self.types[model_type].spellings
        other = {**written, **{name: source[name] for name in names if name in source}}
        if other == written:
            return written
        one, same = (
            self.model_from_config(self.reader(each, where="config.json"), model_type) for each in (written, other)
        )
        return other if one == same else written

    def classes(self, model_type: str) -> tuple[str, ...]:
        """The classes of transformers that hold such models."""
        return (self.types[model_type].architecture,)

    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """The settings that the family's own groups say."""
        return {}

    def lacks(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Whole parts by which the model isn't of the type, a phrase each, whose settings aren't compared."""
        return []

    def differences(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Differences from all published models of the type that lie in the family's own groups."""
        return []

    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """Settings of the family alone, from settings and names of tensors; CheckpointError for a model that
        lacks a part.
        """
        return ()

    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Which of their modules are which of ours. ``groups``: settings of the family alone."""
        described = self.types[model_type]
        return (*described.table, *described.rows(model))

    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """The architecture, completed from the names of the files' tensors; aliases are added to ``tensors``."""
        return model

    def is_unused(self, name: str, model_type: str, groups: Sequence[object] = ()) -> bool:
        """Whether no model of this type, and with these settings of its family's groups, needs the tensor of this
        name.
        """
        described = self.types[model_type]
        return name.endswith(described.unused)

    def groups_of_files(
        self, groups: Sequence[object], files: Mapping[str, AnyPath]
    ) -> tuple[tuple[object, ...], list[str]]:
        """The family's settings with what files beside config.json say, and notes; by default they say nothing."""
        return tuple(groups), []

    def write_files(
        self, groups: Sequence[object], model_type: str, folder: Path, *, tokenizer: Tokenizer | None
    ) -> None:
        """Write more files beside config.json; by default there are none."""

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Ids of special tokens in config.json, beside those of every model."""
        return {}
