"""The engine in its own thread, and the streams that carry its updates to the server's event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, Update
from megatron.errors import MegatronError
from megatron.serving.errors import ApiError

if TYPE_CHECKING:
    from megatron.serving.metrics import Metrics

_IDLE_SECONDS = 0.5


class ClientLeftError(Exception):
    """The client has closed its connection: nobody reads an answer."""


PING = object()
"""What a stream yields when it has had no update for a while."""


@dataclass
class Progress:
    """One request on its way, with the times that metrics need (seconds, monotonic)."""

    stream: Stream
    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    last_token: float = 0.0
    generated: int = 0


@dataclass(eq=False)
class Stream:
    """The updates of a few requests, in the order of steps: ``async for update in stream``.

    Raises ApiError (500) for a request that failed. ``fail`` ends it early.
    ``is_live``: its reader gets each update at once; otherwise all of them when the last request has ended, since a
    reader that wakes for each token takes time from the engine's thread.
    """

    unfinished: int
    is_live: bool = True
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
                raise ApiError(
                    f"the model failed on this request: {item.finish.error}", status=500, code="model_failed"
                )
            self.unfinished -= 1
        return item


@dataclass(eq=False)
class EngineThread:
    """Runs an engine in a thread; everything public but ``check`` is called in the event loop.

    ``max_queue``: requests that may wait besides those that run. ``on_failure``: called once when the engine raises;
    open streams raise a 503 then, as every later one does.
    """

    engine: Engine
    max_queue: int
    metrics: Metrics
    on_failure: Callable[[BaseException], None] = lambda failure: None
    last_heartbeat: float = field(default_factory=time.monotonic)
    closing: bool = False
    _raised: BaseException | None = None
    _open: dict[str, Progress] = field(default_factory=dict)
    _commands: queue.SimpleQueue[list[Request] | list[str] | None] = field(default_factory=queue.SimpleQueue)
    _seconds_per_request: float = 1.0

    def start(self) -> None:
        """Start the thread; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, *, seconds: float = 5.0) -> None:
        """End the thread after its current step."""
        self._commands.put(None)
        self._thread.join(seconds)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    @property
    def failure(self) -> BaseException | None:
        """Why no text can be generated any more: a lost rank, or the exception of a step."""
        return self.engine.error or self._raised

    def cut(self, error: ApiError) -> None:
        """End all open streams with ``error``."""
        for stream in {id(progress.stream): progress.stream for progress in self._open.values()}.values():
            stream.fail(error)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ApiError for a request that the engine can never answer; in any thread."""
        for request in requests:
            try:
                self.engine.check(request)
            except MegatronError as error:
                raise ApiError(str(error), code="cannot_be_answered") from None

    @contextmanager
    def open(self, requests: Sequence[Request], *, is_live: bool = True) -> Iterator[Stream]:
        """The stream of checked ``requests``; those that are unfinished at the end of the block are aborted.

        Raises ApiError for more requests than the queue ever has room for (400), when it has no room now (429), and
        when the engine is gone or about to end (503).
        """
        self._check_room(len(requests))
        stream, now = Stream(len(requests), is_live), time.monotonic()
        for request in requests:
            self._open[request.id] = Progress(stream, now, len(request.encoder_prompt or request.prompt))
        self._commands.put(list(requests))
        try:
            yield stream
        finally:
            left = [request.id for request in requests if self._open.pop(request.id, None) is not None]
            if left:
                self._commands.put(left)
                self.metrics.aborted(len(left))

    def _check_room(self, count: int) -> None:
        if self.failure is not None:
            raise _engine_failed()
        if self.closing:
            raise ApiError(
                "the server is shutting down; ask another one",
                status=503,
                code="shutting_down",
                headers={"retry-after": "1", "connection": "close"},
            )
        rows = self.engine.limits.max_requests
        limit = rows + self.max_queue
        if count > limit:
            raise ApiError(
                f"the request asks for {count:,} texts, and this server takes at most {limit:,} "
                "(--inference-max-requests and --max-queue): send fewer prompts in a request, or ask for fewer choices",
                code="too_many_texts",
            )
        if self.unfinished + count > limit:
            self.metrics.refused()
            seconds = ceil(min(60.0, self._seconds_per_request * self.unfinished / rows))
            raise ApiError(
                f"the server is busy: {self.unfinished:,} texts run or wait, {count:,} more are asked for, and its "
                f"limit is {limit:,} (--inference-max-requests and --max-queue); try again in {seconds} s",
                status=429,
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.engine.error is not None:  # a rank may be lost while there was nothing to do
                    raise self.engine.error
                if self.engine.has_work:
                    updates = self.engine.step()
                    if updates:
                        self._call_in_loop(self._deliver, updates)
                self.last_heartbeat = time.monotonic()
        except BaseException as error:  # whatever ends the engine must be said
            self._call_in_loop(self._fail, error)

    def _call_in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _take_commands(self) -> bool:
        """Submit and abort requests of the event loop; without work, wait a little for them.

        False when the thread is to end.
        """
        block = not self.engine.has_work
        while True:
            try:
                command = self._commands.get(block=block, timeout=_IDLE_SECONDS)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False
            for each in command:
                if isinstance(each, Request):
                    self.engine.submit(each)
                else:
                    self.engine.abort(each)

    def _deliver(self, updates: Sequence[Update]) -> None:
        now = time.monotonic()
        for update in updates:
            progress = self._open.get(update.request_id)
            if progress is None:  # its client has left meanwhile
                continue
            self.metrics.updated(progress, update, now)
            if update.tokens:
                progress.first_token = progress.first_token or now
                progress.last_token = now
                progress.generated += update.num_generated
            if update.finish is not None:
                del self._open[update.request_id]
                self._seconds_per_request += 0.1 * (now - progress.arrived - self._seconds_per_request)
            progress.stream.put(update)

    def _fail(self, error: BaseException) -> None:
        self._raised = error
        self.cut(_engine_failed())
        self.on_failure(error)


def _engine_failed() -> ApiError:
    return ApiError(
        "the generation engine has failed, and the server is about to end", status=503, code="engine_failed"
    )
