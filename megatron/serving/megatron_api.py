"""/api: the endpoint of Megatron-LM's server, with its fields, ranges, defaults and messages.

What differs: each refusal has status 400, each field has its effect, and prompts don't depend on their neighbours.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.suggestions import did_you_mean
from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.serving.errors import ApiError
from megatron.serving.fields import Field
from megatron.serving.generating import Asked, Outcome
from megatron.serving.model import ServedModel
from megatron.serving.token_texts import TokenTexts, finite
from megatron.small_files import shown

_MOST_PROMPTS = 128
_SWITCHES = ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon", "no_log")
_SWITCH = {"type": "boolean"}
FIELDS = (
    Field(
        "prompts",
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": _MOST_PROMPTS},
        "Texts to continue.",
        required=True,
    ),
    Field("tokens_to_generate", {"type": "integer", "minimum": 0}, "Most tokens that are generated.", 64),
    Field("logprobs", _SWITCH, "Add the log-probability of each token but the first.", False),
    Field(
        "temperature",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "Divides the logits.",
        1.0,
    ),
    Field("top_k", {"type": "integer", "minimum": 0, "maximum": 1000}, "Keeps the k likeliest tokens; 0: all.", 0),
    Field("top_p", {"type": "number", "minimum": 0, "maximum": 1}, "Keeps the likeliest tokens up to p; 0: all.", 0.0),
    Field("top_p_decay", {"type": "number", "minimum": 0, "maximum": 1}, "Multiplies top_p after each token.", 0.0),
    Field("top_p_bound", {"type": "number", "minimum": 0, "maximum": 1}, "The least that top_p decays to.", 0.0),
    Field("add_BOS", _SWITCH, "Begin each prompt with the token that ends documents.", False),
    Field("stop_on_double_eol", _SWITCH, "An empty line ends the text.", False),
    Field("stop_on_eol", _SWITCH, "The end of a line ends the text.", False),
    Field("prevent_newline_after_colon", _SWITCH, "A colon isn't followed by a newline.", False),
    Field("no_log", _SWITCH, "Write no line of the access log.", False),
    Field("random_seed", {"type": "integer", "minimum": 0}, "Seed of the first prompt; the next has the next one."),
    Field("beam_width", {"enum": []}, "Not served."),
    Field("stop_token", {"enum": []}, "Not served."),
    Field("length_penalty", {"enum": []}, "Not served.", 1.0),
)
_NAMES = [field.name for field in FIELDS]
_RENAMED = {
    "max_len": "max_len is no longer used.  Replace with tokens_to_generate",
    "sentences": "sentences is no longer used.  Replace with prompts",
}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


class _Body:
    """A request's body; ``check`` refuses with a message of Megatron-LM's."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        defaults = {field.name: field.default for field in FIELDS}
        self.given = {name: value for name, value in body.items() if value is not None}
        self.values = {**defaults, **{name: self.given[name] for name in _NAMES if name in self.given}}

    def check(self, holds: bool, name: str, message: str) -> None:
        if not holds:
            raise ApiError(message, param=name)

    def integer(self, name: str, message: str) -> Any:
        value = self.values[name]
        self.check(value is None or _is_integer(value), name, message)
        return value

    def number(self, name: str, message: str) -> Any:
        value = self.values[name]
        self.check(_is_number(value), name, message)
        return value

    def switch(self, name: str) -> Any:
        self.check(isinstance(self.values[name], bool), name, f"{name} must be a boolean value")
        return self.values[name]


def checked_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, checked in Megatron-LM's order and refused with its messages. Raises ApiError."""
    body = _Body(given)
    body.check("prompts" in body.given, "prompts", "prompts argument required")
    for name, message in _RENAMED.items():
        body.check(name not in body.given, name, message)
    for name in body.given:
        if name not in _NAMES:
            raise ApiError(
                f"{shown(name)} is not a field of /api{did_you_mean(name, _NAMES)}; it has {', '.join(_NAMES)}",
                param=name[:60],
                code="unknown_field",
            )
    _check_prompts(body)
    tokens = body.integer("tokens_to_generate", "tokens_to_generate must be an integer greater than 0")
    message = "tokens_to_generate must be an integer greater than or equal to 0"
    body.check(tokens >= 0, "tokens_to_generate", message)
    logprobs = body.switch("logprobs")
    body.check(tokens > 0 or logprobs, "logprobs", "tokens_to_generate=0 implies logprobs should be True")
    _check_sampling(body)
    body.switch("add_BOS")
    empty = "" in body.values["prompts"] and not body.values["add_BOS"]
    body.check(not empty, "prompts", "Empty prompts require add_BOS=true")
    for name in _SWITCHES:
        body.switch(name)
    seed = body.integer("random_seed", "random_seed must be integer")
    body.check(seed is None or seed >= 0, "random_seed", "random_seed must be a positive integer")
    _check_beams(body)
    return body.values


