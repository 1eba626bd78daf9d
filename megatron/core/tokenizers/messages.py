"""Messages of a conversation in the one form that chat templates are written for.

Clients and data sets write OpenAI's messages in several ways: unused fields as null or an empty list, contents as
parts, arguments of tool calls as JSON text. Templates test whether a field is there, join contents as text, and write
arguments as JSON themselves. So null fields and empty lists are left out, parts are joined, and arguments are parsed.
Nothing else changes: other fields are the template's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import DataError
from megatron.small_files import parse_json, shown

_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Field that holds the text, for each type of a content part."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for what a model thought before its answer; templates read one of them."""


def normalized_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a conversation in the form for templates; the content of an assistant's without any is None.

    ``messages``: a list of objects with a ``role`` and OpenAI's other fields. The deprecated ``function_call`` becomes
    ``tool_calls``, and the role ``function`` of its answer ``tool``. Raises DataError, which names the field.
    """
    return [normalized_message(message, name) for name, message in by_name("messages", messages).items()]


def by_name(name: str, messages: Any) -> dict[str, Any]:
    """The messages of a list, as ``NAME[0]`` and so on. Raises DataError for anything else, and for an empty list."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{name} is {shown(messages)}; it must be a list of one or more messages")
    return {f"{name}[{number}]": message for number, message in enumerate(messages)}


def normalized_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a conversation in the form for templates; None for null and without any.

    ``tools``: a list of functions, or such a list as JSON text. Raises DataError, which names the field.
    """
    if isinstance(tools, str):
        tools = parse_json(tools, where="tools", error=DataError)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise DataError(f"tools is {shown(tools)}; it must be a list of functions")
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def text_of(content: Any, name: str) -> str:
    """A content, a text or a list of parts, as text. Raises DataError for what is neither, or isn't text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{name} is {shown(content)}; it must be a text, or a list of text parts")
    return "".join(_part_text(part, f"{name}[{number}]") for number, part in enumerate(content))


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise DataError(f'{name} is {shown(part)}; it must be a text part, such as {{"type": "text", "text": "Hello"}}')
    if kind not in _TEXT_OF_PART:
        raise DataError(f"{name} is of the type {shown(kind)}; models here read only text")
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        raise DataError(f"{name}.{_TEXT_OF_PART[kind]} is {shown(text)}; it must be a text")
    return text


def normalized_message(message: Any, name: str) -> dict[str, Any]:
    """One of ``normalized_messages``. ``name``: how errors call it."""
    found = _object(message, name)
    role = found.get("role")
    if not isinstance(role, str):
        raise DataError(f"{name}.role is {shown(role)}; it must be a text, such as user or assistant")
    if role == "function":
        found["role"] = "tool"
    if "function_call" in found:
        if "tool_calls" in found:
            raise DataError(f"{name} has both function_call and tool_calls: leave out function_call")
        call = found.pop("function_call")
        found["tool_calls"] = [{"type": "function", "function": _function(call, f"{name}.function_call")}]
    elif "tool_calls" in found:
        calls = found["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(f"{name}.tool_calls is {shown(calls)}; it must be a list")
        found["tool_calls"] = [_call(call, f"{name}.tool_calls[{place}]") for place, call in enumerate(calls)]
    thoughts = [found[key] for key in _REASONING if key in found]
    found = {key: thoughts[0] for key in _REASONING if thoughts} | found
    # A refused answer has its words in a field of their own, beside which the content is null.
    content = found.get("content", found.get("refusal"))
    if content is not None:
        content = text_of(content, f"{name}.content")
    elif message.get("content") == []:
        content = ""
    elif role != "assistant":
        raise DataError(f"{name} of the role {shown(role)} has no content; only an assistant's may lack it")
    return {**found, "content": content}


def _call(call: Any, name: str) -> dict[str, Any]:
    """A tool call. Some data sets leave out the level ``function``."""
    found = _object(call, name)
    if "function" in found:
        return {**found, "function": _function(found["function"], f"{name}.function")}
    if found.get("type", "function") != "function":
        raise DataError(f"{name} is of the type {shown(found['type'])}; templates write calls of functions alone")
    own = {key: found.pop(key) for key in ("name", "arguments") if key in found}
    return {"type": "function", **found, "function": _function(own, name)}


def _function(function: Any, name: str) -> dict[str, Any]:
    """The name and the parsed arguments of a call."""
    found = _object(function, name)
    if not isinstance(found.get("name"), str):
        raise DataError(f"{name}.name is {shown(found.get('name'))}; it must be the name of a function")
    arguments = found.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, where=f"{name}.arguments", error=DataError) if arguments.strip() else None
    if arguments is not None and not isinstance(arguments, dict):
        raise DataError(f"{name}.arguments is {shown(arguments)}; it must be a JSON object")
    return {**found, "arguments": arguments or {}}


def _tool(tool: Any, name: str) -> dict[str, Any]:
    found = _object(tool, name)
    return {key: _object(each, f"{name}.{key}") if key == "function" else each for key, each in found.items()}


def _object(value: Any, name: str) -> dict[str, Any]:
    """A copy of an object without null fields and empty lists."""
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {shown(value)}; it must be an object")
    return {key: each for key, each in value.items() if each is not None and each != []}
