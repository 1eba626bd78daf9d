"""Messages as clients and data sets write them, in the form that chat templates are written for."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from megatron.core.tokenizers.conversations import ChatTemplate
from megatron.core.tokenizers.messages import normalized_messages, normalized_tools
from megatron.errors import DataError
from tests.harness.sentences import expect_error

CHATML = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{% set call = call.function %}{% endif %}
        {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
HERMES = """{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""
LLAMA = """{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + ']' + message['content'] | trim + '<eot>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<eot>' }}
    {%- else %}{{ '[ipython]' + message.content + '<eot>' }}{% endif %}
{%- endfor %}"""
ITEMS = """{%- for m in messages %}<|{{ m.role }}|>
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<key>{{ key }}</key><value>{{ value }}</value>{% endfor %}
</tool_call>{%- else %}{{ m.content }}{% endfor %}{% endfor %}"""
NONE = """{%- for m in messages %}
    {%- if m.role == 'assistant' and m.content is none %}CALLS {{ m.tool_calls[0].function.arguments | tojson }}
    {%- elif m.content is not none %}{{ m.role + ': ' + m.content }}{% endif %}<end>
{%- endfor %}"""
COMPARED = """{% for m in messages %}{% if m['content'] == None %}{{ m.tool_calls | tojson }}{% endif %}
{%- if m['content'] != None %}{{ m['content'] + '|' }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "llama": LLAMA,
    "items": ITEMS,
    "none": NONE,
    "compared": COMPARED,
}

PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1234", "type": "function", "function": {"name": "f", "arguments": {"a": 3, "b": "größe"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1234", "content": "7"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "more"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def as_clients_write(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as OpenAI's client dumps them: every field, arguments as JSON text."""
    found = copy.deepcopy(messages)
    for message in found:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if message["role"] == "assistant":
            message |= {"refusal": None, "audio": None, "function_call": None, "annotations": [], "reasoning": None}
            message.setdefault("tool_calls", None if message["content"] == "seven" else [])
        if message["role"] == "user":
            message |= {"name": None, "content": [{"type": "text", "text": message["content"], "cache_control": {}}]}
    return found


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_write_what_transformers_writes(template: str) -> None:
    """Arguments were JSON text, which templates encoded a second time, or refused; ``tool_calls: null`` hid the text.

    transformers leaves parsing to its callers, so it gets the plain messages.
    """
    reference = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    [expected], _ = reference.render_jinja_template([PLAIN], tools=TOOLS, chat_template=template)
    ours = ChatTemplate(template, tokens={})
    for messages in (PLAIN, as_clients_write(PLAIN)):
        assert ours.prompt(messages, begin_answer=False, variables={"tools": TOOLS}) == expected


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content | trim }}", "{{ 'x' + m.content }}"])
def test_no_content_is_no_word(template: str) -> None:
    """Templates that don't ask whether there is a content wrote "None", or failed."""
    ours = ChatTemplate(f"{{% for m in messages %}}{template}|{{% endfor %}}", tokens={})
    empty: list[dict[str, Any]] = [{"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}]
    for message in empty:
        found = ours.prompt([{"role": "user", "content": "hi"}, message], begin_answer=False, variables={})
        assert found.replace("x", "") == "hi||"


def test_one_form_of_many() -> None:
    """Each entry was refused, or lost a word."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = [
        {"type": "text", "text": "a"},
        "b",
        {"type": "output_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    for written, expected in [
        ({"role": "user", "content": text}, {"role": "user", "content": "abcd"}),
        (
            {"role": "assistant", "content": "x", "reasoning": "y"},
            {"role": "assistant", "reasoning": "y", "reasoning_content": "y", "thinking": "y", "content": "x"},
        ),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "function", "name": "f", "content": "7"}, {"role": "tool", "name": "f", "content": "7"}),
        (
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "refusal": "no", "content": "no"},
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "assistant", "tool_calls": [call], "content": None},
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
            {"role": "assistant", "tool_calls": [call], "content": None},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}, "index": None}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], "content": None},
        ),
    ]:
        before = copy.deepcopy(written)
        [found] = normalized_messages([written])
        assert found == expected
        assert normalized_messages([found]) == [found]
        assert written == before
    assert normalized_tools(None) is normalized_tools([]) is normalized_tools("[]") is None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [None]}}}
    dumped = {"type": "function", "function": {"name": "f", "parameters": {"enum": [None]}, "strict": None}}
    assert normalized_tools([dumped]) == normalized_tools(json.dumps([dumped])) == [tool]


def with_arguments(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


ARGUMENTS = r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"content": "hi"},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "function_call": {}, "tool_calls": [{}]},
        with_arguments("{"),
        with_arguments("[1]"),
        with_arguments('"{}"'),
        with_arguments('{"a":' * 200 + "1" + "}" * 200),
    ],
)
def test_what_is_refused(message: Any) -> None:
    """Each names the message and the field."""
    with expect_error(DataError):
        normalized_messages([message])


@pytest.mark.parametrize("messages", [None, "hi", [], {}])
def test_no_messages(messages: Any) -> None:
    with expect_error(DataError):
        normalized_messages(messages)


def test_tools_of_other_types() -> None:
    for tools, fact in ((5, "tools"), ([5], "tools[0]"), ("{", "tools:1")):
        with expect_error(DataError, fact):
            normalized_tools(tools)
