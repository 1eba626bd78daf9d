"""Which trained model a tool uses."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag


@check_flags
@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """Which trained model a tool uses. The checkpoint knows its architecture and tokenizer."""

    load: str = flag("Folder of checkpoints.")
    ckpt_step: int | None = flag("Iteration to load instead of the newest.", default=None, at_least=0)
    vocab_file: str | None = flag("Where vocab.json is now, if not where it was in training.", default=None)
    merge_file: str | None = flag("Where merges.txt is now.", default=None)
    tokenizer_model: str | None = flag("Where the tokenizer's model file is now.", default=None)
