"""A thousand bad requests, made from tables: each is a 4xx with a sentence, and the next good one gets its answer."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron.serving import megatron_api
from megatron.serving.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from tests.harness.sentences import check_line, check_sentence
from tests.harness.serving import Reply, Running, ask, served, slow_table

GOOD: dict[str, Any] = {"prompt": "hello the world", "temperature": 0, "max_tokens": 8}
VALUES = ["true", '"x"', '"1"', "1.5", "-1.5", "1e309", "9223372036854775808e9", "NaN", "[[[]]]", '{"a": {}}', "[null]",
          '"\\ud800"', f'"{"x" * 9_000_000}"', "[true]"]  # fmt: skip
COMPLETIONS, CHATS, API, TOKENS, TEXTS = "/v1/completions", "/v1/chat/completions", "/api", "/tokenize", "/detokenize"
TABLES: dict[str, tuple[tuple[Field, ...], dict[str, Any]]] = {
    COMPLETIONS: (COMPLETION, {"prompt": "a"}),
    CHATS: (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    API: (megatron_api.FIELDS, {"prompts": ["a"]}),
    TOKENS: (TOKENIZE, {}),
    TEXTS: (DETOKENIZE, {}),
}
TEXTS_OF_ALL = {"prompt", "stop", "user", "request_id", "service_tier", "prompt_cache_key", "safety_identifier"}
# What is right after all: texts where texts are, true where switches are.
FITTING = {
    '"x"': TEXTS_OF_ALL,
    '"1"': TEXTS_OF_ALL,
    "1.5": {"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"},
    "-1.5": {"presence_penalty", "frequency_penalty"},
    '{"a": {}}': {"metadata", "chat_template_kwargs"},
}
NO_PROMPTS: tuple[Any, ...] = (*([], [1, "a"], ["a", 1], [[1], "a"], [[1], 1], [1.5], [[1], [None]], [None]),)
TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [
    *((COMPLETIONS, {"prompt": ids}, "prompt", "must be a text, a list of") for ids in NO_PROMPTS),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt", "prompt[1] is -1; it must be a token id from 0 to"),
    (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt", "prompt[1][0] is -1; it must be a token id"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "prompt[0] is []; it must be a list of one or more token ids"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "prompt is a list of 129; it must be a list of 1 to 128 items"),
    (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt", "prompt is a list of 129; it must be a list of 1 to 128 items"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", 'prompt is [1, "a"]; it must be a text'),
    (COMPLETIONS, {"prompt": ["a", [5] * 9]}, "prompt", "it must be a text"),
    (COMPLETIONS, {"prompt": [265]}, "prompt", "prompt has the token id 265; this model has 0 to 264"),
    (COMPLETIONS, {"prompt": [[1], [265]]}, "prompt", "prompt[1] has the token id 265"),
    (COMPLETIONS, {"prompt": [[1], [2**31 - 1]]}, "prompt", "this model has 0 to 264"),
    (COMPLETIONS, {"prompt": [5] * 513}, "prompt", "513 tokens, and a text has at most 512 here"),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 508}, "prompt", "5 tokens; with max_tokens 508 that makes 513"),
    (COMPLETIONS, {"max_tokens": 3}, "prompt", "prompt is missing; it must be a text, a list of texts"),
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt is null; it must be a text, a list of texts"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo: true"),
    (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of", "less than n 3"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "from 1 to 128"),
    (COMPLETIONS, {"prompt": "a", "best_of": 129}, "best_of", "from 1 to 128"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "need stream"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": True}}, "stream_options", "can have only"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "more than max_tokens 8"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens 17 is more than max_tokens 16"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "keys are token ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "keys are token ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"265": 1}}, "logit_bias", "this model has 0 to 264"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"\ud800": 1}}, "logit_bias", "unpaired surrogate"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "1 to 1,024 characters"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 65}, "stop", "must be"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [265]}, "stop_token_ids", "this model has 0 to 264"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "a list of one or more token ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [265]}, "allowed_token_ids", "this model has 0 to 264"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, "model", "does not exist here"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format", '"json_object" or'),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs", "0 are given"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "2"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be followed"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature?"),
    (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "\ud800", "not a field"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "cannot be inserted before a suffix"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "seed": 1}, "seed", "samples no tokens: leave it out"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "stop": "b"}, "stop", "end with tokens (stop_token_ids)"),
    (COMPLETIONS, {"prompt": "a", "length_penalty": 2}, "length_penalty", "no effect without use_beam_search"),
    (CHATS, {"messages": []}, "messages", "1 to 10,000 items"),
    (CHATS, {"messages": [{"content": "a"}]}, "messages", "no role"),
    (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages", "must be a text"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads only text"),
    (CHATS, {"tools": [{}]}, "tools", 'calls no tools: leave out tools, or send tool_choice: "none"'),
    (CHATS, {"tools": [{}], "tool_choice": "auto"}, "tools", "calls no tools"),
    (CHATS, {"tool_choice": "required"}, "tool_choice", "calls no tools"),
    (CHATS, {"functions": [{}]}, "functions", "calls no functions: leave out functions, or send function_call"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "guided_json", 'send structured_outputs: {"json": SCHEMA}'),
    (COMPLETIONS, {"prompt": "a", "max_new_tokens": 5}, "max_new_tokens", "; send max_tokens"),
    (COMPLETIONS, {"messages": []}, "messages", "/v1/chat/completions takes them"),
    (CHATS, {"prompt": "a"}, "prompt", "/v1/completions takes it"),
    (CHATS, {"extra_body": {}}, "extra_body", "sends what is in it as fields"),
    (CHATS, {"audio": {}}, "audio", "only text"),
    (CHATS, {"modalities": ["audio"]}, "modalities", "only text"),
    (CHATS, {"reasoning_effort": "high"}, "reasoning_effort", "control reasoning"),
    (CHATS, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "two names of one limit"),
    (CHATS, {"max_tokens": 0}, "max_tokens", "1 or more"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "need logprobs: true"),
    (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    (CHATS, {"chat_template": "x"}, "chat_template", "its own template alone"),
    (CHATS, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot both"),
    (CHATS, {}, "messages", "no chat template"),
    (TOKENS, {}, "prompt", "either prompt or messages"),
    (TOKENS, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "either prompt or messages"),
    (TEXTS, {"tokens": [265]}, "tokens", "this model has 0 to 264"),
    (TEXTS, {"tokens": "a"}, "tokens", "a list of token ids"),
]  # fmt: skip
BODIES: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"", {}, 400, "not JSON"),
    (b"{", {}, 400, "not JSON"),
    (b'{"prompt": "a"', {}, 400, "not JSON"),
    (b'{"prompt": "a"} x', {}, 400, "not JSON"),
    (b'{"prompt": "a", "prompt": "b"}', {}, 400, "twice"),
    (b'{"prompt": "\xff"}', {}, 400, "not UTF-8"),
    (b"[" * 100_000, {}, 400, "levels deep"),
    (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", {}, 400, "levels deep"),
    (b'{"n": ' + b"1" * 5000 + b"}", {}, 400, "digits"),
    (b"[]", {}, 400, "expected an object"),
    (b"5", {}, 400, "expected an object"),
    (b'"a"', {}, 400, "expected an object"),
    (b"null", {}, 400, "expected an object"),
    (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "Content-Type: application/json"),
    (b'{"prompt": "a"}', {"content-type": ""}, 415, "Content-Type: application/json"),
    (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type: application/json"),
    (gzip.compress(b'{"prompt": "a"}'), {"content-encoding": "gzip"}, 415, "content encoding 'gzip'"),
    (b" " * (2 << 20), {}, 413, "larger than 1 MiB"),
]


def good(running: Running) -> Any:
    """The answer to a request that is always the same, without what is new in each."""
    answer = ask(running.url, COMPLETIONS, GOOD).json
    return answer["choices"], answer["usage"]["completion_tokens"]


def of_single_values() -> Iterator[tuple[str, str, str]]:
    """Each field of each endpoint with each value of no use to it: path, field, body."""
    for path, (table, base) in TABLES.items():
        for field in table:
            for value in VALUES:
                switch = value == "true" and ("'boolean'" in str(field.schema) or "True" in str(field.schema))
                if switch or field.name in FITTING.get(value, ()) or (field.name == "model" and '"' in value):
                    continue
                if len(value) > 1000 and "maxLength': 8388608" not in str(field.schema):
                    value = '"' + "x" * 2000 + '"'
                others = json.dumps({name: each for name, each in base.items() if name != field.name})[1:-1]
                yield path, field.name, f'{{"{field.name}": {value}{", " if others else ""}{others}}}'


def refused(running: Running, path: str, body: bytes, headers: dict[str, str] | None = None) -> Reply:
    """The refusal of a body, which must be one."""
    reply = ask(running.url, path, body, headers=headers)
    place = (path, body[:200], reply.body[:300])
    assert 400 <= reply.status < 500, place
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}, place
    assert len(reply.message) > 10 and "Traceback" not in reply.message and "Error(" not in reply.message, place
    return reply


NULLS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}),
    (COMPLETIONS, {"response_format": {"type": "text", "json_schema": None}}),
    (COMPLETIONS, {"response_format": {"type": "json_object", "json_schema": None}}),
    (
        COMPLETIONS,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": None, "description": None, "schema": {"type": "object"}},
            }
        },
    ),
    (COMPLETIONS, {"structured_outputs": {"json": None, "regex": "[ab]", "choice": None, "grammar": None}}),
    ("/tokenize", {"add_special_tokens": None, "messages": None}),
]


def test_nulls_at_any_depth_are_as_good_as_absent(running: Running) -> None:
    """Clients write what they don't use as null, also within fields: such requests got a 400."""
    pytest.importorskip("llguidance", reason="the extra constrained is not installed")
    for path, fields in NULLS:
        reply = ask(running.url, path, {"prompt": "a", **fields})
        assert reply.status == 200, (fields, reply.body)
    required = {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}
    check_line(refused(running, COMPLETIONS, json.dumps({"prompt": "a", **required}).encode()).message, "schema")


