"""/api: the endpoint of Megatron-LM's server, with its fields, ranges, defaults and messages.

What differs: each refusal has status 400, each field has its effect, and prompts don't depend on their neighbours.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.suggestions import did_you_mean
from megatron.core.inference.detokenizer import token_texts
from megatron.core.inference.request import BeamSearch, Request, Result, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.serving.errors import ApiError
from megatron.serving.fields import MOST_PROMPTS, Field
from megatron.serving.generating import ApiCall, check_scored
from megatron.serving.model import ServedModel
from megatron.serving.schema import WrongTypeError, checked
from megatron.serving.token_texts import finite
from megatron.small_files import shown

_UNIT = {"type": "number", "minimum": 0, "maximum": 1}
_TOP_P, _WHOLE = "must be a positive float less than or equal to {}", "must be an integer equal to or greater than 0"


@dataclass(frozen=True)
class ApiField(Field):
    """A field of /api. Megatron-LM's messages begin with its name: ``wrong_type``, and ``out_of_range`` if another."""

    wrong_type: str = ""
    out_of_range: str = ""

    def read(self, value: Any) -> Any:
        """The checked value. Raises ApiError."""
        try:
            return self.default if value is None else checked(value, self.schema, self.name)
        except WrongTypeError:
            raise ApiError(f"{self.name} {self.wrong_type}", param=self.name) from None
        except ApiError:
            raise ApiError(f"{self.name} {self.out_of_range or self.wrong_type}", param=self.name) from None


def _switch(name: str, about: str) -> ApiField:
    return ApiField(name, {"type": "boolean"}, about, False, wrong_type="must be a boolean value")


