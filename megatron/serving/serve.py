"""Serve a trained model: the engine runs in this process, and the HTTP server in one of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from megatron.core.inference.constrained import Constraint, ConstraintCompiler, Vocabulary
from megatron.core.inference.engine import Engine
from megatron.core.inference.limits import NamedFolder
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import ConfigError, ParallelError
from megatron.serving.engine_loop import EngineLoop
from megatron.serving.http_process import END, HttpParts, run_http
from megatron.serving.model import ServedModel
from megatron.serving.pictures import Pictures
from megatron.serving.settings import ServerConfig
from megatron.serving.templates import Templates
from megatron.training.checkpoints.trained_model import TrainedModel
from megatron.training.evaluation.generating import decoder_start, image_prompts, template_of

_ENDING = (signal.SIGTERM, signal.SIGINT)


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


def served_model(
    trained: TrainedModel,
    config: ServerConfig,
    *,
    max_length: int,
    quantization: str | None = None,
    adapters: Sequence[NamedFolder] = (),
) -> ServedModel:
    """What the server serves; raises ConfigError and DataError for a template that can't be used, and for an adapter
    with the model's name.
    """
    tokenizer = trained.tokenizer
    name = config.served_model_name or Path(str(trained.config.checkpoint.load)).resolve().name
    if any(each.name == name for each in adapters):
        raise ConfigError(
            f"--lora-modules names an adapter {name!r}, which is the name of the model, too: give the adapter another "
            "name, or the model with --served-model-name"
        )
    template = template_of(trained, config.chat_template)
    templates = None if template is None else Templates(template.source, template.tokens)
    suffix = (f"-{quantization}" if quantization else "") + "-fp32" * trained.is_upcast
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_length=max_length,
        fingerprint=f"iteration-{trained.folder.iteration}-tokenizer-{tokenizer.fingerprint[:12]}{suffix}",
        end_ids=end_ids(tokenizer, trained.chat, config.end_tokens),
        templates=templates,
        decoder_start=decoder_start(trained),
        adapters=tuple(adapters),
        pictures=_pictures(trained, config),
    )


def _pictures(trained: TrainedModel, config: ServerConfig) -> Pictures | None:
    """What reads images of requests; None for a model that reads texts alone."""
    prompts = image_prompts(trained)
    return None if prompts is None else Pictures(prompts, most=config.max_images, most_pixels=config.max_image_pixels)


def serve(
    engine: Engine, model: ServedModel, config: ServerConfig, listener: socket.socket, *, keys: Sequence[str] = ()
) -> None:
    """Serve until SIGTERM or SIGINT ends the server. Only a main thread can.

    Raises the engine's exception if that ends it, and ParallelError if the HTTP server's process is lost.
    """
    with _Signals() as signals:
        running = start(engine, model, config, listener, keys=keys)
        signals.hand_to(running.http)
        running.http.join()
    running.loop.join()
    # The loss of a rank may be noticed after a launcher has sent SIGTERM for it.
    if running.loop.failure is not None:
        raise running.loop.failure
    if code := running.http.exitcode:
        how = f"signal {-code}" if code < 0 else f"code {code}"
        raise ParallelError(f"the process of the HTTP server has ended with {how}; start the server again")


@dataclass(frozen=True)
class RunningServer:
    """The engine's loop in this process, and the process of the HTTP server, which ends on ``END``."""

    loop: EngineLoop
    http: SpawnProcess


def compiling(model: ServedModel) -> Callable[[str], Constraint]:
    """What compiles grammars that the HTTP server has checked (see ``Grammars``), for the model's vocabulary."""
    making, compilers = threading.Lock(), list[ConstraintCompiler]()

    def compiled(grammar: str) -> Constraint:
        with making:
            if not compilers:  # it holds the whole vocabulary, which most servers never need
                compilers.append(ConstraintCompiler(Vocabulary.of(model.tokenizer, model.end_ids)))
        return compilers[0].compiled(grammar)

    return compiled


def start(
    engine: Engine, model: ServedModel, config: ServerConfig, listener: socket.socket, *, keys: Sequence[str] = ()
) -> RunningServer:
    """Start the HTTP server's process, which gets ``listener``, and the loop that runs ``engine`` for it."""
    ours, theirs = multiprocessing.Pipe()
    http = multiprocessing.get_context("spawn").Process(
        target=run_http, args=(theirs, listener), name="http", daemon=True
    )
    with _blocked_signals():  # which the new process inherits
        http.start()
    theirs.close()  # else the end of that process would not be noticed
    listener.close()
    try:
        with suppress(OSError):  # that process has ended already; its exit code says so
            ours.send(HttpParts(engine.limits, model, config, tuple(keys)))
        loop = EngineLoop(engine, ours, compiling(model))
        loop.start()
    except BaseException:
        http.kill()  # nobody else ends it
        raise
    return RunningServer(loop, http)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """In the block, no signal that ends a server reaches this thread or what it starts."""
    resource_tracker.ensure_running()  # its own start, within that of the process, would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, END))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Signals:
    """In its block, SIGTERM and SIGINT are counted, and the HTTP server's process gets ``END`` for each of them; two at
    once may arrive as one.

    That process has both blocked. A terminal sends SIGINT to it as well, and a service manager SIGTERM: each signal
    would count twice.
    """

    def __init__(self) -> None:
        self._came = self._handed = 0
        self._process: SpawnProcess | None = None

    def __enter__(self) -> _Signals:
        self._before = {each: signal.signal(each, self._take) for each in _ENDING}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def hand_to(self, process: SpawnProcess) -> None:
        """Hand on the signals that have come and those that will."""
        self._process = process
        self._hand_on()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        self._hand_on()

    def _hand_on(self) -> None:
        while self._process is not None and self._process.is_alive() and self._handed < self._came:
            self._handed += 1
            assert self._process.pid is not None, "it has started"
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, END)
