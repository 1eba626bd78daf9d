"""/v1/chat/completions: what the template writes is what the model continues, and no template holds the server up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.sentences import check_sentence
from tests.harness.serving import Reply, Running, ask, served

pytest.importorskip("jinja2", reason="chat templates are written in it")

TEMPLATE = (
    "{% if bos_token is defined %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{{ extra }}"
)
MESSAGES = [{"role": "user", "content": "hello"}]
PATH = "/v1/chat/completions"


def with_template(*, seconds: float = 60.0, **settings: Any) -> Any:
    """A server that has ``TEMPLATE``, and gives a conversation so many seconds."""
    from megatron.serving.templates import Templates

    return served(templates=Templates(TEMPLATE, {"bos_token": "<|endoftext|>"}, seconds=seconds), **settings)


def said(running: Running, **fields: Any) -> Reply:
    """The answer to a conversation."""
    return ask(running.url, PATH, {"messages": MESSAGES, "temperature": 0, "max_tokens": 6, **fields})


def test_a_conversation_is_the_text_that_the_template_writes() -> None:
    """No second beginning of a text, whatever the tokenizer adds; parts of a message are joined."""
    with with_template() as running:
        for fields, text in (
            ({}, "<|endoftext|>user: hello\nassistant: "),
            ({"add_generation_prompt": False}, "<|endoftext|>user: hello\n"),
            ({"messages": [*MESSAGES, {"role": "assistant", "content": "the w"}], "continue_final_message": True},
             "<|endoftext|>user: hello\nassistant: the w"),
            ({"chat_template_kwargs": {"extra": "in"}}, "<|endoftext|>user: hello\nassistant: in"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": word} for word in "ab"]}]},
             "<|endoftext|>user: ab\nassistant: "),
            ({"messages": [*MESSAGES, {"role": "assistant", "content": None}, {"role": "assistant"}]},
             "<|endoftext|>user: hello\nassistant: \nassistant: \nassistant: "),
        ):  # fmt: skip
            answer = said(running, return_token_ids=True, **fields).json
            prompt = answer["choices"][0]["prompt_token_ids"]
            assert ask(running.url, "/detokenize", {"tokens": prompt}).json["prompt"] == text
            same = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
            completed = ask(running.url, "/v1/completions", same).json["choices"][0]["text"]
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": completed, "refusal": None}
        counted = ask(running.url, "/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json
        assert counted["tokens"] == said(running, return_token_ids=True).json["choices"][0]["prompt_token_ids"]
        assert counted["count"] == len(counted["token_strs"])


CALLS = (
    "{% for message in messages %}{{ message.role }}:{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{% else %}{{ message.content }}"
    "{% endif %}{% if message.name is defined %}!{% endif %};{% endfor %}"
)


def written(running: Running, **fields: Any) -> str:
    """What the template writes of a conversation."""
    reply = ask(running.url, "/v1/chat/completions", {"max_tokens": 1, "return_token_ids": True, **fields})
    assert reply.status == 200, reply.body
    return str(ask(running.url, "/detokenize", {"tokens": reply.json["choices"][0]["prompt_token_ids"]}).json["prompt"])


def test_messages_as_clients_write_them() -> None:
    """The text of an assistant with tool_calls: null was lost, and arguments reached the template as JSON text."""
    from megatron.serving.templates import Templates

    unused = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "name": None}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 3, "b": "x"}'}}
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "b"}]
    user = {"role": "user", "content": "hi"}
    with served(templates=Templates(CALLS, {})) as running:
        for message, text in (
            ({"role": "assistant", "content": "yo", **unused}, "assistant:yo;"),
            ({"role": "assistant", "content": "yo", "tool_calls": []}, "assistant:yo;"),
            ({"role": "assistant", "content": None, "tool_calls": [call]}, 'assistant:f({"a": 3, "b": "x"});'),
            ({"role": "tool", "content": "7", "tool_call_id": "1"}, "tool:7;"),
            ({"role": "assistant", "content": parts}, "assistant:ab;"),
        ):
            assert written(running, messages=[user, message]) == f"user:hi;{text}"
        last = [user, {"role": "assistant", "content": parts}]
        check_sentence(written(running, messages=last, continue_final_message=True), "user:hi;assistant:ab")
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert written(running, messages=[user], tools=tools, tool_choice="none") == "user:hi;"
        wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        refusal = ask(running.url, PATH, {"messages": [user, wrong]})
        assert (refusal.status, refusal.json["error"]["param"]) == (400, "messages"), refusal.body
        assert "messages[1].tool_calls[0].function.arguments" in refusal.message


def test_variables_that_the_template_has_already_are_refused_by_name() -> None:
    """They had no effect, and nobody said so. Content may be missing in an assistant's message alone."""
    with with_template() as running:
        for fields, param, words in (
            (
                {"chat_template_kwargs": {"messages": 5}},
                "chat_template_kwargs",
                "has messages, which the template gets",
            ),
            ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs", "has add_generation_"),
            (
                {"chat_template_kwargs": {"bos_token": ""}},
                "chat_template_kwargs",
                "has bos_token, which the template ge",
            ),
            ({"chat_template_kwargs": {"documents": []}, "documents": [{}]}, "chat_template_kwargs", "has documents"),
            (
                {"messages": [{"role": "user", "content": None}]},
                "messages",
                'messages[0] of the role "user" has no cont',
            ),
            ({"messages": [*MESSAGES, {"role": "system"}]}, "messages", 'messages[1] of the role "system" has no'),
            ({"max_tokens": 500}, "messages", "the conversation has 2"),
        ):
            for path in (PATH, "/tokenize")[: 1 + (param == "chat_template_kwargs" and "documents" not in fields)]:
                reply = ask(running.url, path, {"messages": MESSAGES, **fields})
                assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body
                assert words in reply.message
        named = {"chat_template_kwargs": {"documents": []}, "request_id": "mine"}
        assert said(running, **named).json["id"] == "chatcmpl-mine"


