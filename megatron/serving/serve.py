"""Serve a trained model: the engine runs in this process, and the HTTP server in one of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from megatron.core.inference.engine import Engine
from megatron.core.tokenizers.conversations import OWN, load_template, own_template
from megatron.errors import ConfigError, ParallelError
from megatron.serving.engine_loop import EngineLoop
from megatron.serving.http_process import ENDING, run_http
from megatron.serving.model import ServedModel
from megatron.serving.settings import ServerConfig
from megatron.serving.templates import Templates
from megatron.training.checkpoints.trained_model import TrainedModel
from megatron.training.evaluation.generating import decoder_start, end_ids


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


def serve(
    engine: Engine, model: ServedModel, config: ServerConfig, listener: socket.socket, *, keys: Sequence[str] = ()
) -> None:
    """Serve until a signal ends the server. Only a main thread can.

    Raises the engine's exception if that ends it, and ParallelError if the HTTP server's process is lost.
    """
    resource_tracker.ensure_running()  # starting it lets signals through
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # which the new process inherits, until it can handle them
    loop, http = start(engine, model, config, listener, keys=keys)
    with _signals_handed_to(http):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        http.join()
    loop.join()
    # The loss of a rank may be noticed after a launcher has sent SIGTERM for it.
    if loop.failure is not None:
        raise loop.failure
    if http.exitcode:
        how = f"signal {-http.exitcode}" if http.exitcode < 0 else f"code {http.exitcode}"
        raise ParallelError(f"the process of the HTTP server has ended with {how}; start the server again")


def start(
    engine: Engine, model: ServedModel, config: ServerConfig, listener: socket.socket, *, keys: Sequence[str] = ()
) -> tuple[EngineLoop, SpawnProcess]:
    """Start the HTTP server's process, which gets ``listener``, and the loop that runs ``engine`` for it."""
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(engine, ours, lambda grammar: model.constraints.compiled(grammar))
    arguments = (theirs, listener, engine.limits, model, config, tuple(keys))
    http = multiprocessing.get_context("spawn").Process(target=run_http, args=arguments, name="http", daemon=True)
    http.start()
    theirs.close()  # else the end of that process would not be noticed
    listener.close()
    loop.start()
    return loop, http


@contextmanager
def _signals_handed_to(process: SpawnProcess) -> Iterator[None]:
    """In the block ``process`` gets the signals that end the server."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        if process.is_alive():
            process_id = process.pid
            assert process_id is not None, "it has started"
            os.kill(process_id, number)

    before = {each: signal.signal(each, hand_on) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
