"""ASGI middleware: request ids, the access log, API keys, and limits of request bodies."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.serving.errors import ApiError
from megatron.serving.responses import error_response
from megatron.serving.work import INLINE_BYTES, LARGE_BYTES, Work, give_back_memory
from megatron.small_files import parse_json

logger = logging.getLogger("megatron.serving.access")
_OPEN = frozenset({"/", "/health", "/v1/health", "/ping", "/version", "/metrics", "/openapi.json"})
CLIENT_LEFT = 499
"""The status that access logs write for a client that has left."""


class RequestIds:
    """Gives each request an id, which its answer names in ``x-request-id``, and writes the access log.

    A client may choose it. The id in the scope's state, by which the engine tells requests apart, is always the
    server's own: two requests may name the same. Bodies, keys and query strings are never logged.
    """

    def __init__(self, app: ASGIApp, *, log: bool) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it when it has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope["state"]["id"] = own = secrets.token_hex(12)
        request_id = given if re.fullmatch(r"[\w.-]{1,64}", given) else own
        scope["state"]["quiet"] = scope["state"]["is_large"] = False
        started, status = time.perf_counter(), CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["state"]["is_large"]:
                asyncio.get_running_loop().run_in_executor(None, give_back_memory)
            if self._log and not scope["state"]["quiet"]:
                client = (scope.get("client") or ("-",))[0]
                line = f"{scope['method']} {quote(scope['path'])}"
                seconds = time.perf_counter() - started
                logger.info("%s %s %d %.3f s %s", client, line[:200], status, seconds, request_id)


class Keys:
    """Refuses requests without one of the keys (``Authorization: Bearer KEY``), except for pages about the server."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with a right key, or to an open page."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._is_right(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "this server needs an API key: send the header Authorization: Bearer KEY with one of its keys",
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(error, scope)(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        found = [hmac.compare_digest(given, each) for each in self._keys]  # all of them, so the time tells nothing
        return scheme.lower() == "bearer" and any(found)


class OneLength:
    """Refuses requests whose body has two lengths, or one that a proxy in front may read in another way.

    Such a proxy takes the end of the body for another client's request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with one length."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        if "content-length" in headers:
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
        elif scope["http_version"] == "1.0":
            message = "the request has Transfer-Encoding, which HTTP/1.0 doesn't know: send Content-Length"
        else:
            await self._app(scope, receive, send)
            return
        await error_response(ApiError(message, headers=_CLOSE), scope)(scope, receive, send)


async def read_body(
    request: HttpRequest, work: Work, *, most_bytes: int, seconds: float, any_type: bool = False
) -> dict[str, Any]:
    """The JSON object in a request's body, whatever its content type with ``any_type``; sets ``state.is_large``.

    Raises ApiError for a body that is none, too large, or too slow.
    """
    kind = request.headers.get("content-type", "")
    if not any_type and kind.partition(";")[0].strip().lower() != "application/json":
        default = ", which curl sends unless told otherwise" if "x-www-form-urlencoded" in kind else ""
        raise ApiError(
            f"the content type is {kind[:100]!r}{default}; send the header Content-Type: application/json (curl: "
            "-H 'Content-Type: application/json')",
            status=415,
        )
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(f"the content encoding {coding[:100]!r} is not read; send the body as it is", status=415)
    try:
        body = await asyncio.wait_for(_whole_body(request, most_bytes), seconds)
    except asyncio.TimeoutError:
        raise ApiError(f"the body took more than {seconds:g} s to arrive", status=408, headers=_CLOSE) from None
    except ClientDisconnect:
        raise ApiError("the body ends before its length", headers=_CLOSE) from None
    request.state.is_large = len(body) > LARGE_BYTES
    if len(body) <= INLINE_BYTES:
        return _parsed(body)
    return await work.run(request.state.is_large, _parsed, body)


def _parsed(body: bytes) -> dict[str, Any]:
    most = sum(map(body.count, (b",", b"[", b"{")))
    if most > _MOST_VALUES:
        raise ApiError(f"the body has about {most:,} values; at most {_MOST_VALUES:,} are read", status=413)
    gc.disable()  # which looks at all lists again and again while millions of them are made
    try:
        found: dict[str, Any] = parse_json(body, dict[str, Any], where="the body", error=ApiError)
    finally:
        gc.enable()
    return found


async def _whole_body(request: HttpRequest, most_bytes: int) -> bytes:
    """The request's body. One that is too large is read to its end and thrown away, or its client would not see the
    answer.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most_bytes:
            body += chunk
        else:
            body.clear()
    if size > most_bytes:
        raise ApiError(
            f"the body is larger than {most_bytes >> 20} MiB (--max-body-size-mb)", status=413, headers=_CLOSE
        )
    return bytes(body)


_MOST_VALUES = 1 << 21
_CLOSE = {"connection": "close"}  # what is left of the body is not read
