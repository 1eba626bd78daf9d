"""The server as a process: sockets, signals and the exit code."""

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
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.core.inference.engine import Engine
from megatron.core.tokenizers.conversations import OWN, load_template, own_template
from megatron.errors import ConfigError
from megatron.serving.app import Server
from megatron.serving.errors import ApiError
from megatron.serving.model import ServedModel
from megatron.serving.responses import encoded
from megatron.serving.settings import ServerConfig
from megatron.serving.templates import Templates
from megatron.training.checkpoints.trained_model import TrainedModel
from megatron.training.evaluation.generating import decoder_start, end_ids

_GRACE_SECONDS = 5
_LARGEST_HEADERS = 1 << 16


def bound_socket(config: ServerConfig) -> socket.socket:
    """A socket bound to where the flags say; raises ConfigError when it can't be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {config.host} --port {config.port}: {error.strerror or error}; name another port (0: any free "
            "one) or an address of this machine"
        ) from None
    return listener


def serve_trained(
    trained: TrainedModel, engine: Engine, config: ServerConfig, listener: socket.socket, *, keys: Sequence[str]
) -> None:
    """Serve a trained model; see ``serve``."""
    model = served_model(trained, config, max_length=engine.limits.max_length, quantization=engine.quantization)
    serve(Server.around(engine, model, config, keys=keys), listener)


def served_model(
    trained: TrainedModel, config: ServerConfig, *, max_length: int, quantization: str | None = None
) -> ServedModel:
    """What the server serves; raises ConfigError and DataError for a template that can't be used."""
    tokenizer, files = trained.tokenizer, trained.config.tokenizer
    name = config.served_model_name or Path(str(trained.config.checkpoint.load)).resolve().name
    templates = None
    if config.chat_template is not None or own_template(files.tokenizer_model) is not None:
        template = load_template(config.chat_template or OWN, files.tokenizer_model, learned="assistant")
        templates = Templates(template.source, template.tokens)
    suffix = (f"-{quantization}" if quantization else "") + "-fp32" * trained.is_upcast
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_length=max_length,
        fingerprint=f"iteration-{trained.folder.iteration}-tokenizer-{tokenizer.fingerprint[:12]}{suffix}",
        end_ids=end_ids(tokenizer, config.end_tokens),
        templates=templates,
        decoder_start=decoder_start(trained),
    )


def serve(server: Server, listener: socket.socket) -> None:
    """Serve until a signal ends the server. Raises the engine's exception if that ends it."""
    _log_to_stderr()
    ServerProcess(server).run([listener])
    # The loss of a rank may be noticed after a launcher has sent SIGTERM for it.
    if (failure := server.thread.failure) is not None:
        raise failure


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


class ServerProcess(uvicorn.Server):
    """uvicorn's server, which ends in order on SIGTERM, and when the engine fails."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn_config(server))
        self._server = server
        server.thread.on_failure = self._end_after

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals for as long as the server runs; unlike uvicorn's, a signal isn't raised again at the end.

        Only a main thread can.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests, give unfinished ones their time, and end; a second signal ends at once."""
        self.force_exit = self._server.thread.closing
        self.should_exit = True
        self._server.thread.closing = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            print(
                f"serving {self._server.model.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True
            )

    async def main_loop(self) -> None:
        """Serve; after a signal, answer until unfinished texts have ended, and cut them when their time is over.

        Load balancers learn from /health that the server ends, and their clients from a 503.
        """
        await super().main_loop()
        thread = self._server.thread
        deadline = time.monotonic() + self._server.config.shutdown_timeout
        while thread.unfinished and not self.force_exit and thread.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        thread.cut(ApiError("the server is shutting down; the text ends here", status=503, code="shutting_down"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, and end the engine's thread, which uvicorn leaves out after a second signal."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def _end_after(self, failure: BaseException) -> None:
        self.should_exit = True


class Protocol(H11Protocol):
    """uvicorn's HTTP with a limit on the time for a request's headers, and errors in JSON."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait_for_headers()

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._late.cancel()
        super().connection_lost(exc)

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
