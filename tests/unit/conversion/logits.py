"""What a GPT makes of some tokens, by each side's own code."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.answer import megatron_lm_answer
from megatron.core.conversion.proof import huggingface_answer, native_answer
from megatron.core.conversion.questions import question_for
from megatron.core.models.gpt.questions import CausalQuestion


def fixed_tokens(model: ModelConfig) -> Tensor:
    """What the proof asks."""
    question = question_for(model)
    assert isinstance(question, CausalQuestion)
    return question.tokens


def native_logits(root: Path, tokens: Tensor) -> Tensor:
    """Of our checkpoint."""
    return native_answer(root, CausalQuestion(tokens))["words"]


def huggingface_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Of a Hugging Face folder."""
    return huggingface_answer(folder, CausalQuestion(tokens))["words"]


def megatron_lm_logits(root: Path, tokens: Tensor) -> Tensor:
    """Of a checkpoint of Megatron-LM's."""
    return megatron_lm_answer(root, CausalQuestion(tokens))["words"]
