"""What a family's model is asked in a proof. Each family has the question that its models can answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.models.registry import family_of

if TYPE_CHECKING:
    from megatron.core.conversion.megatron_lm.forward import MegatronLMModel

Answer = Mapping[str, Tensor]
"""Logits by what they are of; those of the vocabulary are called ``words``."""

_SAMPLES = 2


class Question(Protocol):
    """Fixed input for a family's models."""

    @property
    def auto_class(self) -> str:
        """The class of transformers that finds the model's own."""

    def ask_theirs(self, model: Any) -> Answer:
        """What transformers' model answers."""

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """What a model of Megatron-LM answers, computed from its files."""

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """What a stage of our model makes of what it is ``handed`` by the one before (nothing to the first), by name:
        what the next is handed, or on the last one the answer.
        """


def question_for(model: ModelConfig, groups: Sequence[object] = ()) -> Question:
    """The question for a model, over its whole vocabulary; the same one every time. ``groups`` tell its family."""
    question: Question = family_of(groups).module("questions").question_for(model, groups)
    return question


def tokens_for(model: ModelConfig, longest: int = 48) -> Tensor:
    """``[b, s]``: ids over the whole vocabulary, of at most ``longest`` positions."""
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    length = min(longest, model.max_position_embeddings)
    return (torch.arange(_SAMPLES * length).view(_SAMPLES, length) * 7919 + 13) % model.vocab_size


def real_tokens(length: int) -> Tensor:
    """``[b, s]``: the second sample's last quarter is padding."""
    return torch.arange(length) < torch.tensor([[length], [length * 3 // 4]])
