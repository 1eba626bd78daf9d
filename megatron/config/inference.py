"""Limits of text generation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag


@check_flags
@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Limits of the generation tools; training does not read them."""

    inference_max_seq_length: int = flag(
        "Maximum tokens of a prompt and its generated text together.", default=2560, at_least=1
    )
    inference_max_requests: int = flag("Maximum number of prompts in one batch.", default=8, at_least=1)
