"""/openapi.json: the document of the endpoints, written from the tables that check requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.serving import megatron_api
from megatron.serving.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from megatron.version import __version__

_TEXT_ANSWER = {"text/plain": {"schema": {"type": "string"}}}
_JSON = "application/json"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
        "message": {"type": "string", "description": "Of /api alone: the same message."},
    },
}
_REFUSALS = {
    "400": "A field is wrong; param names it. Or the request asks for more texts than the server ever takes.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "The queue is full; retry-after says when to try again.",
    "503": "The server is about to end.",
    "504": "The request took too long.",
}


def document(*, has_keys: bool) -> dict[str, Any]:
    """The document in the form of OpenAPI 3.1; ``has_keys``: requests need an API key."""
    paths: dict[str, Any] = {
        "/v1/completions": {"post": _operation("Continue texts", COMPLETION, _answer("choices"), streams=True)},
        "/v1/chat/completions": {"post": _operation("Answer a conversation", CHAT, _answer("choices"), streams=True)},
        "/api": {
            method: _operation("Continue texts as Megatron-LM's server does", megatron_api.FIELDS, _answer("text"))
            for method in ("put", "post")
        },
        "/tokenize": {"post": _operation("Token ids of a text", TOKENIZE, _answer("tokens", "count"))},
        "/detokenize": {"post": _operation("Text of token ids", DETOKENIZE, _answer("prompt"))},
        "/tokenizer_info": {"get": _look("Special tokens and the chat template", _json("eos_token"))},
        "/v1/models": {"get": _look("The served model", _json("data"))},
        "/v1/models/{model}": {"get": _look("The served model", _json("id"), parameter="model")},
        "/version": {"get": _look("Version of the server", _json("version"), is_open=True)},
        "/metrics": {"get": _look("Numbers for Prometheus", _TEXT_ANSWER, is_open=True)},
        "/health": {"get": _look("Whether the engine works", {}, is_open=True)},
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Text generation", "version": __version__},
        "paths": paths,
    }
    if has_keys:
        described["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        described["security"] = [{"key": []}]
    return described


def body_schema(table: Sequence[Field]) -> dict[str, Any]:
    """The JSON Schema of a body: null is as good as absent, at any depth, but for fields that are required."""
    properties = {}
    for field in table:
        schema = _with_nulls(field.schema)
        schema = schema if field.required else _or_null(schema)
        default = {} if field.default is None else {"default": field.default}
        properties[field.name] = {**schema, "description": field.about, **default}
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in table if field.required],
        "additionalProperties": False,
    }


def _with_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` whose objects may have null in place of any property that they may lack."""
    found = dict(schema)
    if "anyOf" in found:
        found["anyOf"] = [_with_nulls(each) for each in found["anyOf"]]
    if "items" in found:
        found["items"] = _with_nulls(found["items"])
    if "properties" in found:
        parts = {name: _with_nulls(each) for name, each in found["properties"].items()}
        required = found.get("required", ())
        found["properties"] = {name: each if name in required else _or_null(each) for name, each in parts.items()}
    return found


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": list(names)}


def _json(*names: str) -> dict[str, Any]:
    return {_JSON: {"schema": _answer(*names)}}


def _operation(
    summary: str, table: Sequence[Field], answer: Mapping[str, Any], *, streams: bool = False
) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": body_schema(table)}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_refusals(*_REFUSALS)},
    }


def _look(
    summary: str, answer: Mapping[str, Any], *, parameter: str | None = None, is_open: bool = False
) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary}
    if is_open:
        found["security"] = []
    statuses = ["503"] if is_open else ["401"]
    if parameter:
        found["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
        statuses.append("404")
    found["responses"] = {"200": {"description": "The answer.", "content": answer}, **_refusals(*statuses)}
    return found


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _REFUSALS[status], "content": {_JSON: {"schema": _ERROR}}} for status in statuses}
