"""Limits of text generation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag


@check_flags
@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Limits of the generation tools; training does not read them."""

    inference_max_seq_length: int = flag("Longest prompt plus generated text, in tokens.", default=2560, at_least=1)
    inference_max_requests: int = flag("Prompts generated for at the same time.", default=8, at_least=1)
