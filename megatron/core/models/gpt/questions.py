"""What a decoder model is asked in a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel, future
from megatron.core.conversion.questions import Answer, tokens_for
from megatron.core.models.gpt.delta_net_forward import delta_net
from megatron.core.models.gpt.expert_forward import experts
from megatron.core.models.gpt.state_space_forward import state_space
from megatron.core.transformer.output_layer import VocabularyOutput


@dataclass(frozen=True)
class CausalQuestion:
    """What follows each token of ``tokens`` ``[b, s]``?"""

    tokens: Tensor
    auto_class = "AutoModelForCausalLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of every position."""
        return {"words": model(self.tokens, use_cache=False).logits}

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """Logits of every position over the padded vocabulary, by Megatron-LM's formulas."""
        x = model.embedded(self.tokens)
        (stack,) = model.stacks - {"mtp"}
        kinds = {"mixer.": state_space, "self_attention.in_proj.": delta_net}
        mixers = {name: partial(kind, model=model) for name, kind in kinds.items()}
        hidden = model.run(stack, x, future(x.shape[1]), routed=partial(experts, model=model), mixers=mixers)
        return {"words": model.words(hidden)}

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """Logits of every position from our model; before the last stage, its hidden states."""
        output: VocabularyOutput | Tensor = stage(self.tokens, **handed)
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else {"hidden": output}


def question_for(model: ModelConfig, groups: Sequence[object]) -> CausalQuestion:
    """The question for this model, with fixed tokens."""
    return CausalQuestion(tokens_for(model))
