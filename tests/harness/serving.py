"""A server whose model is a table: the next token is a hash of those before it, so tests take milliseconds."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from typing_extensions import override

from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits, StepPlan
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.serving.app import Server
from megatron.serving.engine_loop import EngineLoop
from megatron.serving.http_process import HttpServer
from megatron.serving.model import ServedModel
from megatron.serving.pictures import Pictures
from megatron.serving.serve import bound_socket, compiling
from megatron.serving.settings import ServerConfig
from megatron.serving.templates import Templates
from tests.harness.table_model import RunningTable, Table

END = "<|endoftext|>"
LONG = 60.0
"""Seconds after which a test fails that waits for what happens at once on a machine without other work."""
MERGES = ["t h", "th e", "i n", "\u010a \u010a", "o n", "Ġ t", "Ġ the", "\u00c3 \u00a9"]


def byte_tokenizer() -> RustTokenizer:
    """Bytes, a few longer tokens, two newlines among them, and the end of a document."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(merge.replace(" ", "") for merge in MERGES), END]
    vocabulary = {word: number for number, word in enumerate(words)}
    pipeline = tokenizers.Tokenizer(
        models.BPE(vocabulary, [(one, other) for one, _, other in (merge.partition(" ") for merge in MERGES)])
    )
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([END])
    end = vocabulary[END]
    return RustTokenizer(pipeline, name="HuggingFaceTokenizer", eod=end, pad=None, bos=None, eos=end)


@dataclass
class SlowTable(Table):
    """A table whose steps take ``seconds``, wait while it is ``held``, and raise what ``failure`` is."""

    seconds: float = 0.0
    failure: Exception | None = None
    may_step: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_step.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Compute no step in the block: what a test does there comes before the step, however busy the machine is."""
        self.may_step.clear()
        try:
            yield
        finally:
            self.may_step.set()

    @override
    def start(self, plan: StepPlan) -> RunningTable:
        """Compute a step."""
        time.sleep(self.seconds)
        assert self.may_step.wait(LONG), "the test holds the table"
        if self.failure is not None:
            raise self.failure
        return super().start(plan)


def slow_table(
    *,
    seconds: float = 0.0,
    max_requests: int = 8,
    max_length: int = 512,
    has_encoder: bool = False,
    image_shape: tuple[int, int, int] | None = None,
) -> SlowTable:
    """A table with the vocabulary of ``byte_tokenizer``."""
    limits = RunnerLimits(
        num_blocks=max_requests * max_length // 16 + 1,
        block_size=16,
        max_requests=max_requests,
        max_length=max_length,
        vocabulary=byte_tokenizer().vocab_size,
        max_encoder_length=max_length * has_encoder,
        image_shape=image_shape,
    )
    return SlowTable(limits, seconds=seconds)


@dataclass
class Running:
    """A server: its address, and its parts."""

    url: str
    table: SlowTable
    engine: Engine
    server: Server
    http_server: HttpServer

    def is_idle(self) -> bool:
        """Whether no request is left anywhere, and no block is held."""
        numbers = self.engine.statistics
        return not (self.server.engine.unfinished or numbers.running or numbers.waiting or numbers.cache_usage)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Return when ``condition`` holds; fail when it doesn't for long."""
        end = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < end, self.engine.statistics
            time.sleep(0.002)

    def wait_until_idle(self) -> None:
        """Fail when something is left."""
        self.wait_until(self.is_idle)


@contextlib.contextmanager
def served(
    table: SlowTable | None = None,
    *,
    options: SchedulerOptions | None = None,
    templates: Templates | None = None,
    pictures: Pictures | None = None,
    keys: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Running]:
    """A server on a free port, with uvicorn in front. ``pictures``: what reads images, of a table that has them."""
    table = table or slow_table()
    tokenizer = byte_tokenizer()
    engine = Engine(table, tokenizer=tokenizer, options=options)
    model = ServedModel(
        name="table",
        tokenizer=tokenizer,
        max_length=engine.limits.max_length,
        fingerprint="step-3-abc",
        end_ids=frozenset({tokenizer.eod}),
        templates=templates,
        decoder_start=0 if engine.limits.max_encoder_length else None,
        pictures=pictures,
    )
    config = ServerConfig(**{"port": 0, "no_access_log": True, **settings})
    with listening(engine, model, config, keys=keys) as (http_server, url):
        yield Running(url, table, engine, http_server.server, http_server)


@contextlib.contextmanager
def listening(
    engine: Engine, model: ServedModel, config: ServerConfig, *, keys: Sequence[str] = ()
) -> Iterator[tuple[HttpServer, str]]:
    """A server and its address. Its two processes are threads here, so that tests see and change what they hold."""
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(engine, ours, compiling(model))
    http_server = HttpServer(Server.connected(theirs, engine.limits, model, config, keys=keys))
    listener = bound_socket(config)
    thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
    loop.start()
    thread.start()
    while not http_server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield http_server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http_server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()
        loop.join()
        ours.close()


@dataclass
class Reply:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The sentence of a refusal."""
        return str(self.json["error"]["message"])

    @property
    def events(self) -> list[Any]:
        """What came as server-sent events, without the last, [DONE]."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame.startswith("data: ")]
        assert frames[-1] == "data: [DONE]", frames[-1:]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def ask(url: str, path: str, body: Any = None, *, method: str | None = None, headers: Any = None) -> Reply:
    """One request; ``body`` is sent as JSON unless it is bytes."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(
            method or ("GET" if data is None else "POST"),
            path,
            data,
            {"content-type": "application/json", **(headers or {})},
        )
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()
