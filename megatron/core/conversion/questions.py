"""What a family's model is asked in a proof, and what it answers, for transformers' model and for ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.config.bert import TOKEN_TYPES, BertConfig
from megatron.config.model import ModelConfig
from megatron.config.t5 import T5Config
from megatron.core.models.bert import BertOutput
from megatron.core.transformer.heads import VocabularyOutput

Answer = Mapping[str, Tensor]
"""Logits by what they are of; those of the vocabulary are called ``words``."""

_SAMPLES, _LENGTH = 2, 48
_LENGTH_OF_T5 = 160  # reaches, in the decoder too, the distance from which on its relative positions are all the same


class Question(Protocol):
    """Fixed input for a family's models."""

    @property
    def auto_class(self) -> str:
        """The class of transformers that finds the model's own."""

    def ask_theirs(self, model: Any) -> Answer:
        """What transformers' model answers."""

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """What a stage of our model makes of what it is ``handed`` by the one before (nothing to the first), by name:
        what the next is handed, or on the last one the answer.
        """


@dataclass(frozen=True)
class CausalQuestion:
    """What follows each token of ``tokens`` ``[b, s]``?"""

    tokens: Tensor
    auto_class = "AutoModelForCausalLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of every position."""
        return {"words": model(self.tokens, use_cache=False).logits}

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """The same."""
        output: VocabularyOutput | Tensor = stage(self.tokens, **handed)
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else {"hidden": output}


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

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """The same."""
        output: BertOutput | Tensor = stage(self.tokens, self.types, padding_mask=self.real, **handed)
        if not isinstance(output, BertOutput):
            return {"hidden": output}
        words = {"words": output.words.logits()[self.real]}
        return words if output.order is None else {**words, "order": output.order}


@dataclass(frozen=True)
class DecoderQuestion:
    """What follows each of ``decoder_tokens`` ``[b, d]`` where the encoder reads ``tokens`` ``[b, s]``?

    ``real``: False for the encoder's padding.
    """

    tokens: Tensor
    decoder_tokens: Tensor
    real: Tensor
    auto_class = "AutoModelForSeq2SeqLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of every position of the decoder."""
        asked = {"input_ids": self.tokens, "attention_mask": self.real.long(), "decoder_input_ids": self.decoder_tokens}
        return {"words": model(**asked, use_cache=False).logits}

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """The same."""
        output: VocabularyOutput | dict[str, Tensor] = stage(
            self.tokens, self.decoder_tokens, padding_mask=self.real, **handed
        )
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else output


def question_for(model: ModelConfig, groups: Sequence[object] = ()) -> Question:
    """The question for a model, over its whole vocabulary; the same one every time. ``groups`` tell its family."""
    for group in groups:
        if isinstance(group, BertConfig):
            tokens = _tokens(model, _LENGTH)
            length = tokens.shape[1]
            types = (torch.arange(length) * TOKEN_TYPES // length).expand(_SAMPLES, length)
            return MaskedQuestion(tokens, types, _real(length), group.bert_binary_head)
        if isinstance(group, T5Config):
            tokens = _tokens(model, _LENGTH_OF_T5)
            length = tokens.shape[1]
            return DecoderQuestion(tokens, tokens.flip(0, 1)[:, : length * 7 // 8], _real(length))
    return CausalQuestion(_tokens(model, _LENGTH))


def _tokens(model: ModelConfig, longest: int) -> Tensor:
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    length = min(longest, model.max_position_embeddings)
    return (torch.arange(_SAMPLES * length).view(_SAMPLES, length) * 7919 + 13) % model.vocab_size


def _real(length: int) -> Tensor:
    """``[b, s]``: the second sample's last quarter is padding."""
    return torch.arange(length) < torch.tensor([[length], [length * 3 // 4]])
