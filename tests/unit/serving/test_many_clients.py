"""Many clients at once, clients that leave or read slowly, a full queue, and an engine that fails."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from megatron.serving import responses
from megatron.serving.completions import read_completion
from megatron.serving.errors import ApiError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.harness.serving import Running, ask, served, slow_table

BODY = {"prompt": "hello the world", "max_tokens": 50, "ignore_eos": True}


def mixed(number: int) -> tuple[str, dict[str, Any]]:
    """One of many kinds of requests, each with its own seed."""
    draw = random.Random(number)
    words = " ".join(draw.choices(("the", "world", "in", "é", "on", "hello"), k=draw.randrange(1, 30)))
    if number % 8 == 0:
        return "/api", {"prompts": [words, "hello"], "tokens_to_generate": 12, "random_seed": number, "logprobs": True}
    fields: dict[str, Any] = {"prompt": words, "seed": number, "max_tokens": draw.randrange(1, 40)}
    if number % 8 == 4:
        return "/v1/completions", {"prompt": words, "max_tokens": 9, "use_beam_search": True, "n": 3, "stream": False}
    fields |= {"temperature": draw.choice((0, 0.7, 1)), "n": draw.choice((1, 1, 3)), "echo": number % 3 == 0}
    fields |= {"logprobs": draw.choice((None, 0, 2)), "stream": number % 2 == 1}
    return "/v1/completions", fields


def texts_of(running: Running, number: int) -> Any:
    """What a request brings, without what is new in each answer."""
    path, fields = mixed(number)
    reply = ask(running.url, path, fields)
    assert reply.status == 200, reply.body
    if path == "/api":
        return reply.json
    if not fields["stream"]:
        return [(choice["text"], choice["finish_reason"]) for choice in reply.json["choices"]]
    found = Counter[int]()
    texts = dict.fromkeys(range(fields["n"]), "")
    for event in reply.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            found[choice["index"]] += choice["finish_reason"] is not None
    assert set(found.values()) == {1}
    return list(texts.values())


def test_sixty_four_clients_get_what_each_gets_alone(running: Running) -> None:
    """Mixed requests that share steps, blocks and beginnings."""
    alone = [texts_of(running, number) for number in range(64)]
    with ThreadPoolExecutor(64) as clients:
        together = list(clients.map(lambda number: texts_of(running, number), range(64)))
    assert together == alone
    running.wait_until_idle()


def connect(running: Running, fields: dict[str, Any], *, path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request has been sent."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def test_whoever_leaves_is_forgotten_within_a_step() -> None:
    """Queued, reading its prompt, generating, streamed or not: no block is held, and others get their texts."""
    with served(slow_table(seconds=0.005, max_requests=4)) as running:
        wanted = ask(running.url, "/v1/completions", {"prompt": "stay", "seed": 1, "max_tokens": 60}).json["choices"]
        with ThreadPoolExecutor(1) as neighbour:
            staying = neighbour.submit(
                ask, running.url, "/v1/completions", {"prompt": "stay", "seed": 1, "max_tokens": 60}
            )
            for number in range(12):
                fields = {"prompt": [number] * 300, "max_tokens": 200, "n": 1 + number % 6, "ignore_eos": True}
                connection = connect(running, {**fields, "stream": number % 2 == 0, "logprobs": number % 3 or None})
                time.sleep((0.0, 0.01, 0.04)[number % 3])
                if number % 4 == 0:  # a reset instead of an orderly end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                leave(running, connection)
            leaving = connect(running, {"prompts": ["a", "b"], "tokens_to_generate": 400}, path="/api")
            time.sleep(0.02)
            leave(running, leaving)
            assert staying.result().json["choices"] == wanted
        running.wait_until_idle()
        assert running.engine.statistics.generated_tokens < 2000


def leave(running: Running, connection: socket.socket) -> None:
    """End a connection during a step, after which the engine must hear of it. Another client may stay."""
    with running.table.held():
        connection.close()
        running.wait_until(lambda: running.server.engine.unfinished <= 1)


def test_requests_of_one_id_are_answered_apart() -> None:
    """A proxy repeats a request under its x-request-id: the first waited for ever, or the second got its tokens."""
    with served(slow_table(seconds=0.005)) as running, ThreadPoolExecutor(2) as clients:
        fields = {"prompt": "hello", "max_tokens": 20, "temperature": 0}
        alone = ask(running.url, "/v1/completions", fields).json["choices"]
        headers = {"x-request-id": "same"}
        both = list(clients.map(lambda _: ask(running.url, "/v1/completions", fields, headers=headers), range(2)))
        assert [reply.status for reply in both] == [200, 200]
        assert [reply.json["choices"] for reply in both] == [alone, alone]


def test_a_client_that_reads_nothing_holds_nobody_up() -> None:
    """Its stream waits in the server's memory, the engine goes on, and the connection ends with its time."""
    with served(shutdown_timeout=0) as running:
        fields = {"prompt": "a", "n": 4, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "stream": True}
        slow = connect(running, fields)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        assert ask(running.url, "/v1/completions", {"prompt": "b", "max_tokens": 3}).status == 200, "not a 504"
        running.wait_until_idle()
        slow.close()


