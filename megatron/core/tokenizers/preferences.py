"""Records of preferences as samples of fine-tuning data: two answers to a prompt, of which one was chosen, or one.

| form | keys |
|---|---|
| prompt and two answers | ``prompt``, ``chosen``, ``rejected``: texts, or lists of messages; ``tools`` beside them |
| two conversations | ``chosen`` and ``rejected`` alone, whose common beginning is the prompt |
| answer rated alone | ``prompt``, ``completion`` and ``label``: whether it is desirable |

An answer as messages may begin with the prompt, which is taken off each by itself. From texts it is taken off where
both begin with it: one alone may be an answer that repeats the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers.messages import normalized_messages
from megatron.core.tokenizers.records import Conversation, Pair, read_sample
from megatron.errors import DataError
from megatron.small_files import shown

_OTHERS = ("tools", "functions", "documents")
_SIDES, _RATED = ("chosen", "rejected"), ("completion", "label")
FIELDS = ("prompt", *_SIDES, *_RATED, *_OTHERS)
"""Keys of records that are read; others may be there."""


@dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer, each behind the same prompt. ``form``: what the record was written in."""

    form: str
    chosen: Conversation | Pair
    rejected: Conversation | Pair


@dataclass(frozen=True)
class RatedAnswer:
    """An answer behind its prompt, and whether it is desirable. ``form``: what the record was written in."""

    form: str
    answer: Conversation | Pair
    is_desirable: bool


def read_preference(record: Mapping[str, Any]) -> Preference | RatedAnswer:
    """The two answers of a record, or the one that is rated alone. Raises DataError for one that lacks a side or the
    label, and for a field that is wrong.
    """
    given = {name: value for name, value in record.items() if value is not None}
    rated = [name for name in _RATED if name in given]
    sides = [name for name in _SIDES if name in given]
    if rated and sides:
        raise DataError(
            f"{sides[0]} is part of a pair and {rated[0]} of an answer that is rated alone: a line has either chosen "
            "and rejected, or completion and label"
        )
    return _rated(given) if rated else _pair(record)


def _rated(record: Mapping[str, Any]) -> RatedAnswer:
    for name in ("prompt", *_RATED):
        if name not in record:
            known = ", ".join(list(record)[:8])
            raise DataError(
                f"{name} is missing: an answer that is rated alone has prompt, completion and label (keys are {known})"
            )
    label = record["label"]
    if not isinstance(label, bool):
        raise DataError(f"label is {shown(label)}; it must be true for a desirable answer or false")
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        prompt, completion = _messages(prompt, "prompt", "user"), _messages(completion, "completion", "assistant")
    found = read_sample({"prompt": prompt, "completion": completion, **_others(record)})
    return RatedAnswer(f"{found.form} with a label", found, label)


def _others(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in _OTHERS if name in record}


def _pair(record: Mapping[str, Any]) -> Preference:
    sides = [_side(record, name) for name in _SIDES]
    prompt, answers, form = _divided(record.get("prompt"), *sides)
    if answers[0] == answers[1]:
        raise DataError("chosen and rejected are the same, so there is nothing to prefer")
    found = []
    for name, answer in zip(_SIDES, answers):
        if not answer:
            raise DataError(f"{name} is empty after the prompt")
        try:
            found.append(read_sample({"prompt": prompt, "completion": answer, **_others(record)}))
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
    return Preference(form, *found)


def _side(record: Mapping[str, Any], name: str) -> str | list[Any]:
    value = record.get(name)
    if value is None:
        known = ", ".join(list(record)[:8]) or "none"
        raise DataError(f"{name} is missing: a pair has chosen and rejected (keys are {known})")
    if not isinstance(value, str | list):
        raise DataError(f"{name} is {shown(value)}; it must be a text or a list of messages")
    if not value or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{name} is empty")
    return value


def _divided(prompt: Any, chosen: str | list[Any], rejected: str | list[Any]) -> tuple[Any, tuple[Any, Any], str]:
    """The prompt, both answers, and the form, in which all three are texts, or all are lists of messages."""
    if not isinstance(prompt, str | list | None):
        raise DataError(f"prompt is {shown(prompt)}; it must be a text or a list of messages")
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if prompt is not None:
            start = len(prompt) if chosen.startswith(prompt) and rejected.startswith(prompt) else 0
            return prompt, (chosen[start:], rejected[start:]), "prompt and two answers"
        end = _common(chosen, rejected)
        return chosen[:end], (chosen[end:], rejected[end:]), "two texts"
    answers = tuple(_messages(each, name, "assistant") for name, each in zip(_SIDES, (chosen, rejected)))
    before = _messages(prompt, "prompt", "user") if prompt else []
    starts = [len(before) if each[: len(before)] == before else 0 for each in answers]
    if before and not all(starts):
        chosen, rejected = (each[start:] for each, start in zip(answers, starts))
        return before, (chosen, rejected), "messages as prompt and two answers"
    differing = (n for n, (a, b) in enumerate(zip(*(each + [None] for each in answers))) if a != b)
    end = next(differing, len(answers[0]))
    return answers[0][:end], (answers[0][end:], answers[1][end:]), "two conversations"


def _messages(value: str | list[Any], name: str, role: str) -> list[Any]:
    """A list of messages; a text is one of ``role``."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    try:
        normalized_messages(value)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return value


def _common(one: str, other: str) -> int:
    """Where two texts begin to differ; a space before that is of the answers, as tokens begin with it."""
    end = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return end - 1 if end and one[end - 1] == " " else end
