"""The ASGI application: routes and their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron.config.suggestions import did_you_mean
from megatron.core.images.prompts import CutImage
from megatron.core.inference.limits import EngineLimits
from megatron.core.inference.request import Result, Update
from megatron.serving.chat import ChatAnswer, chat_call, conversation, read_chat, with_images
from megatron.serving.completions import CompletionAnswer, read_completion
from megatron.serving.engine_client import EngineClient
from megatron.serving.errors import ApiError
from megatron.serving.generating import Answer, ApiCall, results, usage
from megatron.serving.grammars import Grammar, Grammars
from megatron.serving.hints import hint_of_path
from megatron.serving.megatron_api import answer_of, read_megatron
from megatron.serving.metrics import Metrics
from megatron.serving.middleware import CLIENT_LEFT, Keys, OneLength, RequestIds, read_body
from megatron.serving.model import ServedModel
from megatron.serving.openapi import document
from megatron.serving.responses import EventStream, error_response, json_response, watched
from megatron.serving.settings import ServerConfig
from megatron.serving.streams import PING, ClientLeftError, Stream
from megatron.serving.tokenizing import detokenized, read_tokenize, tokenized, tokenizer_info
from megatron.serving.work import Parameters, Value, Work
from megatron.version import __version__

PAGE = Path(__file__).parent / "page" / "index.html"
RELAXED = "x-schema-relaxed"
"""Header of an answer: keywords of the schema that it need not keep exactly."""
Endpoint = Callable[[HttpRequest], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server's parts and its endpoints. ``keys``: API keys of the flag and of the environment."""

    model: ServedModel
    engine: EngineClient
    metrics: Metrics
    config: ServerConfig
    grammars: Grammars
    keys: Sequence[str] = ()
    work: Work = field(default_factory=Work)

    @classmethod
    def connected(
        cls,
        connection: Connection,
        limits: EngineLimits,
        model: ServedModel,
        config: ServerConfig,
        *,
        keys: Sequence[str] = (),
    ) -> Server:
        """A server for the engine at the other end of ``connection``, which has these ``limits``."""
        metrics = Metrics(model.name, "vllm:" if config.vllm_metric_names else "megatron_")
        engine = EngineClient(connection, limits, config.max_queue, metrics)
        metrics.watch(engine)
        return cls(model=model, engine=engine, metrics=metrics, config=config, grammars=Grammars(model), keys=keys)

    @cached_property
    def app(self) -> Starlette:
        """The ASGI application."""
        middleware = [Middleware(RequestIds, log=not self.config.no_access_log), Middleware(OneLength)]
        if self.config.allowed_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.config.allowed_origins),
                    allow_methods=["GET", "POST", "PUT"],
                    allow_headers=["*"],
                    expose_headers=["x-request-id", "retry-after"],
                )
            )
        if self.keys:
            middleware.append(Middleware(Keys, keys=self.keys))
        return Starlette(
            routes=[
                Route(path, endpoint, methods=methods)
                for paths, methods, endpoint in self.endpoints()
                for path in paths
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: _refused,
                HTTPException: self._no_such_page,
                ClientLeftError: _nobody_reads,
                Exception: _failed,
            },
            lifespan=self._lifespan,
        )

    def endpoints(self) -> list[tuple[tuple[str, ...], list[str], Endpoint]]:
        """Paths, methods and handlers."""
        return [
            (("/",), ["GET"], self._page),
            (("/v1/completions", "/completions"), ["POST"], self._completions),
            (("/v1/chat/completions", "/chat/completions"), ["POST"], self._chat),
            (("/api",), ["PUT", "POST"], self._megatron),
            (("/v1/models",), ["GET"], self._models),
            (("/v1/models/{model:path}",), ["GET"], self._one_model),
            (("/tokenize",), ["POST"], self._tokenize),
            (("/detokenize",), ["POST"], self._detokenize),
            (("/tokenizer_info",), ["GET"], self._tokenizer_info),
            (("/health", "/v1/health"), ["GET"], self._health),
            (("/ping",), ["GET", "POST"], self._health),
            (("/version",), ["GET"], self._version),
            (("/metrics",), ["GET"], self._metrics),
            (("/openapi.json",), ["GET"], self._document),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            self.engine.stop()
            self.work.close()
            await self.grammars.close()
            if self.model.templates is not None:
                await self.model.templates.close()
            if self.model.pictures is not None:
                await self.model.pictures.close()

    async def _completions(self, request: HttpRequest) -> ASGIApp:
        body = await self._body(request)
        call = await self._run(request, read_completion, body, self.model, id=request.state.id)
        return await self._generate(request, call, CompletionAnswer(self.model, call))

    async def _chat(self, request: HttpRequest) -> ASGIApp:
        fields = await self._run(request, read_chat, await self._body(request), self.model)
        fields, pictures = await with_images(fields, self.model)
        text = await conversation(fields, self.model, trust_templates=self.config.trust_request_chat_template)
        call = await self._run(request, chat_call, fields, text, self.model, id=request.state.id, pictures=pictures)
        return await self._generate(request, call, ChatAnswer(self.model, call))

    async def _generate(self, request: HttpRequest, call: ApiCall, answer: Answer) -> ASGIApp:
        grammar = await self._checked(call)
        headers = {RELAXED: ", ".join(grammar.relaxed)} if grammar is not None and grammar.relaxed else {}
        if call.fields["stream"]:
            seconds = self.config.request_timeout
            opened = self.engine.open(call.requests, grammar=grammar)
            return EventStream(opened, lambda stream: _frames(stream, call, answer), seconds, headers)
        found = await self._results(request, call, grammar)
        return await asyncio.to_thread(lambda: json_response(answer.whole(found), headers=headers))

    async def _results(self, request: HttpRequest, call: ApiCall, grammar: Grammar | None = None) -> list[Result]:
        seconds = self.config.request_timeout
        with (
            self.engine.open(call.requests, grammar=grammar, is_live=False) as stream,
            watched(stream, request.receive, seconds=seconds),
        ):
            return await results(stream, call.requests)

    async def _checked(self, call: ApiCall) -> Grammar | None:
        """The grammar that the texts of a call follow, once all else is right. Raises ApiError."""
        await asyncio.to_thread(self.engine.check, call.requests[:: call.choices])
        return None if call.form is None else await self.grammars.checked(call.form)

    async def _megatron(self, request: HttpRequest) -> ASGIApp:
        # Everybody's line for curl names no content type; a web page must ask before it sends a PUT.
        body = await self._body(request, any_type=request.method == "PUT")
        call = await self._run(request, read_megatron, body, self.model, id=request.state.id)
        request.state.quiet = call.fields["no_log"]
        await self._checked(call)
        found = await self._results(request, call)
        return await asyncio.to_thread(lambda: json_response(answer_of(found, call, self.model)))

    async def _tokenize(self, request: HttpRequest) -> ASGIApp:
        fields, text = await self._run(request, read_tokenize, await self._body(request), self.model), None
        pictures: list[CutImage] = []
        if fields["messages"] is not None:
            fields, pictures = await with_images(fields, self.model)
            trust = self.config.trust_request_chat_template
            text = await conversation(fields, self.model, trust_templates=trust)
        return await self._run(request, tokenized, fields, self.model, text, pictures)

    async def _detokenize(self, request: HttpRequest) -> ASGIApp:
        return await self._run(request, detokenized, await self._body(request), self.model)

    async def _tokenizer_info(self, request: HttpRequest) -> ASGIApp:
        return json_response(tokenizer_info(self.model))

    async def _models(self, request: HttpRequest) -> ASGIApp:
        return json_response({"object": "list", "data": [self.model.listed(name) for name in self.model.names]})

    async def _one_model(self, request: HttpRequest) -> ASGIApp:
        name = request.path_params["model"]
        self.model.check_name(name)
        return json_response(self.model.listed(name))

    async def _health(self, request: HttpRequest) -> ASGIApp:
        silent = time.monotonic() - self.engine.last_report
        if self.engine.failure is not None:
            raise ApiError(f"the generation engine has failed: {self.engine.failure}", status=503)
        if self.engine.closing:
            raise ApiError("the server is shutting down", status=503)
        if silent > self.config.health_timeout:
            raise ApiError(f"the generation engine has finished no step for {silent:.0f} s", status=503)
        return Response()

    async def _version(self, request: HttpRequest) -> ASGIApp:
        return json_response({"version": __version__})

    async def _metrics(self, request: HttpRequest) -> ASGIApp:
        return Response(self.metrics.page(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def _document(self, request: HttpRequest) -> ASGIApp:
        return json_response(document(has_keys=bool(self.keys)))

    async def _page(self, request: HttpRequest) -> ASGIApp:
        return FileResponse(PAGE, media_type="text/html", headers={"cache-control": "no-cache"})

    async def _body(self, request: HttpRequest, *, any_type: bool = False) -> dict[str, Any]:
        most = self.config.max_body_size_mb << 20
        seconds = self.config.client_timeout
        return await read_body(request, self.work, most_bytes=most, seconds=seconds, any_type=any_type)

    async def _run(
        self,
        request: HttpRequest,
        function: Callable[Parameters, Value],
        /,
        *args: Parameters.args,
        **settings: Parameters.kwargs,
    ) -> Value:
        """What ``function`` returns for a request, whose body has been read: in a thread, whatever its size."""
        return await self.work.run(request.state.is_large, function, *args, **settings)

    async def _no_such_page(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        paths = [path for paths, _, _ in self.endpoints() for path in paths]
        if error.status_code == 404:
            path = request.url.path[:100]
            hint = hint_of_path(path)
            listed = f": {hint}" if hint else f"{did_you_mean(path, paths)}; /openapi.json lists them"
            message = f"there is no page {path!r}{listed}"
        else:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{request.method[:20]} {request.url.path[:100]}: {error.detail}; it takes {allowed}"
        return error_response(ApiError(message, status=error.status_code, headers=error.headers), request.scope)


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), "it is registered for these"
    return error_response(error, request.scope)


async def _nobody_reads(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError("the server failed on this request; its log says how", status=500), request.scope)


async def _frames(stream: Stream, call: ApiCall, answer: Answer) -> AsyncIterator[Mapping[str, Any] | object]:
    """The events of a stream: chunks, and the counts at the end of those that ask for them."""
    index_of = {request.id: index for index, request in enumerate(call.requests)}
    generated, cached = 0, [0] * len(call.requests)
    options = call.fields["stream_options"]
    with_usage, always = options.get("include_usage"), options.get("continuous_usage_stats")
    async for update in stream:
        if not isinstance(update, Update):
            yield PING
            continue
        index = index_of[update.request_id]
        generated += update.num_generated
        cached[index] = update.cached_tokens
        chunks: Iterable[dict[str, Any]] = answer.chunks(index, update)
        if update.prompt_logprobs or call.fields.get("echo"):  # all of the prompt in one
            chunks = await asyncio.to_thread(list, chunks)
        for chunk in chunks:
            if with_usage or always:
                chunk["usage"] = usage(call, generated=generated, cached=cached) if always else None
            yield chunk
    if with_usage:
        yield answer.last(usage(call, generated=generated, cached=cached))