PROMPTS = Field(
    "prompts",
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PROMPTS},
    "Texts to continue.",
    required=True,
)
SETTINGS = (
    ApiField(
        "tokens_to_generate",
        {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "Maximum number of tokens to generate for each prompt; 0 scores the prompts, with logprobs.",
        64,
        wrong_type="must be an integer greater than 0",
        out_of_range="must be an integer greater than or equal to 0 and less than 2147483648",
    ),
    _switch("logprobs", "Add the natural log-probability of each token but the first, prompt included."),
    ApiField(
        "temperature",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "Divides the logits before sampling; top_k 1 always takes the most probable token.",
        1.0,
        wrong_type="must be a positive number less than or equal to 100.0",
    ),
    ApiField(
        "top_k",
        {"type": "integer", "minimum": 0, "maximum": 1000},
        "Sample from this many most probable tokens; 0: from all.",
        0,
        wrong_type=f"{_WHOLE} and less than or equal to 1000",
        out_of_range="must be equal to or greater than 0 and less than or equal to 1000",
    ),
    ApiField(
        "top_p",
        _UNIT,
        "Sample from the most probable tokens whose probabilities together exceed this; 0: from all.",
        0.0,
        wrong_type=_TOP_P.format("1.0"),
        out_of_range="must be less than or equal to 1.0",
    ),
    ApiField(
        "top_p_decay",
        _UNIT,
        "Multiplies top_p after each token; 0: it stays.",
        0.0,
        wrong_type=_TOP_P.format("1.0"),
        out_of_range="must be less than or equal to 1.0",
    ),
    ApiField(
        "top_p_bound",
        _UNIT,
        "The least value that top_p decays to.",
        0.0,
        wrong_type=_TOP_P.format("top_p"),
        out_of_range="must be greater than 0 and less than top_p",
    ),
    _switch("add_BOS", "Begin each prompt with the token that ends documents."),
    _switch("stop_on_double_eol", "Two newlines in a row end the text."),
    _switch("stop_on_eol", "A newline ends the text."),
    _switch("prevent_newline_after_colon", "Never generate a newline after a colon."),
    _switch("no_log", "Write no line of the access log for this request."),
    ApiField(
        "random_seed",
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "Seed of the first prompt, the next prompt's is one more; without it a seed is drawn.",
        wrong_type="must be integer",
        out_of_range="must be a positive integer of at most 63 bits",
    ),
)
BEAMS = (
    ApiField(
        "beam_width",
        {"type": "integer", "minimum": 1, "maximum": 1000},
        "Search for this many most probable texts of one prompt, which are all answered, the best first, with their "
        "scores.",
        wrong_type="must be integer",
        out_of_range="must be an integer from 1 to 1,000",
    ),
    ApiField(
        "stop_token",
        {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "Needs beam_width: the token that ends a text; default: those that end a document.",
        wrong_type="must be an integer",
    ),
    ApiField(
        "length_penalty",
        {"type": "number", "minimum": -10, "maximum": 10},
        "Needs beam_width: a score is the sum of log-probabilities, divided by the number of tokens to this power.",
        1.0,
        wrong_type="must be a float",
        out_of_range="must be a float from -10 to 10",
    ),
)
FIELDS: tuple[Field, ...] = (PROMPTS, *SETTINGS, *BEAMS)
_NAMES = [field.name for field in FIELDS]
_REPLACED = {
    "max_len": "max_len is no longer used.  Replace with tokens_to_generate",
    "sentences": "sentences is no longer used.  Replace with prompts",
}
_SAMPLING = ("temperature", "top_k", "top_p", "random_seed", "stop_on_double_eol", "stop_on_eol")


def checked_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, refused with Megatron-LM's messages. Raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    _require("prompts" in given, "prompts", "prompts argument required")
    for name, message in _REPLACED.items():
        _require(name not in given, name, message)
    for name in given:
        if name not in _NAMES:
            raise ApiError(
                f"{shown(name)} is not a field of /api{did_you_mean(name, _NAMES)}; it has {', '.join(_NAMES)}",
                param=name[:60],
                code="unknown_field",
            )
    fields: dict[str, Any] = {"prompts": _prompts(given["prompts"])}
    fields |= {field.name: field.read(given.get(field.name)) for field in (*SETTINGS, *BEAMS)}
    scores = fields["tokens_to_generate"] > 0 or fields["logprobs"]
    _require(scores, "logprobs", "tokens_to_generate=0 implies logprobs should be True")
    top_p = fields["top_p"]
    _require(not (top_p and fields["top_k"]), "top_p", "cannot set both top-k and top-p samplings.")
    for name in ("top_p_decay", "top_p_bound"):
        _require(top_p > 0 or not fields[name], name, f"{name} cannot be set without top_p")
    _require(fields["top_p_bound"] <= top_p, "top_p_bound", "top_p_bound must be greater than 0 and less than top_p")
    _require("" not in fields["prompts"] or fields["add_BOS"], "prompts", "Empty prompts require add_BOS=true")
    _check_beams(fields, given)
    return fields


def _check_beams(fields: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ApiError for fields that have no effect with ``beam_width``, or only with it."""
    if fields["beam_width"] is None:
        for name in ("stop_token", "length_penalty"):
            _require(name not in given, name, f"{name} cannot be set without beam_width")
        return
    _require(len(fields["prompts"]) == 1, "prompts", "When doing beam_search, batch size must be 1")
    _require(fields["tokens_to_generate"] > 0, "tokens_to_generate", "beam_width needs tokens_to_generate above 0")
    neutral = {field.name: field.default for field in SETTINGS}
    for name in _SAMPLING:
        message = f"{name} has no effect with beam_width, which samples no tokens and is ended by tokens: leave it out"
        _require(fields[name] == neutral[name], name, message)


def _require(holds: bool, name: str, message: str) -> None:
    if not holds:
        raise ApiError(message, param=name)


def _prompts(prompts: Any) -> list[str]:
    is_right = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    _require(is_right, "prompts", "prompts is not a list of strings")
    _require(len(prompts) > 0, "prompts", "prompts is empty")
    _require(len(prompts) <= MOST_PROMPTS, "prompts", f"Maximum number of prompts is {MOST_PROMPTS}")
    texts: list[str] = checked(prompts, PROMPTS.schema, "prompts")
    return texts


def read_megatron(body: Mapping[str, Any], model: ServedModel, *, id: str) -> ApiCall:
    """A request, checked. Raises ApiError."""
    fields = checked_fields(body)
    most, width = fields["tokens_to_generate"], fields["beam_width"]
    if not most:
        model.check_continues("tokens_to_generate=0 scores prompts", param="tokens_to_generate")
    ends, beams = model.end_ids, None
    if width is not None:
        beams = BeamSearch(width=width, length_penalty=fields["length_penalty"])
    if fields["stop_token"] is not None:
        model.check_ids([fields["stop_token"]], param="stop_token")
        ends = frozenset({fields["stop_token"]})
    first = [model.tokenizer.eod] if fields["add_BOS"] else []
    prompts = [
        model.checked_prompt(
            [*first, *model.ids_of_text(text, whole=not first, param="prompts", place=f"prompts[{number}]")],
            max_tokens=most,
            limit="tokens_to_generate",
            param="prompts",
            place=f"prompts[{number}]",
        )
        for number, text in enumerate(fields["prompts"])
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
            stop=StopRules(token_ids=ends, strings=stops, include_string=True),
            seed=seed + number,
            logprobs=0 if fields["logprobs"] else None,
            prompt_logprobs=0 if fields["logprobs"] and model.decoder_start is None else None,
            beams=beams,
        )
        for number, ids in enumerate(prompts)
    ]
    check_scored(requests, param="logprobs")
    requests = list(map(model.placed, requests))
    return ApiCall(id=id, fields=fields, prompts=prompts, requests=requests, choices=1, seed=seed)


def answer_of(found: Sequence[Result], call: ApiCall, model: ServedModel) -> dict[str, Any]:
    """Each prompt with its continuation, whose last token is the one that ended it, and its tokens; of a search all
    answers, with their scores. A decoder's text doesn't continue the prompt, and comes alone.
    """
    segments, logprobs = [], []
    for prompt, result in ((prompt, each) for prompt, one in zip(call.prompts, found) for each in one.answers):
        before = prompt if model.decoder_start is None else []
        segments.append(token_texts(model.tokenizer, [*before, *(token.id for token in result.tokens)]))
        values = [*result.prompt_logprobs, *(token.logprobs for token in result.tokens)]
        logprobs.append([finite(each.logprob) for each in values if each is not None])
    scores = [finite(beam.score) for result in found for beam in result.beams]
    return {
        "text": ["".join(each) for each in segments],
        "segments": segments,
        "logprobs": logprobs if call.fields["logprobs"] else None,
        **({"scores": scores} if scores else {}),
    }
