"""Streams of updates to the tasks that answer requests."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

import pytest

from megatron.core.inference.request import Finish, Update
from megatron.serving.engine_client import EngineClient
from megatron.serving.errors import ApiError
from megatron.serving.streams import Stream
from tests.harness.sentences import expect_error
from tests.harness.serving import ask, served


async def taken(stream: Stream, seconds: float = 0.01) -> list[object]:
    """What a reader gets before it would wait."""
    found: list[object] = []
    try:
        while True:
            found.append(await asyncio.wait_for(anext(stream), seconds))
    except (asyncio.TimeoutError, StopAsyncIteration):
        return found


def of(request: str, text: str, finish: Finish | None = None) -> Update:
    """An update."""
    return Update(request_id=request, text=text, finish=finish)


def test_a_whole_answer_wakes_its_reader_once() -> None:
    """Readers that woke for each token of an answer that is sent as a whole took 4 % of the engine's time."""

    async def run() -> None:
        live, whole = Stream(2), Stream(2, is_live=False)
        updates = [of("a", "x"), of("b", "y", Finish("length")), of("a", "z"), of("a", "", Finish("stop"))]
        for number, update in enumerate(updates, start=1):
            for stream in (live, whole):
                stream.put(update)
            assert await taken(live) == [update]
            assert await taken(whole) == (updates if number == len(updates) else [])

    asyncio.run(run())


def test_a_failed_request_ends_a_whole_answer_at_once() -> None:
    """Its client would wait for the other texts, and then get none of them."""

    async def run() -> None:
        stream = Stream(2, is_live=False)
        stream.put(of("a", "x"))
        stream.put(of("b", "", Finish("error", error="NaN logits")))
        with expect_error(ApiError, "NaN"):
            await taken(stream)

    asyncio.run(run())


def test_only_streams_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer whose reader is woken by each token looks the same to its client."""
    live, opened = list[bool](), EngineClient.open

    def noted(
        client: EngineClient, requests: Any, *, grammar: Any, is_live: bool = True
    ) -> AbstractContextManager[Stream]:
        live.append(is_live)
        return opened(client, requests, grammar=grammar, is_live=is_live)

    monkeypatch.setattr(EngineClient, "open", noted)
    with served() as running:
        body = {"prompt": "a", "max_tokens": 2}
        ask(running.url, "/v1/completions", body)
        ask(running.url, "/api", {"prompts": ["a"], "tokens_to_generate": 2}, method="PUT")
        ask(running.url, "/v1/completions", body | {"stream": True})
    assert live == [False, False, True]
