"""How a model writes conversations and ends its answers: stored with fine-tuning data and in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A chat template and the tokens that end an answer.

    ``template``: Jinja source that writes a conversation as text; None for data without conversations. ``end_tokens``:
    ids that end an answer, beside the tokenizer's own end of a document, in ascending order.
    """

    template: str | None
    end_tokens: tuple[int, ...]
