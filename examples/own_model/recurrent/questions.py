"""What a proof of a conversion asks the model: what follows each token?"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.core.conversion.questions import Question, tokens_for
from megatron.core.models.gpt.questions import CausalQuestion


def question_for(model: ModelConfig, groups: Sequence[object]) -> Question:
    """GPT's question; the other side is transformers with the model that is written for it."""
    import recurrent.transformers_model  # noqa: F401  (transformers then knows the model_type)

    return CausalQuestion(tokens_for(model))
