"""Which trained model a tool uses."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag
from megatron.config.tokenizer import REFUSED_TOKENIZERS, RENAMED_TOKENIZERS, TokenizerType


@check_flags
@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """Which trained model a tool uses. The checkpoint knows its architecture and tokenizer."""

    load: str = flag("Folder of checkpoints.")
    ckpt_step: int | None = flag("Iteration to load instead of the newest.", default=None, at_least=0)
    tokenizer_type: TokenizerType | None = flag(  # noqa: RUF009
        "Kind of tokenizer, for a checkpoint that keeps none.",
        default=None,
        renamed_values=RENAMED_TOKENIZERS,
        refused_values=REFUSED_TOKENIZERS,
    )
    vocab_extra_ids: int | None = flag(
        "Sentinel tokens of the tokenizer, for a checkpoint that keeps none.",
        default=None,
        at_least=0,
        at_most=1_000_000,
    )
    vocab_file: str | None = flag("Where vocab.json is now, if not where it was in training.", default=None)
    merge_file: str | None = flag("Where merges.txt is now.", default=None)
    tokenizer_model: str | None = flag("Where the tokenizer's model file is now.", default=None)
