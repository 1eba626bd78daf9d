"""Streams that carry the engine's updates to the tasks that answer requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megatron.core.inference.request import Finish, Update
from megatron.serving.errors import ApiError


class ClientLeftError(Exception):
    """The client has closed its connection: nobody reads an answer."""


PING = object()
"""What a stream yields when it has had no update for a while."""


@dataclass(eq=False)
class Stream:
    """The updates of a few requests, in the order of steps: ``async for update in stream``.

    Raises ApiError for a request that failed (500), and for one that asks for what can't be (400). ``fail`` ends it
    early. ``form``: the field that says what form the texts have.
    ``is_live``: its reader gets each update at once; otherwise all of them when the last request has ended, since a
    reader that wakes for each token takes the event loop's time.
    """

    unfinished: int
    is_live: bool = True
    form: str | None = None
    _items: asyncio.Queue[Update | BaseException | object] = field(default_factory=asyncio.Queue)
    _held: list[Update] = field(default_factory=list)
    _to_end: int = field(init=False)

    def __post_init__(self) -> None:
        self._to_end = self.unfinished

    def put(self, update: Update) -> None:
        """Add an update. Its reader gets it now, or with the last one."""
        self._held.append(update)
        finish = update.finish
        self._to_end -= finish is not None
        if self.is_live or self._to_end == 0 or (finish is not None and finish.reason == "error"):
            for each in self._held:
                self._items.put_nowait(each)
            self._held.clear()

    def fail(self, error: BaseException) -> None:
        """End the stream: ``error`` is raised in its reader, after the updates handed over so far (none, unless
        ``is_live``).
        """
        self._items.put_nowait(error)

    def ping(self) -> None:
        """Yield PING."""
        self._items.put_nowait(PING)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update | object:
        if self.unfinished == 0:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Update) and item.finish is not None:
            if item.finish.reason == "error":
                raise _failed(item.finish, self.form)
            self.unfinished -= 1
        return item


def _failed(finish: Finish, form: str | None) -> ApiError:
    if finish.is_refusal:
        return ApiError(str(finish.error), param=form, code="cannot_be_answered")
    return ApiError(f"the model failed on this request: {finish.error}", status=500, code="model_failed")
