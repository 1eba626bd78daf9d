"""Schemas and grammars come from strangers: none ends the server, holds up a neighbour, or goes on after its time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.serving import bounded_process
from megatron.serving.bounded_process import ProcessPool
from megatron.serving.errors import ApiError
from tests.harness.sentences import check_sentence
from tests.harness.serving import Reply, Running, ask, served

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

NUMBER = {"type": "integer"}
CHAIN = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)} | {"2000": NUMBER}}
SLOW = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}$"} for n in range(10, 24)]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose processes for grammars have started."""
    with served() as server:
        assert constrained(server, json=NUMBER).status == 200
        yield server


def constrained(running: Running, *, max_tokens: int = 5, **form: Any) -> Reply:
    return ask(
        running.url,
        "/v1/completions",
        {"prompt": "a", "max_tokens": max_tokens, "temperature": 0, "structured_outputs": form},
    )


def processes(running: Running) -> set[int]:
    """Ids of the processes that compile."""
    pool = running.server.grammars.pool
    found = [each._running for each in (*pool._idle, *pool._busy)]
    return {each.pid for each in found if each is not None and each.returncode is None}


def test_a_chain_of_references_ends_a_process_and_not_the_server(running: Running) -> None:
    """2,000 references after each other overflowed the stack within the library: the HTTP server's process ended."""
    reply = constrained(running, json=CHAIN)
    assert (reply.status, reply.json["error"]["param"]) == (400, "structured_outputs"), reply.body
    check_sentence(reply.message)
    assert ask(running.url, "/health").status == 200 and constrained(running, json={"type": "null"}).status == 200


def test_a_refused_grammar_does_not_go_on_compiling(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve that took too long were refused, and had twelve threads and 6.6 GB for as long as they pleased."""
    pool, before = running.server.grammars.pool, threading.active_count()
    monkeypatch.setattr(pool, "seconds", 0.5)
    replies = list[Reply]()

    def ask_slow(number: int) -> None:
        replies.append(constrained(running, json={**SLOW, "title": str(number)}))

    clients = [threading.Thread(target=ask_slow, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    quick = 0
    while any(client.is_alive() for client in clients):
        assert constrained(running, json=NUMBER).status == 200  # kept: it waits for nobody
        quick += any(client.is_alive() for client in clients)
        assert len(processes(running)) <= 2
    for client in clients:
        client.join()
    assert {reply.status for reply in replies} == {400} and quick
    assert all("takes more than 0.5 s: make it simpler" in reply.message for reply in replies)
    assert not running.server.grammars.pool._busy and threading.active_count() <= before + 6  # of asyncio.to_thread
    for pid in processes(running):
        os.kill(pid, 0)


def test_what_is_wrong_with_a_grammar_is_found_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most clients send one schema with all their requests, and many at once."""
    asked, pool = list[Any](), running.server.grammars.pool
    ask_pool = pool.ask

    async def counted(question: Any) -> Any:
        asked.append(question["form"])
        return await ask_pool(question)

    monkeypatch.setattr(pool, "ask", counted)
    wrong, right = {"type": "strange"}, {"type": "boolean", "title": "once"}
    answers = list[tuple[int, int]]()
    clients = [
        threading.Thread(
            target=lambda: answers.append(
                (constrained(running, json=wrong).status, constrained(running, json=right).status)
            )
        )
        for _ in range(8)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert answers == [(400, 200)] * 8 and asked == [wrong, right]


def test_a_grammar_that_took_too_long_is_tried_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that was busy for a moment a sound schema was refused from then on."""
    pool, sound = running.server.grammars.pool, {"type": "boolean", "title": "late"}
    with monkeypatch.context() as patch:
        patch.setattr(pool, "seconds", 0.0)
        check_sentence(constrained(running, json=sound).message, "0")
    assert constrained(running, json=sound).status == 200


def test_the_size_of_a_schema_is_bounded_before_work(running: Running) -> None:
    reply = constrained(running, json={"type": "integer", "description": "x" * (1 << 20)})
    assert reply.status == 400
    check_sentence(reply.message, "structured_outputs", "1,048,576")


class SlowProcess:
    """Answers when it may."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool

    async def ask(self, question: Any) -> dict[str, Any]:
        await question["may_end"].wait()
        return {"number": question["number"]}

    async def close(self) -> None:
        """Nothing has started."""


def test_nobody_waits_for_others_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_process, "_Process", SlowProcess)

    async def asked(pool: ProcessPool, count: int) -> list[Any]:
        may_end = asyncio.Event()
        asked = [asyncio.create_task(pool.ask({"may_end": may_end, "number": number})) for number in range(count)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        may_end.set()
        return list(await asyncio.gather(*asked, return_exceptions=True))

    async def all_asked() -> tuple[list[Any], list[Any]]:
        late = await asked(ProcessPool("m", "grammar", size=2, seconds_to_wait=0.05), 3)
        many = await asked(ProcessPool("m", "grammar", size=1, most_waiting=2), 4)
        return late, many

    late, many = asyncio.run(all_asked())
    for found, status in ((late[2], 503), (many[2], 429)):
        assert isinstance(found, ApiError) and found.status == status and found.headers == {"retry-after": "5"}
        assert str(found).startswith("the server is busy with grammars of other requests: ")
    assert late[:2] == many[:2] == [{"number": 0}, {"number": 1}]


@pytest.mark.parametrize(
    ("schema", "relaxed", "words"),
    [
        ({"oneOf": [{"type": "string"}, NUMBER]}, "", ""),
        ({"oneOf": [{"type": "number"}, NUMBER]}, "oneOf", "a value may fit several schemas of a oneOf"),
        ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems", "Unimplemented keys"),
        ({"type": "array", "items": NUMBER, "uniqueItems": True, "maxItems": 1}, "", ""),
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, "", ""),
        ({"type": "object", "properties": {"uniqueItems": NUMBER}, "required": ["uniqueItems"]}, "", ""),
        ({"properties": {"a": {"oneOf": [{}, {"uniqueItems": True}]}}}, "oneOf, uniqueItems", "cannot be followed"),
    ],
)
def test_what_a_grammar_cannot_keep_is_said_or_refused(
    schema: dict[str, Any], relaxed: str, words: str, running: Running
) -> None:
    """A set in a model of pydantic was refused (uniqueItems); now the answer says what it need not keep."""
    for strict in (False, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        for stream in (False, True):
            fields = {"prompt": "a", "max_tokens": 4, "response_format": form, "stream": stream}
            reply = ask(running.url, "/v1/completions", fields)
            if strict and relaxed:
                assert reply.status == 400 and words in reply.message, reply.body
            else:
                assert reply.status == 200, reply.body
                assert reply.headers.get("x-schema-relaxed", "") == ("" if strict else relaxed)
