"""``config.json`` of Hugging Face's BERTs: a module for each kind of model, with its ``TYPES`` by ``model_type``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.portable import LazyTensor
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.bert.huggingface import bert, modernbert, roberta
from megatron.errors import CheckpointError


class BertFormat(HuggingFaceFormat):
    """The published formats of BERT, RoBERTa and ModernBERT."""

    types: Mapping[str, ModelType] = {**bert.TYPES, **roberta.TYPES, **modernbert.TYPES}

    @override
    def classes(self, model_type: str) -> tuple[str, ...]:
        """Classes with the head for masked tokens; for BERT, the class with both heads comes first."""
        heads = ("PreTraining", "MaskedLM") if model_type in bert.TYPES else ("MaskedLM",)
        return tuple(f"{self.types[model_type].architecture}For{each}" for each in heads)

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """The class with these heads, and the token types; of a ModernBERT the bias of its head."""
        group = BertConfig.among(groups)
        architecture = self.classes(model_type)[0 if group.bert_binary_head else -1]
        if model_type in modernbert.TYPES:
            return {"architectures": [architecture], "classifier_bias": group.head_bias}
        return {"architectures": [architecture], "type_vocab_size": TokenTypesConfig.among(groups).num_tokentypes}

    @override
    def differences(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Heads and token types that the type lacks, and a GELU or a bias that its head has not."""
        group, types, found = BertConfig.among(groups), TokenTypesConfig.among(groups).num_tokentypes, list[str]()
        if MoEConfig.among(groups).has_experts:
            return ["it has experts"]
        exact = group.exact_gelu_head or model.nonlinearity == "gelu"
        if model_type in bert.TYPES:
            if exact and model.activation != "gelu":
                found.append("the GELU is exact in the head only (--exact-gelu-head)")
        else:
            if group.bert_binary_head:
                found.append("there is a head for the order of texts (--bert-no-binary-head is not given)")
            if not exact:
                found.append("the GELU of the head is not exact (--exact-gelu-head is not given)")
        if model_type in modernbert.TYPES:
            return [*found, "there are token types (--num-tokentypes 0 is not given)"] if types else found
        if not group.head_bias:
            found.append("the head for masked tokens has no bias (--bert-no-head-bias)")
        return found if types else [*found, "there are no token types"]

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """BERT's settings: with a head for the order of texts where there are tensors of one."""
        model_type = reader("model_type")
        described = self.types[model_type]
        if not any(name.startswith(described.heads[0]) for name in tensors):
            classes = self.classes(model_type)
            raise CheckpointError(
                f"{where} holds no head for masked tokens ({described.heads[0][:-1]}): convert a "
                f"{' or a '.join(classes)}, which {'has' if len(classes) == 1 else 'have'} this head"
            )
        head = BertConfig(
            bert_binary_head="cls.seq_relationship.weight" in tensors,
            exact_gelu_head=model_type not in bert.TYPES and reader(described.activation) != "gelu",
            head_bias=model_type not in modernbert.TYPES or reader("classifier_bias"),
        )
        types = 0 if model_type in modernbert.TYPES else reader("type_vocab_size")
        return (head, TokenTypesConfig(num_tokentypes=types))

    @override
    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """The bias of an untied output: files of transformers 4 have it where a tied one is, and 5 keeps one there
        that nothing reads.
        """
        for described in self.types.values():
            for name, live in described.copies(model).items():
                if name in tensors:
                    tensors.setdefault(live, tensors.pop(name))
        return model

    @override
    def is_unused(self, name: str, model_type: str, groups: Sequence[object] = ()) -> bool:
        """Whether a tensor isn't read: also the pooler of a model without the head that reads it."""
        return super().is_unused(name, model_type) or name.startswith(f"{self.types[model_type].prefix}pooler.")


FORMAT = BertFormat()