def test_streamed_messages_are_those_that_come_whole() -> None:
    """The first event has the role, the last the reason; log-probabilities have bytes."""
    with with_template() as running:
        for number in range(8):
            fields = {"n": 1 + number % 3, "seed": number, "temperature": number % 2, "max_tokens": 12}
            fields |= {"logprobs": True, "top_logprobs": 2} if number % 3 else {}
            whole = said(running, **fields).json
            events = said(running, **fields, stream=True, stream_options={"include_usage": True}).events
            assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
            for choice in whole["choices"]:
                mine = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["delta"] == {}
                assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]
                assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
                if choice["logprobs"]:
                    listed = [entry for each in mine if each["logprobs"] for entry in each["logprobs"]["content"]]
                    assert listed == choice["logprobs"]["content"]
                    assert {len(entry["top_logprobs"]) for entry in listed} == {2}
                    text = b"".join(bytes(entry["bytes"]) for entry in listed).decode(errors="replace")
                    assert choice["finish_reason"] == "stop" or text == choice["message"]["content"]


def test_templates_that_loop_refuse_or_reach_out_are_a_400() -> None:
    """A stranger's template runs in the sandbox, in a process with a time limit; the next request works."""
    looping = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with with_template(seconds=1.0, trust_request_chat_template=True) as running:
        reply = said(running, chat_template=looping)
        assert (reply.status, reply.json["error"]["param"]) == (400, "chat_template")
        check_sentence(reply.message, "1 s")
        pool = running.server.model.templates._pool
        pool.seconds = 60.0
        assert said(running).status == 200
    with with_template(trust_request_chat_template=True) as running:
        before = said(running).json["choices"]
        for template in (
            "{{ raise_exception('roles must alternate') }}",
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{% if %}",
            "{{ 'x' * 999999999999 }}",
            "{{ 'x' * 9999999 }}",
            "{{ range(10**9) }}",
            "{% include '/etc/passwd' %}",
            "{{ 1 / 0 }}",
        ):
            reply = said(running, chat_template=template)
            assert (reply.status, reply.json["error"]["param"]) == (400, "chat_template"), (template, reply.body)
            check_sentence(reply.message)
            assert said(running).json["choices"] == before
        assert said(running, chat_template="{{ messages[0].content }}").status == 200