def _check_prompts(body: _Body) -> None:
    prompts = body.values["prompts"]
    is_right = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    body.check(is_right, "prompts", "prompts is not a list of strings")
    body.check(len(prompts) > 0, "prompts", "prompts is empty")
    body.check(len(prompts) <= _MOST_PROMPTS, "prompts", f"Maximum number of prompts is {_MOST_PROMPTS}")


def _check_sampling(body: _Body) -> None:
    message = "temperature must be a positive number less than or equal to 100.0"
    body.check(0.0 < body.number("temperature", message) <= 100.0, "temperature", message)
    message = "top_k must be {}equal to or greater than 0 and less than or equal to 1000"
    top_k = body.integer("top_k", message.format("an integer "))
    body.check(0 <= top_k <= 1000, "top_k", message.format(""))
    top_p = body.number("top_p", "top_p must be a positive float less than or equal to 1.0")
    body.check(not (top_p > 0 and top_k > 0), "top_p", "cannot set both top-k and top-p samplings.")
    body.check(0 <= top_p <= 1.0, "top_p", "top_p must be less than or equal to 1.0")
    decay = body.number("top_p_decay", "top_p_decay must be a positive float less than or equal to 1.0")
    body.check(decay == 0 or top_p > 0, "top_p_decay", "top_p_decay cannot be set without top_p")
    body.check(0 <= decay <= 1.0, "top_p_decay", "top_p_decay must be less than or equal to 1.0")
    bound = body.number("top_p_bound", "top_p_bound must be a positive float less than or equal to top_p")
    body.check(bound == 0 or top_p > 0, "top_p_bound", "top_p_bound cannot be set without top_p")
    body.check(0 <= bound <= top_p, "top_p_bound", "top_p_bound must be greater than 0 and less than top_p")


def _check_beams(body: _Body) -> None:
    width = body.integer("beam_width", "beam_width must be integer")
    body.check(width is None or width >= 1, "beam_width", "beam_width must be an integer > 1")
    body.integer("stop_token", "stop_token must be an integer")
    body.number("length_penalty", "length_penalty must be a float")
    body.check(width is None, "beam_width", "Beam search is no longer supported.")
    for name in ("stop_token", "length_penalty"):
        body.check(name not in body.given, name, f"{name} belongs to beam search, which is no longer supported")


def read_megatron(body: Mapping[str, Any], model: ServedModel, *, id: str) -> Asked:
    """What a request asks. Raises ApiError."""
    fields = checked_fields(body)
    most = fields["tokens_to_generate"]
    first = [model.tokenizer.eod] if fields["add_BOS"] else []
    prompts = [
        model.checked_prompt(
            [*first, *model.ids_of_text(text, whole=not first, param="prompts")],
            truncate=None,
            most_new=most,
            param="prompts",
        )
        for text in fields["prompts"]
    ]
    given = fields["random_seed"]
    seed = secrets.randbits(31) if given is None else given
    stops = (*(["\n\n"] if fields["stop_on_double_eol"] else []), *(["\n"] if fields["stop_on_eol"] else []))
    sampling = Sampling(
        **{name: fields[name] for name in ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound")},
        forbidden_after=(model.newline_after_colon,) if fields["prevent_newline_after_colon"] else (),
    )
    requests = [
        Request(
            id=f"{id}-{number}",
            prompt=tuple(ids),
            max_tokens=most,
            sampling=sampling,
            stop=StopRules(token_ids=model.end_ids, strings=stops, include_string=True),
            seed=seed + number,
            logprobs=0 if fields["logprobs"] else None,
            prompt_logprobs=0 if fields["logprobs"] else None,
        )
        for number, ids in enumerate(prompts)
    ]
    return Asked(id=id, fields=fields, prompts=prompts, requests=requests, choices=1, seed=seed)


def answer_of(found: Sequence[Outcome], asked: Asked, model: ServedModel) -> dict[str, Any]:
    """Each prompt with its continuation, whose last token is the one that ended it, and its tokens."""
    texts = TokenTexts(model.tokenizer)
    segments, logprobs = [], []
    for prompt, outcome in zip(asked.prompts, found):
        segments.append(texts.segments([*prompt, *(token.id for token in outcome.tokens)]))
        values = [*outcome.prompt_logprobs[1:], *(token.logprobs for token in outcome.tokens)]
        logprobs.append([finite(each.logprob) for each in values if each is not None])
    return {
        "text": ["".join(each) for each in segments],
        "segments": segments,
        "logprobs": logprobs if asked.fields["logprobs"] else None,
    }
