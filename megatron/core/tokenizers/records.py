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
from typing import Any

from megatron.core.tokenizers.messages import normalized_messages, normalized_tools
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

    ``form``: what the record was written in. ``weights``: for each message whether it may be trained on; the first
    ``read`` are a prompt, and are only read.
    """

    form: str
    messages: Sequence[dict[str, Any]]
    weights: Sequence[bool]
    read: int = 0
    tools: list[dict[str, Any]] | None = None
    documents: Any = None

    def may_learn(self, number: int) -> bool:
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
        return _conversation("messages", record["messages"], record)
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


def _conversation(form: str, messages: Any, record: Mapping[str, Any], *, read: int = 0) -> Conversation:
    """A conversation, of whose messages the first ``read`` are only read."""
    found = normalized_messages(messages)
    for number, message in enumerate(found):
        if message["content"] is None and "tool_calls" not in message:
            raise DataError(f"messages[{number}] has neither content nor tool_calls")
    weights = [_weight(message.pop("weight", 1), number) for number, message in enumerate(found)]
    tools = normalized_tools(record.get("tools", _functions(record.get("functions"))))
    return Conversation(
        form=form, messages=found, weights=weights, read=read, tools=tools, documents=record.get("documents") or None
    )


def _weight(weight: Any, number: int) -> bool:
    if weight not in (0, 1) or isinstance(weight, bool):
        raise DataError(
            f"messages[{number}].weight is {shown(weight)}; it must be 1, or 0 for a turn that is not trained on"
        )
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
    return _conversation("lists of messages as prompt and completion", [*prompt, *completion], record, read=len(prompt))


def _sharegpt(record: Mapping[str, Any]) -> list[Any]:
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise DataError(f"conversations is {shown(turns)}; it must be a list of turns")
    return [*_system(record), *(_sharegpt_turn(turn, f"conversations[{n}]") for n, turn in enumerate(turns))]


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
    return {**others, "role": _SHAREGPT_ROLES.get(role, role), "content": content}


def _alpaca(record: Mapping[str, Any]) -> list[Any]:
    """The question is the instruction and, on the lines after it, its input."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
        raise DataError(f"history is {shown(history)}; it must be a list of pairs of a question and its answer")
    given = record.get("input")
    if not isinstance(record["instruction"], str) or not isinstance(given, (str, type(None))):
        name = "input" if isinstance(record["instruction"], str) else "instruction"
        raise DataError(f"{name} is {shown(record[name])}; it must be a text")
    question = f"{record['instruction']}\n{given}" if given else record["instruction"]
    found = _system(record)
    for asked, answer in [*history, [question, record["output"]]]:
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return found


def _system(record: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []
