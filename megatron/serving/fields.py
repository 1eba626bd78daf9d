"""What requests of OpenAI's endpoints may hold: the table that checks them and that /openapi.json is written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.suggestions import did_you_mean
from megatron.serving.errors import ApiError
from megatron.serving.hints import hint_of_field
from megatron.serving.schema import Schema, checked, words
from megatron.small_files import shown

MOST_PROMPTS = MOST_CHOICES = 128
MOST_LOGPROBS = 20
_MOST_TEXT = 1 << 23
_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "title": "a token id from 0 to 2,147,483,647"}
_MOST_IDS = 1 << 20
_IDS = {
    "type": "array",
    "items": _ID,
    "minItems": 1,
    "maxItems": _MOST_IDS,
    "title": f"a list of one or more token ids, at most {_MOST_IDS:,}",
}
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
    "title": "a text, a list of texts, a list of token ids, or a list of lists of token ids; lists are not empty",
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS},
    ],
}
_CONTENT_PART = {
    "type": "object",
    "properties": {
        "type": {
            "enum": ["text", "input_text", "output_text", "refusal", "image_url"],
            "x-refusal": "only text and image_url are read, the latter by models that read images",
        },
        "image_url": {
            "type": "object",
            "properties": {
                "url": {"type": "string", "maxLength": 1 << 30},
                "detail": {"enum": ["auto", "low", "high"]},  # tiles follow from the model and the picture's shape
            },
            "required": ["url"],
            "additionalProperties": False,
            "title": "an object with a url",
        },
        "text": _TEXT,
        "refusal": _TEXT,  # of an assistant's part of this type
        "cache_control": _OBJECT,  # for servers that are told what to keep; this one finds equal beginnings itself
        "annotations": {"type": "array", "items": _OBJECT},
    },
    "required": ["type"],
    "additionalProperties": False,
}
_TOOLS = {"type": "array", "items": _OBJECT, "maxItems": 1000}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "minLength": 1, "maxLength": 64},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _CONTENT_PART, "minItems": 1}, {"type": "null"}]},
            "name": _WORD,
            "type": _WORD,
        },
        "required": ["role"],
        "additionalProperties": True,
        "title": "an object with a role and content",
    },
}
_STOPS = {"type": "string", "minLength": 1, "maxLength": 1024}

MODEL = Field(
    "model",
    _WORD,
    "Name of the served model or of an adapter, as /v1/models lists them; unless given the model. Other names are a "
    "404.",
)
_MAX_TOKENS = (
    "Maximum number of tokens to generate; prompt and text together must fit into the model's context. Default: "
)
SAMPLING = (
    MODEL,
    Field(
        "min_tokens",
        _integer(0),
        "Tokens to generate before the end of a document, a stop token or the end of a stop text can end the text.",
        0,
    ),
    Field(
        "temperature",
        _number(0, 100),
        "Divides the logits before sampling: below 1 the text is more predictable; 0 always takes the most probable "
        "token.",
        1.0,
    ),
    Field(
        "top_p",
        _number(0, 1, above=True),
        "Sample from the fewest most probable tokens whose probabilities together exceed this (nucleus sampling); 1: "
        "from all.",
        1.0,
    ),
    Field("top_k", _integer(-1), "Sample from this many most probable tokens; 0 and -1: from all.", 0),
    Field("min_p", _number(0, 1), "Sample from tokens at least this times as probable as the likeliest; 0: all.", 0.0),
    Field(
        "repetition_penalty",
        _number(0, 100, above=True),
        "Divides positive logits of tokens that prompt or text hold by this, and multiplies negative ones; 1: off.",
        1.0,
    ),
    Field(
        "presence_penalty",
        _number(-2, 2),
        "Subtracted from the logits of tokens that the generated text holds; negative values favour them.",
        0.0,
    ),
    Field(
        "frequency_penalty",
        _number(-2, 2),
        "Subtracted from a token's logit for each time that the generated text holds it; negative values favour it.",
        0.0,
    ),
    Field(
        "logit_bias",
        {
            "type": "object",
            "additionalProperties": _number(-100, 100),
            "maxProperties": _MOST_IDS,
            "title": "an object of token ids and numbers",
        },
        "Added to the logits: token ids as keys, numbers from -100 (practically never) to 100 (practically always).",
        {},
    ),
    Field("allowed_token_ids", _IDS, "Token ids that may be generated; all others have probability 0."),
    Field(
        "bad_words",
        {"type": "array", "items": _STOPS, "maxItems": 128},
        "Words whose token sequences are never generated, at the beginning of a text or after a space.",
        [],
    ),
    Field(
        "seed",
        _integer(-(2**63), 2**63 - 1),
        "Seed of the random numbers: the same request with the same seed gives the same text. Default: drawn, and "
        "named in the answer's seed.",
    ),
    Field(
        "n",
        _integer(1, MOST_CHOICES),
        "Number of choices, texts that continue the same prompt; each has its own random numbers, and the first is "
        "that of n = 1.",
        1,
    ),
    Field(
        "stop",
        {"anyOf": [_STOPS, {"type": "array", "items": _STOPS, "maxItems": 64}]},
        "One text or a list of them: the answer ends before the first that appears, wherever tokens begin and end.",
        [],
    ),
    Field(
        "stop_token_ids",
        {"type": "array", "items": _ID, "maxItems": _MOST_IDS, "title": f"a list of token ids, at most {_MOST_IDS:,}"},
        "Token ids that end the text; they are counted, and not in the text.",
        [],
    ),
    Field("include_stop_str_in_output", _SWITCH, "The answer ends after the stop text instead of before it.", False),
    Field(
        "ignore_eos", _SWITCH, "Generate max_tokens tokens even if one of the model's end tokens comes before.", False
    ),
    Field("skip_special_tokens", _SWITCH, "Leave special tokens, such as a document's end, out of the text.", True),
    _refused("spaces_between_special_tokens", "special tokens are written as they are", True),
    Field(
        "truncate_prompt_tokens",
        _integer(-1),
        "Keep only the last tokens of a prompt, this many; -1: as many as leave room for max_tokens. Default: refuse "
        "a prompt that doesn't fit.",
    ),
    Field("return_token_ids", _SWITCH, "Add prompt_token_ids and token_ids to each choice.", False),
    Field(
        "return_tokens_as_token_ids",
        _SWITCH,
        "Name tokens in logprobs by their ids, as token_id:17, since several tokens may have one text.",
        False,
    ),
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
        "Form of the text: any (text), a JSON object (json_object), or JSON that follows a schema (json_schema).",
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
        "Form of the text, exactly one of: a JSON schema (json), a regular expression (regex), a list of texts "
        "(choice), a Lark grammar (grammar).",
    ),
    Field("stream", _SWITCH, "Send the text as it is generated, as server-sent events; the last is [DONE].", False),
    Field(
        "stream_options",
        {
            "type": "object",
            "properties": {"include_usage": _SWITCH, "continuous_usage_stats": _SWITCH, "include_obfuscation": _SWITCH},
            "additionalProperties": False,
        },
        "Needs stream. include_usage: one more event at the end counts the tokens; continuous_usage_stats: every "
        "event does; include_obfuscation has no effect.",
        {},
    ),
    Field("user", _WORD, "Who asks; accepted without effect."),
    Field("request_id", _WORD, "The answer's id, after cmpl- or chatcmpl-; default: random. Logs have x-request-id."),
    Field(
        "use_beam_search",
        _SWITCH,
        "Search for the most probable texts instead of sampling them, with as many beams as best_of or n says; the "
        "answer is the n best. Needs no seed and no temperature, top_k, top_p, min_p and stop, and no stream.",
        False,
    ),
    Field(
        "length_penalty",
        _number(-10, 10),
        "Needs use_beam_search: texts are compared by the sum of their log-probabilities, divided by the number of "
        "tokens to this power.",
        1.0,
    ),
    _refused("priority", "requests are served in the order of their arrival", 0),
)
COMPLETION = (
    Field("prompt", PROMPT, "A text or list of token ids to continue, or several, each with n choices.", required=True),
    Field("max_tokens", _integer(0), f"{_MAX_TOKENS}16, or what fits."),
    *SAMPLING,
    Field(
        "add_special_tokens",
        _SWITCH,
        "Add the tokens that the tokenizer puts around a text, such as a beginning of text; prompts of token ids "
        "stay as they are.",
        True,
    ),
    Field(
        "best_of",
        _integer(1, MOST_CHOICES),
        "Generate this many texts for each prompt, and answer with the n of the highest mean log-probability a "
        "token; usage counts all.",
    ),
    Field(
        "prompt_logprobs",
        _integer(0, MOST_LOGPROBS),
        "Add log-probabilities of the prompt: of its tokens and of this many most probable ones at each place.",
    ),
    Field("echo", _SWITCH, "Begin text and logprobs with the prompt; with max_tokens 0 it is only scored.", False),
    Field(
        "logprobs",
        _integer(0, MOST_LOGPROBS),
        "Add the natural log-probability of each token, before temperature and filters, and of this many most "
        "probable ones.",
    ),
    _refused("suffix", "text cannot be inserted before a suffix", ""),
)
_TEMPLATE = (
    Field(
        "add_generation_prompt",
        _SWITCH,
        "Let the template begin the assistant's turn; default: true, unless continue_final_message is.",
    ),
    Field("chat_template", _TEXT, "Jinja template in place of the server's, if it has --trust-request-chat-template."),
    Field(
        "chat_template_kwargs",
        _OBJECT,
        "Further variables for the template, such as enable_thinking; not those that it has already.",
        {},
    ),
)
CHAT = (
    Field(
        "messages", MESSAGES, "The conversation, oldest message first; the template writes it as text.", required=True
    ),
    Field("max_tokens", _integer(0), f"{_MAX_TOKENS}as many as fit."),
    *SAMPLING,
    Field("max_completion_tokens", _integer(1), "Another name of max_tokens, which is the older one."),
    Field("logprobs", _SWITCH, "Add the natural log-probability of each token, before temperature and filters.", False),
    Field("top_logprobs", _integer(0, MOST_LOGPROBS), "Needs logprobs: this many likeliest tokens at each place.", 0),
    _refused("echo", "a conversation is not repeated, so leave it out", False),
    Field(
        "add_special_tokens",
        _SWITCH,
        "Add the tokens that the tokenizer puts around a text, which templates usually write themselves.",
        False,
    ),
    Field("continue_final_message", _SWITCH, "The answer continues the last message instead of beginning one.", False),
    *_TEMPLATE,
    Field(
        "documents",
        {"type": "array", "items": _OBJECT},
        "Documents for templates that write them, for retrieval-augmented generation.",
    ),
    Field("metadata", _OBJECT, "Labels of the request; accepted without effect."),
    Field("store", _SWITCH, "Accepted without effect; nothing is stored."),
    Field("service_tier", _WORD, "Accepted without effect; there is one tier."),
    Field("parallel_tool_calls", _SWITCH, "Accepted without effect; no tools are called."),
    Field("prompt_cache_key", _WORD, "Accepted without effect: prompts with equal beginnings share their cache."),
    Field("safety_identifier", _WORD, "Who asks; accepted without effect."),
    Field("tools", _TOOLS, "Needs tool_choice none: no tools are called, and the template isn't told of them.", []),
    _refused("tool_choice", "this server calls no tools, so leave it out", "none", "auto"),
    Field("functions", _TOOLS, "Needs function_call none: no functions are called.", []),
    _refused("function_call", "this server calls no functions, so leave it out", "none", "auto"),
    _refused("modalities", 'this model writes only text: ["text"]', ["text"]),
    _refused("audio", "this model writes only text, so leave it out"),
    _refused("prediction", "predicted answers are not used, so leave it out"),
    _refused("reasoning_effort", "this server doesn't control reasoning, so leave it out"),
    _refused("verbosity", "this server doesn't control verbosity, so leave it out"),
    _refused("web_search_options", "this server searches nothing, so leave it out"),
)
TOKENIZE = (
    MODEL,
    Field("prompt", _TEXT, "A text to make tokens of; give either this or messages."),
    Field("messages", MESSAGES, "A conversation to make tokens of, as the chat template writes it."),
    Field(
        "add_special_tokens",
        _SWITCH,
        "Add the tokens that the tokenizer puts around a text; default: true for a prompt, false for messages.",
    ),
    Field("continue_final_message", _SWITCH, "Leave the last message open, as for an answer that continues it.", False),
    *_TEMPLATE,
    Field("return_token_strs", _SWITCH, "Add token_strs, the text of each token.", False),
)
DETOKENIZE = (
    MODEL,
    Field(
        "tokens",
        {**_IDS, "minItems": 0, "title": f"a list of token ids, at most {_MOST_IDS:,}"},
        "Token ids to spell as text.",
        required=True,
    ),
)


def read_fields(body: Mapping[str, Any], table: Sequence[Field]) -> dict[str, Any]:
    """The value of every field of ``table``; null is as good as absent. Raises ApiError for the first that is wrong."""
    names = [field.name for field in table]
    for name in body:
        if name not in names:
            hint = hint_of_field(name, names) or f"{did_you_mean(name, names)}; /openapi.json lists them"
            raise ApiError(
                f"{shown(name)} is not a field of this request{hint}",
                param=name[:60],
                code="unknown_field",
            )
    found = {}
    for field in table:
        value = body.get(field.name)
        if value is None and field.required:
            what = "null" if field.name in body else "missing"
            raise ApiError(f"{field.name} is {what}; it must be {words(field.schema)}", param=field.name)
        found[field.name] = field.default if value is None else checked(value, field.schema, field.name)
    return found