class LaterCalls:
    """The running event loop, whose calls for later wait until the test makes them: ``(seconds, call)``."""

    made: ClassVar[list[tuple[float, Callable[[], object]]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def call_later(self, seconds: float, call: Callable[..., object], *arguments: object) -> Any:
        """Keep a call."""
        loop = asyncio.get_running_loop()
        self.made.append((seconds, lambda: loop.call_soon_threadsafe(call, *arguments)))
        return SimpleNamespace(cancel=lambda: None)


def test_time_limits_of_requests_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """504 with a sentence; in a stream an event with the error, after the text that has come."""
    fields = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with served(request_timeout=0.1) as running:
        with running.table.held():
            reply = ask(running.url, "/v1/completions", fields)
        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        running.wait_until_idle()
    monkeypatch.setattr(LaterCalls, "made", [])
    monkeypatch.setattr(responses, "asyncio", SimpleNamespace(**{**vars(asyncio), "get_running_loop": LaterCalls}))
    with served(slow_table(seconds=0.1), request_timeout=2.5) as running:
        with connect(running, {**fields, "stream": True}) as connection, connection.makefile("rb") as answer:
            lines = iter(answer.readline, b"0\r\n")  # the last chunk
            assert any(line.startswith(b"data: ") for line in lines), "no text came"
            (end,) = (call for seconds, call in LaterCalls.made if seconds == 2.5)
            end()  # once a text has come, however long that took
            events = [line for line in lines if line.startswith(b"data: ")]
        assert json.loads(events[-1][6:])["error"]["code"] == "timeout"
        running.wait_until_idle()


def test_a_full_queue_refuses_and_keeps_its_order() -> None:
    """Two hundred clients, fifty times the queue: each is refused at once or gets its text, and health answers."""
    with served(slow_table(max_requests=2), max_queue=2) as running:
        fields = {"prompt": "a", "seed": 5, "max_tokens": 9}
        alone = ask(running.url, "/v1/completions", fields).json["choices"]
        with ThreadPoolExecutor(200) as clients:
            with running.table.held():  # refusals and health wait for no step
                asked = [clients.submit(ask, running.url, "/v1/completions", fields) for _ in range(200)]
                running.wait_until(lambda: sum(each.done() for each in asked) == 196)
                assert ask(running.url, "/health").status == 200
                refused = [each.result() for each in asked if each.done()]
            replies = [each.result() for each in asked]
        assert {reply.status for reply in refused} == {429}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        answered = [reply for reply in replies if reply.status == 200]
        assert [reply.json["choices"] for reply in answered] == [alone] * 4
        metrics = ask(running.url, "/metrics").body.decode()
        assert 'megatron_requests_refused_total{model_name="table"} 196.0' in metrics


def test_sigterm_answers_until_unfinished_texts_have_ended() -> None:
    """New connections were refused at once, so a load balancer saw broken connections in place of a 503."""
    with served() as running, ThreadPoolExecutor(1) as clients:
        with running.table.held():
            fields = {"prompt": "a", "max_tokens": 60, "seed": 1}
            unfinished = clients.submit(ask, running.url, "/v1/completions", fields)
            running.wait_until(lambda: running.server.engine.unfinished)
            running.http_server.handle_exit(signal.SIGTERM, None)
            running.wait_until(lambda: ask(running.url, "/health").status == 503)  # uvicorn looks every 0.1 s
            reply = ask(running.url, "/v1/completions", {"prompt": "b"})
            assert (reply.status, reply.json["error"]["code"]) == (503, "shutting_down")
            assert reply.headers["retry-after"] and reply.headers["connection"] == "close"
            assert ask(running.url, "/health").status == 503
        assert unfinished.result().status == 200
        end = time.monotonic() + 60
        while running.http_server.should_exit and time.monotonic() < end:
            try:
                ask(running.url, "/health")
            except OSError:
                return
            time.sleep(0.05)
        raise AssertionError("the server didn't end")


def test_a_second_signal_and_a_signal_after_a_failure_end_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A launcher sends SIGTERM when a rank is lost: a CancelledError was printed before the cause."""
    for failure in (None, RuntimeError("rank 1 is lost")):
        with served() as running, ThreadPoolExecutor(1) as clients, running.table.held():
            fields = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
            reply = clients.submit(ask, running.url, "/v1/completions", fields)
            running.wait_until(lambda: running.server.engine.unfinished)
            if failure is None:
                running.http_server.handle_exit(signal.SIGTERM, None)
            else:
                running.table.failure = failure
                running.table.may_step.set()
                running.wait_until(lambda: running.http_server.should_exit)
            running.http_server.handle_exit(signal.SIGTERM, None)
            assert reply.result().status == 503
    assert not [
        record.getMessage() for record in caplog.records if "Traceback" in record.getMessage() or record.exc_info
    ]


def test_one_request_cannot_have_more_texts_than_the_queue() -> None:
    """128 prompts with n 128 were 16,384 texts in a queue of 256; and a queue with some room took as many."""
    with served(slow_table(max_requests=2), max_queue=3) as running, ThreadPoolExecutor(1) as clients:
        reply = ask(running.url, "/v1/completions", {"prompt": ["a", "b"], "n": 3})
        assert (reply.status, reply.json["error"]["code"]) == (400, "too_many_texts")
        check_line(reply.message, "6 texts", "at most 5")
        assert ask(running.url, "/api", {"prompts": ["a"] * 6}).json["message"] == reply.message
        fields = {"prompt": "a", "n": 3, "max_tokens": 60, "ignore_eos": True}
        with running.table.held():
            unfinished = clients.submit(ask, running.url, "/v1/completions", fields)
            running.wait_until(lambda: running.server.engine.unfinished)
            reply = ask(running.url, "/v1/completions", {**fields, "stream": True})
            assert (reply.status, reply.json["error"]["code"]) == (429, "queue_full")
        assert ask(running.url, "/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 1}).status == 200
        assert unfinished.result().status == 200


def test_texts_are_as_long_as_the_cache_has_room_for() -> None:
    """The model's context was named, chat without a limit was refused always, and streams with status 200."""
    table = slow_table(max_requests=1, max_length=512)
    table.limits = replace(table.limits, num_blocks=5)
    with served(table) as running:
        assert ask(running.url, "/v1/models").json["data"][0]["max_model_len"] == 64
        for stream in (False, True):
            fields = {"prompt": "a", "max_tokens": 64, "stream": stream}
            reply = ask(running.url, "/v1/completions", fields)
            assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
            assert ask(running.url, "/v1/completions", {**fields, "max_tokens": 63}).status == 200


def test_a_refusal_of_the_engine_comes_before_a_stream_begins(running: Running) -> None:
    """It was an event after status 200, with which clients take the request for a good one."""
    call = read_completion({"prompt": "a", "max_tokens": 5}, running.server.model, id="a")
    engine = running.server.engine
    engine.check(call.requests)
    with expect_error(ApiError, "600", "at most 512") as refused:
        engine.check([replace(request, max_tokens=600) for request in call.requests])
    assert (refused.value.status, refused.value.code) == (400, "cannot_be_answered")


def test_an_engine_that_fails_answers_503_everywhere() -> None:
    """Open requests, streams, later requests and /health; the process is told, so that it can end."""
    failures: list[str] = []
    with served(slow_table(seconds=0.01)) as running:
        running.server.engine.on_failure = failures.append
        fields = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(2) as clients:
            whole = clients.submit(ask, running.url, "/v1/completions", fields)
            streamed = clients.submit(ask, running.url, "/v1/completions", {**fields, "stream": True})
            running.wait_until(lambda: running.engine.statistics.running == 2)
            running.table.failure = RuntimeError("the table is on fire")
            assert whole.result().status == 503
            assert json.loads(streamed.result().body.decode().strip().split("\n\n")[-1][6:])["error"]["code"] == (
                "engine_failed"
            )
        assert failures == ["the table is on fire"]
        assert ask(running.url, "/v1/completions", fields).status == 503
        reply = ask(running.url, "/health")
        assert reply.status == 503
        check_sentence(reply.message)
        running.table.failure = RuntimeError("rank 1 is lost")  # noticed later: why the step could not end
        running.wait_until(lambda: "rank 1 is lost" in ask(running.url, "/health").message)


def test_a_rank_that_is_lost_while_nobody_asks_is_noticed() -> None:
    """/health said 200 until the next request, which then waited for ever."""
    with served() as running:
        running.server.engine.on_failure = lambda failure: None  # the process would end
        assert ask(running.url, "/health").status == 200
        running.table.failure = RuntimeError("rank 1 is lost")
        running.wait_until(lambda: ask(running.url, "/health").status != 200)
        check_sentence(ask(running.url, "/health").message, "rank 1")


def test_a_text_whose_logits_are_no_numbers_fails_alone() -> None:
    """Its client gets a 500 with the cause, and the neighbour its text."""
    table = slow_table()
    table.broken = frozenset({7})
    with served(table) as running:
        reply = ask(running.url, "/v1/completions", {"prompt": [1, 7]})
        assert reply.status == 500
        check_sentence(reply.message)
        assert ask(running.url, "/v1/completions", {"prompt": [1, 2], "temperature": 0, "max_tokens": 1}).status == 200


def test_counts_of_metrics_are_those_of_answers() -> None:
    """Under our names, and under vLLM's with the flag. Prompts that are only scored, and requests
    whose clients had left, were not counted.
    """
    for vllm, prefix in ((False, "megatron_"), (True, "vllm:")):
        with served(vllm_metric_names=vllm) as running:
            scored = {"prompt": "in", "echo": True, "max_tokens": 0}
            assert ask(running.url, "/v1/completions", scored).json["usage"]["prompt_tokens"] == 1
            usage = ask(running.url, "/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 7}).json["usage"]
            running.wait_until_idle()
            page = ask(running.url, "/metrics").body.decode()
            label = '{model_name="table"}'
            assert f"{prefix}generation_tokens_total{label} {usage['completion_tokens']}.0" in page
            assert f"{prefix}prompt_tokens_total{label} {2 * usage['prompt_tokens'] + 1}.0" in page
            assert f"{prefix}num_requests_running{label} 0.0" in page
            assert f"{prefix}time_to_first_token_seconds_count{label} 2.0" in page
            assert f"{prefix}kv_cache_usage_perc{label} 0.0" in page
            assert "_created" not in page
            leaving = connect(running, {**BODY, "n": 3, "max_tokens": 490, "stream": True})
            leaving.recv(50)
            leaving.close()
            running.wait_until_idle()
            page = ask(running.url, "/metrics").body.decode()
            assert f'{prefix}request_success_total{{finished_reason="abort",model_name="table"}} 3.0' in page


@pytest.mark.slow  # 10,000 requests take a minute or two; the engine alone has as many in the default tier
def test_ten_thousand_requests_leave_nothing_behind(running: Running) -> None:
    """No block, slot, thread, file, task or memory, whether clients wait, read a stream, are refused or leave."""

    def asked(number: int) -> bool:
        path, fields = mixed(number % 200)
        if number % 10 == 9:
            connection = connect(running, {**BODY, "stream": number % 4 == 1})
            if number % 20 == 9:
                connection.recv(50)
            connection.close()
            return True
        if number % 25 == 0:
            return ask(running.url, "/v1/completions", {"prompt": "a", "top_p": 5}).status == 400
        fields = {**fields, "max_tokens": 4} if path != "/api" else {**fields, "tokens_to_generate": 4}
        return ask(running.url, path, fields).status == 200

    def left() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with ThreadPoolExecutor(6) as clients:
        assert all(clients.map(asked, range(2000)))
        running.wait_until_idle()
        before, memory = left(), resident()
        for first in range(2000, 10_000, 1000):
            assert all(clients.map(asked, range(first, first + 1000)))
            running.table.plans.clear()
        running.wait_until_idle()
    deadline = time.monotonic() + 60
    while left()[1] > before[1]:
        assert time.monotonic() < deadline, (left(), before)
        time.sleep(0.1)
    assert left()[0] <= before[0]
    assert not running.server.engine._open and resident() - memory < 20 << 20


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
