"""GPT in checkpoints of Megatron-LM."""

from __future__ import annotations

from megatron.core.conversion.megatron_lm.format import MegatronLMFormat
from megatron.core.conversion.megatron_lm.names import OUTPUT, POSITIONS, WORDS, Names, stack


class GPTFormat(MegatronLMFormat):
    """Checkpoints without marker tensors of another family."""

    names = Names(WORDS, POSITIONS, *stack("decoder", "encoder"), OUTPUT)


FORMAT = GPTFormat()
