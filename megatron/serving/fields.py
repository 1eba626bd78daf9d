"""What requests of OpenAI's endpoints may hold: the table that checks them and that /openapi.json is written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.suggestions import did_you_mean
from megatron.serving.errors import ApiError
from megatron.serving.schema import Schema, checked
from megatron.small_files import shown

MOST_PROMPTS = MOST_CHOICES = 128
MOST_LOGPROBS = 20
_MOST_TEXT = 1 << 23
_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1, "title": "a list of token ids"}
_TEXT = {"type": "string", "maxLength": _MOST_TEXT}
_WORD = {"type": "string", "maxLength": 512}
_SWITCH = {"type": "boolean"}
_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Field:
    """A field of a request's body. ``default``: its value when it is absent or null; ``about``: for the document."""

    name: str
    schema: Schema
    about: str
    default: Any = None
    required: bool = False


def _number(least: float, most: float, *, above: bool = False) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum" if above else "minimum": least, "maximum": most}


def _integer(least: int, most: int = 2**31 - 1) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _refused(name: str, reason: str, *neutral: Any) -> Field:
    """A field of OpenAI's that would change the answer, and that has no effect here but with ``neutral`` values."""
    schema = {"enum": list(neutral), "x-refusal": reason}
    return Field(name, schema, f"Not served: {reason}.")


PROMPT: Schema = {
    "title": "a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS},
    ],
}
_CONTENT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"], "x-refusal": "this model reads text alone"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "minLength": 1, "maxLength": 64},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _CONTENT_PART, "minItems": 1}]},
            "name": _WORD,
            "type": _WORD,
        },
        "required": ["role", "content"],
        "additionalProperties": True,
        "title": "an object with a role and content",
    },
}
_STOPS = {"type": "string", "minLength": 1, "maxLength": 1024}

