"""Large bodies are read beside the event loop, and bounded before work: everybody else gets answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import MegatronError
from megatron.serving import middleware, tokenizing, work
from megatron.serving.errors import ApiError
from megatron.serving.fields import COMPLETION, read_fields
from megatron.serving.responses import encoded
from megatron.serving.schema import checked
from megatron.serving.work import LARGE_BYTES, Work
from megatron.small_files import parse_json
from tests.harness.sentences import check_sentence, expect_error
from tests.harness.serving import Running, ask, served, slow_table

HELLO = {"prompt": "hello", "temperature": 0, "max_tokens": 4}


def noting(threads: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which writes down the thread that it runs in."""

    def noted(*args: Any, **settings: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*args, **settings)

    return noted


def test_large_bodies_are_read_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """/tokenize, /detokenize and conversations of 8 MB were read in the event loop: /health took up to 28 s."""
    threads = list[str]()
    monkeypatch.setattr(middleware, "parse_json", noting(threads, parse_json))
    monkeypatch.setattr(tokenizing, "read_fields", noting(threads, read_fields))
    monkeypatch.setattr(RustTokenizer, "tokenize_parts", noting(threads, RustTokenizer.tokenize_parts))
    monkeypatch.setattr(RustTokenizer, "detokenize", noting(threads, RustTokenizer.detokenize))
    with served(slow_table(max_length=1 << 19, max_requests=1)) as running:
        for path, body in (
            ("/tokenize", {"prompt": "a" * LARGE_BYTES, "add_special_tokens": False, "return_token_strs": True}),
            ("/detokenize", {"tokens": [7] * LARGE_BYTES}),
        ):
            threads.clear()
            reply = ask(running.url, path, body)
            assert reply.status == 200, reply.body[:200]
            assert len(threads) > 2 and all(each.startswith("large-requests") for each in threads), set(threads)


def test_a_text_that_cannot_fit_is_refused_before_tokens_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP server's process kept 4.6 GB after tokens had been made of 8 MB of text that could never fit."""
    longest = list[int]()
    plain = RustTokenizer._encode

    def noted(tokenizer: RustTokenizer, texts: Any, *, whole: bool) -> Any:
        longest.append(max(map(len, texts)))
        return plain(tokenizer, texts, whole=whole)

    monkeypatch.setattr(RustTokenizer, "_encode", noted)
    text = "a" * 100_000
    with served() as running:
        for path, body in (
            ("/tokenize", {"prompt": text}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["a", text]}),
            ("/api", {"prompts": [text]}),
        ):
            reply = ask(running.url, path, body)
            assert reply.status == 400
            check_sentence(reply.message, "100,000", "7,168")
        assert max(longest, default=0) <= 7168
        cut = {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 1}
        assert ask(running.url, "/v1/completions", cut).json["usage"]["prompt_tokens"] == 8
        too_long = ask(running.url, "/v1/completions", {**cut, "prompt": text * 11})
        assert too_long.status == 400
        check_sentence(too_long.message, "1,048,576")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": [' + b"[]," * 2_200_000 + b"1]}", 413, "about 4,400,002 values; at most 2,097,152 are read"),
        (b'{"tokens": [' + b"1," * 1_100_000 + b"1]}", 400, "a list of token ids, at most 1,048,576"),
        (b"{" + b"".join(b'"%d":1,' % n for n in range(200_000)) + b'"7":1}', 400, 'has the key "7" twice'),
    ],
)
def test_a_body_of_many_values_is_refused(body: bytes, status: int, words: str) -> None:
    """A key that came twice among 200,000 was looked for among all, for each of them: it took an hour."""
    with served() as running:
        reply = ask(running.url, "/detokenize", body)
        assert reply.status == status and words in reply.message, reply.body[:300]
        assert ask(running.url, "/v1/completions", HELLO).status == 200


def test_a_list_of_ids_is_checked_as_a_whole() -> None:
    ids = {field.name: field for field in COMPLETION}["allowed_token_ids"].schema
    assert checked([5] * 1000, ids, "x") == [5] * 1000
    for wrong, fact in (
        ([5, -1], "x[1] is -1"),
        ([5, True], "x[1] is true"),
        ([5, 1.5], "x[1] is 1.5"),
        ([], "x is []"),
    ):
        with expect_error(ApiError, fact):
            checked(wrong, ids, "x")
    assert checked([5, 1.0], ids, "x") == [5, 1]
    named = read_fields({"prompt": "a", "stop_token_ids": [1, 2]}, COMPLETION)
    assert named["stop_token_ids"] == [1, 2]


def test_the_json_of_an_answer_is_that_of_its_parts() -> None:
    """All of it at once would hold Python's lock for a second, and with it everybody else."""
    nested = {"a": list(range(2500)), "b": [{"c": [None] * 1001, "d": {}}, [], "é\ud800"], "e": {}, "f": [[1, [2]]]}
    answer = {"choices": [{"text": "a", "logprobs": {"tokens": ["b"] * 3000}}]}
    values: list[Any] = [nested, answer, [], {}, 5, "x", None, [1], {"a": 1}, [{}], [[]]]
    for value in values:
        assert json.loads(encoded(value)) == json.loads(json.dumps(value).replace("\\ud800", "?"))
        assert b" " not in encoded(value)


def test_more_large_requests_than_can_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_MOST_WAITING", 3)
    go_on, threads = threading.Event(), Work()

    async def run() -> list[Any]:
        async def small() -> str:
            done = await threads.run(False, lambda: "small")
            go_on.set()
            return done

        many = [threads.run(True, go_on.wait, 5) for _ in range(4)]
        return list(await asyncio.gather(*many, small(), return_exceptions=True))

    found = asyncio.run(run())
    threads.close()
    assert found[:3] == [True] * 3 and found[4] == "small"
    assert isinstance(found[3], MegatronError)
    check_sentence(str(found[3]), "3", "256")


def test_log_probabilities_of_prompts_are_bounded(running: Running) -> None:
    """An answer of 20 for each token of a prompt, times 128 choices, needs gigabytes."""
    body = {"prompt": [5] * 500, "max_tokens": 1, "n": 128, "echo": True, "logprobs": 20}
    assert ask(running.url, "/v1/completions", {**body, "prompt": [5] * 500, "n": 1}).status == 200
    reply = ask(running.url, "/v1/completions", {**body, "prompt": [[5] * 500] * 2})
    assert reply.status == 400
    check_sentence(reply.message, "2,688,000")
    assert reply.json["error"]["param"] == "logprobs"
