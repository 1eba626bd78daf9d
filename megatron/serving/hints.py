"""Fields and paths of other servers' interfaces, and what works here in their place."""

from __future__ import annotations

from collections.abc import Collection

_FIELDS = {
    "guided_json": 'structured_outputs: {"json": SCHEMA}',
    "guided_regex": 'structured_outputs: {"regex": PATTERN}',
    "guided_choice": 'structured_outputs: {"choice": [TEXT, …]}',
    "guided_grammar": 'structured_outputs: {"grammar": GRAMMAR}',
    "response_schema": 'response_format: {"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}',
    "format": 'response_format: {"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}',
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens, which counts generated tokens alone",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "tokens_to_generate": "max_tokens, or the path /api",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens, which counts generated tokens alone",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "num_beams": "use_beam_search: true, with best_of or n for the number of beams",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "inputs": "prompt",
    "input": "prompt or messages",
    "text": "prompt",
    "prompts": "prompt, which may be a list, or the path /api",
    "enable_thinking": 'chat_template_kwargs: {"enable_thinking": …}',
    "thinking": 'chat_template_kwargs: {"enable_thinking": …}',
}
"""Names in other interfaces, and what to send instead."""

_ADVICE = {
    "do_sample": "temperature: 0 always takes the most probable token, and 1 samples",
    "early_stopping": "a beam search ends when no beam can become better; leave it out",
    "extra_body": "it is a word of OpenAI's Python client, which sends what is in it as fields; do so as well",
    "guided_decoding_backend": "there is one implementation here; leave it out",
    "guided_whitespace_pattern": "JSON has at most a space, or a line break and indentation, between its parts",
    "system": 'send it as the first of the messages: {"role": "system", "content": TEXT}',
}
_OTHER_PATH = {
    "messages": "/v1/chat/completions takes them",
    "prompt": "/v1/completions takes it, and here messages have the conversation",
}

_CHAT, _TEXT = "POST /v1/chat/completions answers a conversation", "POST /v1/completions continues a text"
_NO_VECTORS, _NO_FILES = "this server generates only text, and has no vectors or scores", "nothing is stored here"
_NO_SOUND = "this model reads and writes only text"
_PATHS = {
    "/v1/responses": f"{_CHAT}: put the text of input into messages",
    "/responses": f"{_CHAT}: put the text of input into messages",
    "/v1/messages": _CHAT,
    "/v1": f"{_CHAT}, and {_TEXT}",
    "/v1/engines": "GET /v1/models names the model",
    "/models": "GET /v1/models names the model",
    "/api/chat": f"{_CHAT}, and PUT /api continues texts with Megatron-LM's fields",
    "/api/generate": f"{_TEXT}, and PUT /api does so with Megatron-LM's fields",
    "/api/tags": "GET /v1/models names the model",
    "/generate": f"PUT /api continues texts with Megatron-LM's fields, and {_TEXT}",
    "/generate_stream": f"{_TEXT}; with stream: true the text comes as it is generated",
    "/invocations": f"{_CHAT}, and {_TEXT}",
    "/completion": _TEXT,
    "/v1/chat": _CHAT,
    "/chat": _CHAT,
    "/v1/embeddings": _NO_VECTORS,
    "/embeddings": _NO_VECTORS,
    "/v1/rerank": _NO_VECTORS,
    "/rerank": _NO_VECTORS,
    "/v1/score": _NO_VECTORS,
    "/score": "POST /v1/completions with echo: true, max_tokens: 0 and logprobs scores a text",
    "/pooling": _NO_VECTORS,
    "/classify": _NO_VECTORS,
    "/v1/moderations": _NO_VECTORS,
    "/v1/files": _NO_FILES,
    "/v1/batches": f"{_NO_FILES}; send the requests of a batch one by one, several at once",
    "/v1/images/generations": _NO_SOUND,
    "/v1/audio/speech": _NO_SOUND,
    "/v1/audio/transcriptions": _NO_SOUND,
    "/v1/tokenize": "POST /tokenize",
    "/v1/detokenize": "POST /detokenize",
    "/v1/metrics": "GET /metrics",
    "/docs": "GET /openapi.json describes all fields",
    "/redoc": "GET /openapi.json describes all fields",
}


def hint_of_field(name: str, fields: Collection[str]) -> str | None:
    """The end of a sentence about the unknown field ``name`` of an endpoint with these ``fields``; None without any."""
    if name in _FIELDS and any(each in _FIELDS[name] for each in fields):
        return f"; send {_FIELDS[name]}"
    if name in _ADVICE:
        return f": {_ADVICE[name]}"
    return f": {_OTHER_PATH[name]}" if name in _OTHER_PATH else None


def hint_of_path(path: str) -> str | None:
    """What to use in place of a well-known ``path`` that this server doesn't have; None for any other."""
    return _PATHS.get(path.rstrip("/"))