MODEL = Field("model", _WORD, "Name of the served model, as GET /v1/models lists it; any request may leave it out.")
SAMPLING = (
    MODEL,
    Field("max_tokens", _integer(0), "Most tokens that are generated."),
    Field("min_tokens", _integer(0), "Tokens that are generated before the text may end.", 0),
    Field("temperature", _number(0, 100), "Divides the logits; 0 always takes the likeliest token.", 1.0),
    Field("top_p", _number(0, 1, above=True), "Keeps the likeliest tokens until their probabilities exceed p.", 1.0),
    Field("top_k", _integer(-1), "Keeps the k likeliest tokens; 0 and -1 keep all.", 0),
    Field("min_p", _number(0, 1), "Drops tokens less likely than this share of the likeliest one.", 0.0),
    Field(
        "repetition_penalty", _number(0, 100, above=True), "Makes tokens of prompt and text less likely; 1: off.", 1.0
    ),
    Field("presence_penalty", _number(-2, 2), "Subtracted once from logits of tokens of the generated text.", 0.0),
    Field("frequency_penalty", _number(-2, 2), "Subtracted for each occurrence in the generated text.", 0.0),
    Field(
        "logit_bias",
        {"type": "object", "additionalProperties": _number(-100, 100), "title": "an object of token ids and numbers"},
        "Added to the logits of tokens, whose ids are the keys.",
        {},
    ),
    Field("allowed_token_ids", _IDS, "The only tokens that may be generated."),
    Field(
        "bad_words",
        {"type": "array", "items": _STOPS, "maxItems": 128},
        "Words that the text never holds, as the tokenizer spells them.",
        [],
    ),
    Field("seed", _integer(-(2**63), 2**63 - 1), "The same seed gives the same text; without it one is drawn."),
    Field("n", _integer(1, MOST_CHOICES), "Texts for each prompt.", 1),
    Field(
        "stop",
        {"anyOf": [_STOPS, {"type": "array", "items": _STOPS, "maxItems": 64}]},
        "Texts before which the answer ends.",
        [],
    ),
    Field(
        "stop_token_ids",
        {"type": "array", "items": _ID, "title": "a list of token ids"},
        "Tokens that end the text.",
        [],
    ),
    Field("include_stop_str_in_output", _SWITCH, "The answer ends after the stop text instead.", False),
    Field("ignore_eos", _SWITCH, "The end of a document doesn't end the text.", False),
    Field("skip_special_tokens", _SWITCH, "Leave special tokens out of the generated text.", True),
    _refused("spaces_between_special_tokens", "special tokens are written as they are", True),
    Field("truncate_prompt_tokens", _integer(-1), "Keep the last k tokens of a prompt; -1: as many as fit."),
    Field("return_token_ids", _SWITCH, "Add prompt_token_ids and token_ids to the answer.", False),
    Field("return_tokens_as_token_ids", _SWITCH, "Spell tokens of logprobs as token_id:17.", False),
    Field(
        "response_format",
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _WORD, "description": _TEXT, "schema": _OBJECT, "strict": _SWITCH},
                    "required": ["schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
        "The form of the text: any, a JSON object, or JSON of a schema.",
    ),
    Field(
        "structured_outputs",
        {
            "type": "object",
            "properties": {
                "json": _OBJECT,
                "regex": _STOPS,
                "choice": {"type": "array", "items": _STOPS, "minItems": 1, "maxItems": 1000},
                "grammar": {**_TEXT, "minLength": 1},
            },
            "additionalProperties": False,
        },
        "The form of the text: one of a JSON schema, a regular expression, a list of texts and a Lark grammar.",
    ),
    Field("stream", _SWITCH, "Send the text as server-sent events while it is generated.", False),
    Field(
        "stream_options",
        {
            "type": "object",
            "properties": {"include_usage": _SWITCH, "continuous_usage_stats": _SWITCH, "include_obfuscation": _SWITCH},
            "additionalProperties": False,
        },
        "With include_usage the last event counts the tokens; with continuous_usage_stats each one does.",
        {},
    ),
    Field("user", _WORD, "Accepted without effect."),
    Field("request_id", _WORD, "Accepted without effect; the header x-request-id names a request."),
    _refused("use_beam_search", "beams are not searched, so leave it out", False),
    _refused("priority", "requests are served in the order of their arrival", 0),
)
COMPLETION = (
    Field("prompt", PROMPT, "Texts or token ids to continue.", required=True),
    *SAMPLING,
    Field("add_special_tokens", _SWITCH, "Begin a prompt's tokens as the tokenizer begins a text.", True),
    Field("best_of", _integer(1, MOST_CHOICES), "Generate this many texts, and answer with the n likeliest a token."),
    Field("prompt_logprobs", _integer(0, MOST_LOGPROBS), "Likeliest tokens at each place of the prompt."),
    Field("echo", _SWITCH, "Begin the text with the prompt.", False),
    Field("logprobs", _integer(0, MOST_LOGPROBS), "Likeliest tokens that are listed at each place."),
    _refused("suffix", "text cannot be inserted before a suffix", ""),
)
CHAT = (
    Field("messages", MESSAGES, "The conversation so far.", required=True),
    *SAMPLING,
    Field("max_completion_tokens", _integer(1), "Another name of max_tokens."),
    Field("logprobs", _SWITCH, "Add the log-probability of each token.", False),
    Field("top_logprobs", _integer(0, MOST_LOGPROBS), "Likeliest tokens that are listed at each place.", 0),
    Field("echo", {"enum": [False]}, "Accepted without effect.", False),
    Field("add_special_tokens", _SWITCH, "Put the tokenizer's own tokens around what the template writes.", False),
    Field(
        "add_generation_prompt", _SWITCH, "The template begins the assistant's turn; default: true, unless continued."
    ),
    Field("continue_final_message", _SWITCH, "The answer continues the last message.", False),
    Field("chat_template", _TEXT, "A Jinja template in place of the server's, where the server trusts them."),
    Field("chat_template_kwargs", _OBJECT, "More variables of the template.", {}),
    Field("documents", {"type": "array", "items": _OBJECT}, "Documents that the template may write."),
    Field("metadata", _OBJECT, "Accepted without effect."),
    Field("store", _SWITCH, "Accepted without effect; nothing is stored."),
    Field("service_tier", _WORD, "Accepted without effect."),
    Field("parallel_tool_calls", _SWITCH, "Accepted without effect."),
    Field("prompt_cache_key", _WORD, "Accepted without effect: prompts with equal beginnings share their cache."),
    Field("safety_identifier", _WORD, "Accepted without effect."),
    _refused("tools", "this server calls no tools, so leave them out", []),
    _refused("tool_choice", "this server calls no tools, so leave it out", "none", "auto"),
    _refused("functions", "this server calls no functions, so leave them out", []),
    _refused("function_call", "this server calls no functions, so leave it out", "none", "auto"),
    _refused("modalities", 'this model writes text alone: ["text"]', ["text"]),
    _refused("audio", "this model writes text alone, so leave it out"),
    _refused("prediction", "predicted answers are not used, so leave it out"),
    _refused("reasoning_effort", "this server doesn't control reasoning, so leave it out"),
    _refused("verbosity", "this server doesn't control verbosity, so leave it out"),
    _refused("web_search_options", "this server searches nothing, so leave it out"),
)
TOKENIZE = (
    MODEL,
    Field("prompt", _TEXT, "A text; either this or messages."),
    Field("messages", MESSAGES, "A conversation, which the chat template writes as text."),
    Field(
        "add_special_tokens", _SWITCH, "Begin the tokens as the tokenizer begins a text; default: true for a prompt."
    ),
    Field(
        "add_generation_prompt", _SWITCH, "The template begins the assistant's turn; default: true, unless continued."
    ),
    Field("continue_final_message", _SWITCH, "The template leaves the last message open.", False),
    Field("chat_template", _TEXT, "A Jinja template in place of the server's, where the server trusts them."),
    Field("chat_template_kwargs", _OBJECT, "More variables of the template.", {}),
    Field("return_token_strs", _SWITCH, "Add the text of each token.", False),
)
DETOKENIZE = (MODEL, Field("tokens", {**_IDS, "minItems": 0}, "Token ids.", required=True))


def read_fields(body: Mapping[str, Any], table: Sequence[Field]) -> dict[str, Any]:
    """The value of every field of ``table``; null is as good as absent. Raises ApiError for the first that is wrong."""
    names = [field.name for field in table]
    for name in body:
        if name not in names:
            raise ApiError(
                f"{shown(name)} is not a field of this request{did_you_mean(name, names)}; /openapi.json lists them",
                param=name[:60],
                code="unknown_field",
            )
    found = {}
    for field in table:
        value = body.get(field.name)
        if value is None and field.required:
            raise ApiError(f"{field.name} is missing; {field.about[:1].lower()}{field.about[1:]}", param=field.name)
        found[field.name] = field.default if value is None else checked(value, field.schema, field.name)
    return found
