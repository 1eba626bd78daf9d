"""The HTTP server, in a process of its own beside the engine's: uvicorn, signals, connections."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import h11
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.core.inference.limits import EngineLimits
from megatron.core.tokenizers.end_tokens import described
from megatron.serving.app import Server
from megatron.serving.errors import ApiError
from megatron.serving.model import ServedModel
from megatron.serving.responses import encoded
from megatron.serving.settings import ServerConfig

END = signal.SIGUSR1
"""The signal that ends this process; those that end the server are for the engine's."""

_GRACE_SECONDS = 5
_LARGEST_HEADERS = 1 << 16


@dataclass(frozen=True)
class HttpParts:
    """What the HTTP server is made of; see ``Server``."""

    limits: EngineLimits
    model: ServedModel
    config: ServerConfig
    keys: Sequence[str]


def run_http(connection: Connection, listener: socket.socket) -> None:
    """The whole of the HTTP server's process: serve on ``listener`` until ``END``, or until the engine is gone. Its
    parts are the first that ``connection`` brings.
    """
    _log_to_stderr()
    try:
        parts: HttpParts = connection.recv()
    except (EOFError, OSError):  # the engine's process has ended
        return
    sys.setswitchinterval(0.001)  # the event loop soon gets its turn while threads work
    server = Server.connected(connection, parts.limits, parts.model, parts.config, keys=parts.keys)
    HttpServer(server).run([listener])


def uvicorn_config(server: Server) -> uvicorn.Config:
    """uvicorn's settings, from the server's."""
    return uvicorn.Config(
        server.app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, int(server.config.client_timeout)),
        timeout_graceful_shutdown=_GRACE_SECONDS,
        h11_max_incomplete_event_size=_LARGEST_HEADERS,
    )


def _log_to_stderr() -> None:
    """Write log lines with their time, for the server's loggers alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in (("megatron.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which ends in order on ``END``, and when the engine fails."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn_config(server))
        self.server = server
        server.engine.on_failure = self._end_after

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Handle ``END``, also one that came during the start, while the server runs. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(END, self.handle_exit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (END,))
        try:
            yield
        finally:
            signal.signal(END, signal.SIG_IGN)  # one more would kill the process, which ends anyway

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests, give unfinished ones their time, and end; a second signal ends at once."""
        self.force_exit = self.server.engine.closing
        self.should_exit = True
        self.server.engine.closing = True

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            model, url = self.server.model, f"http://{f'[{host}]' if ':' in host else host}:{port}"
            print(
                f"serving {model.name} at {url} (texts end with {described(model.end_ids, model.tokenizer)})",
                flush=True,
            )

    @override
    async def main_loop(self) -> None:
        """Serve; after a signal, answer until unfinished texts have ended, and cut them when their time is over.

        Load balancers learn from /health that the server ends, and their clients from a 503.
        """
        await super().main_loop()
        engine = self.server.engine
        deadline = time.monotonic() + self.server.config.shutdown_timeout
        while engine.unfinished and not self.force_exit and engine.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        engine.cut(ApiError("the server is shutting down; the text ends here", status=503, code="shutting_down"))

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, and leave the engine, which uvicorn forgets after a second signal."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def _end_after(self, failure: str) -> None:
        self.should_exit = True


class Protocol(H11Protocol):
    """uvicorn's HTTP with a limit on the time for a request's headers, and errors in JSON."""

    @override
    def connection_made(self, transport: Any) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait_for_headers()

    @override
    def data_received(self, data: bytes) -> None:
        """Take bytes; the time for headers runs on until they are complete."""
        waiting = self._late
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            waiting.cancel()
        elif waiting.cancelled():
            self._wait_for_headers()

    def _wait_for_headers(self) -> None:
        self._late = self.loop.call_later(self.config.timeout_keep_alive, self.timeout_keep_alive_handler)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._late.cancel()
        super().connection_lost(exc)

    @override
    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request, unless an answer has already begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encoded(ApiError(f"{msg} It is not HTTP/1.1, or its headers are too large.").body())
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
