"""Records of fine-tuning data in the forms that data sets have, as conversations, or as prompts with completions.

| form | keys |
|---|---|
| messages | ``messages``: OpenAI's, as in ``messages.py``; ``tools`` beside them |
| prompt and completion | two texts, or two lists of messages, of which the second is trained on |
| ShareGPT | ``conversations``: ``from`` and ``value`` of each turn; ``system`` and ``tools`` beside them |
| Alpaca | ``instruction``, ``input`` and ``output``; ``system`` and ``history`` beside them |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from megatron.core.tokenizers.messages import by_name, normalized_message, normalized_tools
from megatron.errors import DataError
from megatron.small_files import parse_json, shown

FIELDS = (
    *("messages", "prompt", "completion", "conversations", "instruction", "input", "output"),
    *("system", "history", "tools", "functions", "documents"),
)
"""Keys of records that are read; others may be there."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of ShareGPT's ``from`` that have other names elsewhere; ``function_call`` is a turn of the assistant's."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the form for templates.

    ``form``: what the record was written in, and ``names``: how it calls each message. ``weights``: for each message
    whether it may be trained on; the first ``read`` are a prompt, and are only read.
    """

    form: str
    names: Sequence[str]
    messages: Sequence[dict[str, Any]]
    weights: Sequence[bool]
    read: int = 0
    tools: list[dict[str, Any]] | None = None
    documents: Any = None

    def has_loss(self, number: int) -> bool:
        """Whether this message is trained on, if its role is."""
        return number >= self.read and self.weights[number]

    @property
    def variables(self) -> dict[str, Any]:
        """What templates may use besides the messages."""
        return {"tools": self.tools, "documents": self.documents}


@dataclass(frozen=True)
class Pair:
    """A text, and the one that continues it and is trained on."""

    prompt: str
    completion: str
    form: str = "prompt and completion"


def read_sample(record: Mapping[str, Any]) -> Conversation | Pair:
    """What a record holds, in whichever form. Raises DataError for a record of none, and for a field that is wrong."""
    has = {name for name, value in record.items() if value is not None}
    if "messages" in has:
        return _conversation("messages", by_name("messages", record["messages"]), record)
    if has >= {"prompt", "completion"}:
        return _prompt_and_completion(record)
    if "conversations" in has:
        return _conversation("ShareGPT's conversations", _sharegpt(record), record)
    if has >= {"instruction", "output"}:
        return _conversation("Alpaca's instruction and output", _alpaca(record), record)
    raise DataError(
        'neither "messages", "prompt" and "completion", ShareGPT\'s "conversations" nor Alpaca\'s "instruction" and '
        f'"output" (keys are {", ".join(list(record)[:8]) or "none"})'
    )


def _conversation(form: str, turns: Mapping[str, Any], record: Mapping[str, Any], *, read: int = 0) -> Conversation:
    """A conversation of messages by name, of which the first ``read`` are only read."""
    found = {name: normalized_message(turn, name) for name, turn in turns.items()}
    for name, message in found.items():
        if message["content"] is None and "tool_calls" not in message:
            raise DataError(f"{name} has neither content nor tool_calls")
    weights = [_weight(message.pop("weight", 1), name) for name, message in found.items()]
    tools = normalized_tools(record.get("tools", _functions(record.get("functions"))))
    return Conversation(
        form=form,
        names=[*found],
        messages=[*found.values()],
        weights=weights,
        read=read,
        tools=tools,
        documents=record.get("documents") or None,
    )


def _weight(weight: Any, name: str) -> bool:
    if weight not in (0, 1) or isinstance(weight, bool):
        raise DataError(f"{name}.weight is {shown(weight)}; it must be 1, or 0 for a turn that is not trained on")
    return bool(weight)


def _functions(functions: Any) -> Any:
    """Tools, from the deprecated form of them."""
    if isinstance(functions, list):
        return [{"type": "function", "function": function} for function in functions]
    return functions


def _prompt_and_completion(record: Mapping[str, Any]) -> Conversation | Pair:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion)
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list):
            raise DataError(f"{name} is {shown(value)}; both must be texts, or both lists of messages")
    if not completion:
        raise DataError("nothing to learn: completion is an empty list")
    turns = (by_name("prompt", prompt) if prompt else {}) | by_name("completion", completion)
    return _conversation("lists of messages as prompt and completion", turns, record, read=len(prompt))


def _sharegpt(record: Mapping[str, Any]) -> dict[str, Any]:
    turns = by_name("conversations", record["conversations"])
    return {**_system(record), **{name: _sharegpt_turn(turn, name) for name, turn in turns.items()}}


def _sharegpt_turn(turn: Any, name: str) -> Any:
    """A turn as a message; one that is a message already stays."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    role, content = turn["from"], turn.get("value")
    if not isinstance(role, str):
        raise DataError(f"{name}.from is {shown(role)}; it must be a text, such as human or gpt")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if role == "function_call":
        where = f"{name}.value"
        calls = parse_json(content, where=where, error=DataError) if isinstance(content, str) else content
        return {**others, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if not isinstance(content, str):
        raise DataError(f"{name}.value is {shown(content)}; it must be a text")
    return {**others, "role": _SHAREGPT_ROLES.get(role, role), "content": content}


def _alpaca(record: Mapping[str, Any]) -> dict[str, Any]:
    """The question is the instruction and, on the lines after it, its input."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
        raise DataError(f"history is {shown(history)}; it must be a list of pairs of a question and its answer")
    texts = {f"history[{n}][{place}]": each[place] for n, each in enumerate(history) for place in (0, 1)}
    texts |= {"instruction": record["instruction"], "output": record["output"]}
    for name, text in {**texts, "input": record.get("input") or ""}.items():
        if not isinstance(text, str):
            raise DataError(f"{name} is {shown(text)}; it must be a text")
    if given := record.get("input"):
        texts["instruction"] += f"\n{given}"
    turns = zip(texts.items(), cycle(("user", "assistant")))
    return {**_system(record), **{name: {"role": role, "content": text} for (name, text), role in turns}}


def _system(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"system": {"role": "system", "content": record["system"]}} if record.get("system") else {}