def test_well_known_paths_say_what_works(running: Running) -> None:
    """/v1/responses was a 404 that named nothing."""
    for path, words in (
        ("/v1/responses", "POST /v1/chat/completions answers a conversation: put the text of input into messages"),
        ("/v1/embeddings", "generates only text"),
        ("/generate", "PUT /api"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/nothing/like/it", "/openapi.json lists them"),
    ):
        reply = ask(running.url, path, {})
        assert reply.status == 404 and words in reply.message, (path, reply.message)


def test_everybodys_line_for_curl(running: Running) -> None:
    """curl names a form as the content type unless it is told otherwise: the line of Megatron-LM's users got a 415."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = {"prompts": ["Hello world"], "tokens_to_generate": 1}
    assert ask(running.url, API, body, method="PUT", headers=form).status == 200
    for path, method in ((API, "POST"), (COMPLETIONS, "POST")):
        reply = ask(running.url, path, body, method=method, headers=form)
        assert reply.status == 415, path
        check_sentence(reply.message)
        check_sentence(reply.message, "application/json")


def test_a_body_has_one_length(running: Running) -> None:
    """A proxy that believes Content-Length lets in a hidden request after a body that Transfer-Encoding ends."""
    host = running.url.removeprefix("http://")
    hidden = f"GET /version HTTP/1.1\r\nHost: {host}\r\n\r\n"
    start = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    old = start.replace("HTTP/1.1", "HTTP/1.0") + "Transfer-Encoding: chunked\r\n\r\n"
    both = start + f"Content-Length: {len(hidden) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n"
    for asked, words in (
        (both + "0\r\n\r\n" + hidden, "both Content-Length and Transfer-Encoding"),
        (both.replace("Content-Length: ", "content-length:") + "0\r\n\r\n" + hidden, "both Content-Length and"),
        (old + "0\r\n\r\n" + hidden, "HTTP/1.0 doesn't know"),
    ):
        name, _, port = host.partition(":")
        with socket.create_connection((name, int(port)), timeout=60) as connection:
            connection.sendall(asked.encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
        assert words.encode() in answer and answer.count(b"HTTP/1.1 ") == 1, answer


def test_each_field_refuses_what_it_cannot_be(running: Running) -> None:
    """vLLM's server once answered a string as logprobs with a 500; here each field is named."""
    before, count = good(running), 0
    for path, name, body in of_single_values():
        reply = refused(running, path, body.encode())
        named = reply.json["error"]["param"]
        assert named == name or reply.status == 413 or path == TOKENS, (path, body[:100], reply.message)
        count += 1
    assert count > 900
    assert good(running) == before
    running.wait_until_idle()


def test_fields_that_cannot_go_together_are_named(running: Running) -> None:
    """Each sentence names the field, its value, and what would work."""
    before = good(running)
    for path, fields, param, message in TOGETHER:
        body = fields if path != CHATS or "messages" in fields else {**TABLES[CHATS][1], **fields}
        reply = refused(running, path, json.dumps(body).encode())
        assert reply.json["error"]["param"] == param.replace("\ud800", "?"), (fields, reply.json)
        assert message in reply.message, (fields, reply.message)
        assert reply.status == (404 if param == "model" else 400)
    assert good(running) == before


def test_bodies_that_are_no_json_object_are_refused() -> None:
    """Before they are read where their kind or size is wrong."""
    with served(max_body_size_mb=1) as running:
        before = good(running)
        for body, headers, status, message in BODIES:
            for path in (COMPLETIONS, API):
                reply = refused(running, path, body, headers)
                assert (reply.status, message in reply.message) == (status, True), (body[:50], reply.body)
        assert good(running) == before


def test_a_body_far_over_the_limit_gets_its_answer() -> None:
    """All of it is taken, or a client that is still sending would find its connection reset, and no answer."""
    with served(max_body_size_mb=1) as running:
        host = running.url.removeprefix("http://")
        with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
            pieces = (b" " * (1 << 20) for _ in range(64))
            connection.request("POST", API, pieces, {"content-type": "application/json"}, encode_chunked=True)
            answer = connection.getresponse()
            assert (answer.status, b"larger than 1 MiB" in answer.read()) == (413, True)
            assert answer.getheader("connection") == "close"


RAW: list[tuple[bytes, int]] = [
    (b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    (b"GET /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    (b"DELETE /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    (b"BREW /health HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    (b"GET /v1/models/other HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    (b"GET /v1/models/%ff%00 HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    (b"GET /../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    (b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n", 200),
    (b"nonsense\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}   ", 400),
    (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
     b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
]  # fmt: skip


def test_what_is_hardly_http_is_refused_and_nothing_ends(running: Running) -> None:
    """Raw bytes: wrong methods, headers of a megabyte, two lengths, bad chunks."""
    before = good(running)
    host, _, port = running.url.removeprefix("http://").partition(":")
    for data, status in RAW:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(data)
            found = connection.recv(1000)
        assert found.split(b" ")[1:2] == [str(status).encode()], (data[:60], found)
    assert good(running) == before


def test_a_slow_body_and_slow_headers_end() -> None:
    """A client that sends a byte now and then would hold a connection for ever."""
    with served(slow_table(), client_timeout=60) as running:
        vars(running.server)["config"] = replace(running.server.config, client_timeout=0.1)  # of bodies, not of headers
        host, _, port = running.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                b"POST /api HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"
            )
            assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    with served(slow_table(), client_timeout=1) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as connection,
            contextlib.suppress(ConnectionError),  # it has ended before a busy machine sent anything
        ):
            connection.sendall(b"POST /api HTTP/1.1\r\nhos")
            assert connection.recv(1000) == b""


def test_keys_are_asked_for_where_it_matters() -> None:
    """Without one, with a wrong one or another scheme: 401; health and metrics stay open for the machines that ask."""
    with served(keys=("secret", "other")) as running:
        wrong = [
            "",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Basic secret",
            "secret",
            "Bearer s\xe9cret",
        ]
        for path, given in ((path, given) for path in (COMPLETIONS, API, "/v1/models", TOKENS) for given in wrong):
            method = "GET" if path == "/v1/models" else "POST"
            reply = ask(running.url, path, b"{}", method=method, headers={"authorization": given})
            assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
            assert reply.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer secret", "bearer  other"):
            assert ask(running.url, "/v1/models", headers={"authorization": key}).status == 200
        assert [ask(running.url, path).status for path in ("/health", "/metrics", "/version")] == [200] * 3


def test_each_request_is_a_line_without_texts_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    """The access log names who asked, what, and how it ended; no_log of /api leaves a line out."""
    with (
        caplog.at_level(logging.INFO, "megatron.serving.access"),
        served(keys=("secret",), no_access_log=False) as running,
    ):
        body, key = {"prompts": ["hush"], "tokens_to_generate": 1}, {"authorization": "Bearer secret"}
        asked = [{**key, "x-request-id": "mine"}, {**key, "x-request-id": "a\tb"}]
        replies = [ask(running.url, "/api?key=secret", body, method="PUT", headers=each) for each in asked]
        assert ask(running.url, "/api", {**body, "no_log": True}, headers=key).status == 200
        assert ask(running.url, "/v1/models").status == 401
        while len(lines := [each.getMessage() for each in caplog.records if "access" in each.name]) < 3:
            time.sleep(0.005)
    assert [line.split()[1:4] for line in lines] == [["PUT", "/api", "200"]] * 2 + [["GET", "/v1/models", "401"]]
    assert lines[0].endswith(" s mine") and replies[0].headers["x-request-id"] == "mine"
    assert re.fullmatch("[0-9a-f]{24}", replies[1].headers["x-request-id"]), "an id that would break the log's line"
    assert not any("hush" in line or "secret" in line for line in lines)
