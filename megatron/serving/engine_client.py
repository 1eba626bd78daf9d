"""The engine as the HTTP server's process sees it: requests go out, reports of its steps come in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from megatron.core.inference.limits import EngineLimits
from megatron.core.inference.request import Request, Update
from megatron.core.inference.statistics import Statistics
from megatron.errors import MegatronError
from megatron.serving.errors import ApiError
from megatron.serving.grammars import Grammar
from megatron.serving.messages import Abort, Report, Submission
from megatron.serving.progress import Progress
from megatron.serving.streams import Stream

if TYPE_CHECKING:
    from megatron.serving.metrics import Metrics


@dataclass(eq=False)
class EngineClient:
    """Asks the engine at the other end of ``connection`` (see ``EngineLoop``). Used in the event loop alone, except
    ``check``.

    ``limits``: the engine's. ``max_queue``: requests that may wait besides those that run. ``on_failure``: called once
    with the cause when the engine fails or its process ends; open streams raise a 503 then, as every later one does.
    ``statistics``: the latest of the engine. ``last_report``: when it came, in seconds of ``time.monotonic``.
    """

    connection: Connection
    limits: EngineLimits
    max_queue: int
    metrics: Metrics
    on_failure: Callable[[str], None] = lambda failure: None
    statistics: Statistics = field(default_factory=Statistics)
    last_report: float = field(default_factory=time.monotonic)
    closing: bool = False
    failure: str | None = None
    _open: dict[str, Progress] = field(default_factory=dict)
    _seconds_per_request: float = 1.0
    # One thread, which keeps the order: prompts may be long, and the engine takes them while it computes.
    _sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "to-engine"))

    def start(self) -> None:
        """Read reports in the running event loop."""
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._read)

    def stop(self) -> None:
        """Let the engine end after its current step."""
        if not self.connection.closed:
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self._sender.shutdown(cancel_futures=True)
            self.connection.close()

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    def cut(self, error: ApiError) -> None:
        """End all open streams with ``error``."""
        for stream in {id(progress.stream): progress.stream for progress in self._open.values()}.values():
            stream.fail(error)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ApiError for a request that the engine can never answer; in any thread."""
        for request in requests:
            try:
                self.limits.check(request)
            except MegatronError as error:
                raise ApiError(str(error), code="cannot_be_answered") from None

    @contextmanager
    def open(
        self,
        requests: Sequence[Request],
        *,
        grammar: Grammar | None = None,
        is_live: bool = True,
    ) -> Iterator[Stream]:
        """The stream of checked ``requests``, whose answers follow ``grammar``; those that are unfinished at the end of
        the block are aborted.

        Raises ApiError for more requests than the queue ever has room for (400), when it has no room now (429), and
        when the engine is gone or about to end (503).
        """
        self._check_room(len(requests))
        stream, now = Stream(len(requests), is_live, None if grammar is None else grammar.param), time.monotonic()
        for request in requests:
            self._open[request.id] = Progress(stream, now, len(request.encoder_prompt or request.prompt))
        try:
            self._send(Submission(requests, None if grammar is None else grammar.source))
            yield stream
        finally:
            left = [request.id for request in requests if self._open.pop(request.id, None) is not None]
            if left:
                self._send(Abort(left))
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
        rows = self.limits.max_requests
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

    def _send(self, command: Submission | Abort) -> None:
        self._sender.submit(self._write, ForkingPickler.dumps(command))

    def _write(self, pickled: memoryview) -> None:
        with suppress(OSError):  # the engine's process has ended, of which `_read` hears
            self.connection.send_bytes(pickled)

    def _read(self) -> None:
        try:
            report: Report = self.connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            if self.failure is None:
                self._fail("its process has ended")
            return
        self.statistics, self.last_report = report.statistics, time.monotonic()
        self.metrics.stepped(report.step_tokens)
        self._deliver(report.updates)
        if report.failure is not None:
            self._fail(report.failure)

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

    def _fail(self, cause: str) -> None:
        is_first, self.failure = self.failure is None, cause  # the loss of a rank may be noticed after its effect
        if is_first:
            self.cut(_engine_failed())
            self.on_failure(cause)


def _engine_failed() -> ApiError:
    return ApiError(
        "the generation engine has failed, and the server is about to end", status=503, code="engine_failed"
    )
