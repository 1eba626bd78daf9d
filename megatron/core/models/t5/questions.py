"""What a T5 is asked in a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel, future, padding
from megatron.core.conversion.questions import Answer, real_tokens, tokens_for
from megatron.core.ops.relative_positions import relative_buckets
from megatron.core.transformer.output_layer import VocabularyOutput

_LENGTH = 160  # reaches, in the decoder too, the distance from which on relative positions are all the same


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

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """Logits of every position of the decoder over the padded vocabulary, by Megatron-LM's formulas."""
        seen, x = padding(self.real), model.embedded(self.tokens)
        encoder_hidden_states = model.run("encoder", x, seen + _relative("encoder", x.shape[1], model))
        x = model.embedded(self.decoder_tokens)
        bias = future(x.shape[1]) + _relative("decoder", x.shape[1], model)
        return {
            "words": model.words(model.run("decoder", x, bias, encoder_hidden_states=encoder_hidden_states, seen=seen))
        }

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """Logits of every position of the decoder from our model; before the last stage, what it hands on."""
        output: VocabularyOutput | dict[str, Tensor] = stage(
            self.tokens, self.decoder_tokens, attention_mask=self.real, **handed
        )
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else output


def _relative(stack: str, length: int, model: MegatronLMModel) -> Tensor:
    """What is added to the scores of a stack for distances, ``[1, heads or 1, length, length]``."""
    table = model.tensor(f"{stack}_relative_pos_emb.relative_attention_bias.weight")
    if table is None:
        return torch.zeros(1, 1, 1, 1)
    places = torch.arange(length)
    most = model.args("relative_attention_max_distance", 128)
    buckets = relative_buckets(places, places, buckets=len(table), max_distance=most, bidirectional=stack == "encoder")
    return table[buckets].permute(2, 0, 1).unsqueeze(0)


def question_for(model: ModelConfig, groups: Sequence[object]) -> DecoderQuestion:
    """The question for this model: fixed tokens, of which some of the encoder's are padding."""
    tokens = tokens_for(model, _LENGTH)
    length = tokens.shape[1]
    return DecoderQuestion(tokens, tokens.flip(0, 1)[:, : length * 7 // 8], real_tokens(length))
