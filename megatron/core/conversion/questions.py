"""What a family's model is asked in a proof, and what it answers, for transformers' model and for ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.config.bert import BertConfig
from megatron.config.model import ModelConfig
from megatron.core.models.bert import TOKEN_TYPES, BertOutput
from megatron.core.transformer.heads import VocabularyOutput

Answer = Mapping[str, Tensor]
"""Logits by what they are of; those of the vocabulary are called ``words``."""

_SAMPLES, _LENGTH = 2, 48


class Question(Protocol):
    """Fixed input for a family's models."""

    @property
    def auto_class(self) -> str:
        """The class of transformers that finds the model's own."""

    def ask_theirs(self, model: Any) -> Answer:
        """What transformers' model answers."""

    def ask_ours(self, stage: nn.Module, hidden: Tensor | None) -> Answer | Tensor:
        """What a stage of our model makes of the one before: hidden states, or on the last one the answer."""


@dataclass(frozen=True)
class CausalQuestion:
    """What follows each token of ``tokens`` ``[b, s]``?"""

    tokens: Tensor
    auto_class = "AutoModelForCausalLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of every position."""
        return {"words": model(self.tokens, use_cache=False).logits}

    def ask_ours(self, stage: nn.Module, hidden: Tensor | None) -> Answer | Tensor:
        """The same."""
        output: VocabularyOutput | Tensor = stage(self.tokens, hidden=hidden)
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else output


@dataclass(frozen=True)
class MaskedQuestion:
    """What stands at each place of ``tokens`` ``[b, s]``, and in which order are its two texts (``types``)?

    ``real``: False for padding, whose answers don't count.
    """

    tokens: Tensor
    types: Tensor
    real: Tensor
    binary_head: bool

    @property
    def auto_class(self) -> str:
        """That with all heads, or without the second."""
        return "AutoModelForPreTraining" if self.binary_head else "AutoModelForMaskedLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of words and of the order."""
        output = model(self.tokens, attention_mask=self.real.long(), token_type_ids=self.types)
        if not self.binary_head:
            return {"words": output.logits[self.real]}
        return {"words": output.prediction_logits[self.real], "order": output.seq_relationship_logits}

    def ask_ours(self, stage: nn.Module, hidden: Tensor | None) -> Answer | Tensor:
        """The same."""
        output: BertOutput | Tensor = stage(self.tokens, self.types, padding_mask=self.real, hidden=hidden)
        if not isinstance(output, BertOutput):
            return output
        words = {"words": output.words.logits()[self.real]}
        return words if output.order is None else {**words, "order": output.order}


def question_for(model: ModelConfig, groups: Sequence[object] = ()) -> Question:
    """The question for a model, over its whole vocabulary; the same one every time. ``groups`` tell its family."""
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    length = min(_LENGTH, model.max_position_embeddings)
    tokens = (torch.arange(_SAMPLES * length).view(_SAMPLES, length) * 7919 + 13) % model.vocab_size
    for group in groups:
        if isinstance(group, BertConfig):
            positions = torch.arange(length)
            types = (positions * TOKEN_TYPES // length).expand(_SAMPLES, length)
            real = positions < torch.tensor([[length], [length * 3 // 4]])
            return MaskedQuestion(tokens, types, real, group.bert_binary_head)
    return CausalQuestion(tokens)
