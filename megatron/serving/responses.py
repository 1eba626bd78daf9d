"""Answers in HTTP: JSON that any client can read, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron.serving.errors import ApiError
from megatron.serving.streams import PING, ClientLeftError, Stream

_PING_SECONDS = 15.0
_UNREAD_SECONDS = 5.0
_AT_ONCE = 1000  # items of a list whose JSON is made without a stop
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; an unpaired surrogate, which a message may quote, becomes a question mark."""
    return "".join(_pieces(value)).encode("utf-8", "replace")


def _pieces(value: Any) -> Iterator[str]:
    """Parts of the JSON of a value: other threads go on between them, and not while one is made."""
    if isinstance(value, list) and len(value) > _AT_ONCE:
        for start in range(0, len(value), _AT_ONCE):
            yield ("," if start else "[") + _ENCODER.encode(value[start : start + _AT_ONCE])[1:-1]
        yield "]"
    elif isinstance(value, (dict, list)) and any(isinstance(each, (dict, list)) for each in _values(value)):
        is_object, mark = isinstance(value, dict), ""
        yield "{" if is_object else "["
        for each in value:
            yield f"{mark}{_ENCODER.encode(each)}:" if is_object else mark
            yield from _pieces(value[each] if is_object else each)
            mark = ","
        yield "}" if is_object else "]"
    else:
        yield _ENCODER.encode(value)


def _values(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(encoded(value), status, headers, "application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """A refusal, in the shape of OpenAI's; on /api with ``message`` at the top, for Megatron-LM's clients."""
    message = {"message": str(error)} if scope["path"] == "/api" else {}
    return json_response({**message, **error.body()}, status=error.status, headers=error.headers)


@contextmanager
def watched(stream: Stream, receive: Receive, *, seconds: float) -> Iterator[None]:
    """Ends ``stream`` when the client leaves, and after ``seconds``; lets it ping while it is silent."""
    loop = asyncio.get_running_loop()
    too_late = ApiError(
        f"the request took more than {seconds:g} s (--request-timeout): ask for fewer tokens",
        status=504,
        code="timeout",
    )
    deadline = loop.call_later(seconds, stream.fail, too_late)
    watcher = loop.create_task(_watch(stream, receive))
    try:
        yield
    finally:
        deadline.cancel()
        watcher.cancel()


async def _watch(stream: Stream, receive: Receive) -> None:
    while True:
        with suppress(asyncio.TimeoutError):
            message = await asyncio.wait_for(receive(), _PING_SECONDS)
            if message["type"] == "http.disconnect":
                stream.fail(ClientLeftError())
                return
        stream.ping()


@dataclass
class EventStream:
    """An ASGI response of server-sent events: the events that ``frames`` makes from the stream of ``opened``.

    The stream is closed, and its requests aborted, however the response ends. An error before the first event is
    raised, so that it gets a status; a later one is an event.
    """

    opened: AbstractContextManager[Stream]
    frames: Callable[[Stream], AsyncIterator[Mapping[str, Any] | object]]
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        with self.opened as stream, watched(stream, receive, seconds=self.seconds):
            # A client that reads nothing holds up `send`, so that the stream's own time limit is not seen.
            unread = asyncio.get_running_loop().call_later(self.seconds + _UNREAD_SECONDS, task.cancel)
            try:
                more = [(name.encode(), value.encode()) for name, value in self.headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *more]})
                with suppress(ClientLeftError):
                    await self._send_all(stream, send)
            finally:
                unread.cancel()

    async def _send_all(self, stream: Stream, send: Send) -> None:
        try:
            async for frame in self.frames(stream):
                data = b": ping\n\n" if frame is PING else b"data: " + encoded(frame) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            last = b"data: " + encoded(error.body()) + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
