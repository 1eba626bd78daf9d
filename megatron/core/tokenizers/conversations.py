"""Conversations and prompt–completion pairs as tokens, and which of them a model is to learn.

What is learned and what is only read are encoded apart, so every token is wholly the one or the other, and a prompt has
the very tokens it has when the trained model is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError


class Part(NamedTuple):
    """A stretch of text, and whether it is to be learned."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class ChatFormat:
    """How turns are written down; ``{role}`` in ``turn_start`` is who speaks. ``learned``: whose turns count."""

    turn_start: str = "<|im_start|>{role}\n"
    turn_end: str = "<|im_end|>\n"
    learned: str = "assistant"

    def parts(self, record: Mapping[str, Any]) -> list[Part]:
        """Parts of ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"prompt": …, "completion": …}``.

        Raises DataError for a record that is neither, or that has nothing to learn.
        """
        if "messages" in record:
            parts = [part for turn in _turns(record["messages"]) for part in self._turn(*turn)]
        elif "prompt" in record and "completion" in record:
            parts = [
                Part(_text(record["prompt"], "prompt"), False),
                Part(_text(record["completion"], "completion"), True),
            ]
        else:
            raise DataError('neither "messages" nor "prompt" and "completion" (keys are {})'.format(", ".join(record)))
        if not any(part.is_target and part.text for part in parts):
            raise DataError(f"nothing to learn: no turn of the {self.learned}, or an empty completion")
        return [
            Part("".join(part.text for part in group), is_target)
            for is_target, group in groupby(parts, key=lambda part: part.is_target)
        ]

    def _turn(self, role: str, content: str) -> list[Part]:
        """What names the speaker is never learned, what ends a learned turn is."""
        start = self.turn_start.replace("{role}", role)
        return [Part(start, False), Part(content + self.turn_end, role == self.learned)]


def _turns(messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list):
        raise DataError('"messages" is not a list')
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f'message {number} has no "role" and "content"')
        turns.append(
            (_text(message["role"], f"role of message {number}"), _text(message["content"], f"content of {number}"))
        )
    return turns


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is not a string")
    return value


def encode(parts: list[Part], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation with the end of a document, and for each whether it is to be learned.

    The end is learned where what comes before it is. Raises DataError for text that can't be expressed.
    """
    ids, learned = list[int](), list[bool]()
    for part, found in zip(parts, tokenizer.tokenize_batch([part.text for part in parts])):
        ids += found
        learned += [part.is_target] * len(found)
    return [*ids, tokenizer.eod], [*learned, parts[-1].is_target]
