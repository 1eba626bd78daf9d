"""The fixed input of a proof. Each family has an input that its models accept."""

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
        """The output of transformers' model."""

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """The output of a model of Megatron-LM, computed from its files."""

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """The output of a stage of our model, by name, given ``handed``, the output of the stage before (empty for the
        first). The last stage's is the answer.
        """


def question_for(model: ModelConfig, groups: Sequence[object] = ()) -> Question:
    """The question for a model, over its whole vocabulary; the same one every time. ``groups`` identify its family."""
    question: Question = family_of(groups).module("questions").question_for(model, groups)
    return question


def tokens_for(model: ModelConfig, longest: int = 48) -> Tensor:
    """Token ids ``[b, s]`` over the whole vocabulary, of at most ``longest`` positions."""
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    length = min(longest, model.max_position_embeddings)
    return (torch.arange(_SAMPLES * length).view(_SAMPLES, length) * 7919 + 13) % model.vocab_size


def real_tokens(length: int) -> Tensor:
    """Mask ``[b, s]`` of tokens that are no padding: the second sample's last quarter is padding."""
    return torch.arange(length) < torch.tensor([[length], [length * 3 // 4]])
