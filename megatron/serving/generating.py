"""Requests of the engine made from the fields of an OpenAI request, and answers made from their results."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.core.images.prompts import PromptImages
from megatron.core.inference.request import BeamSearch, Finish, Request, Result, StopRules, Update
from megatron.core.inference.sampling import Sampling
from megatron.errors import MegatronError
from megatron.serving.errors import ApiError
from megatron.serving.grammars import Form, form_of
from megatron.serving.model import ServedModel
from megatron.serving.streams import Stream
from megatron.small_files import shown

_MOST_SCORED = 1 << 21


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """A parsed HTTP request and the engine's requests for it.

    ``fields``: those of the HTTP request. ``prompts``: token ids. ``requests``: ``choices`` continuations of each
    prompt, prompt by prompt. ``seed``: the one that was given, or drawn; None for beam search, which samples nothing.
    ``form``: the schema or grammar that all continuations follow.
    """

    id: str
    fields: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    requests: Sequence[Request]
    choices: int
    seed: int | None
    form: Form | None = None

    @property
    def answered(self) -> int:
        """Continuations of each prompt in the answer."""
        return int(self.fields["n"])


async def results(stream: Stream, requests: Sequence[Request]) -> list[Result]:
    """The result of each request."""
    updates: dict[str, list[Update]] = {request.id: [] for request in requests}
    async for update in stream:
        if isinstance(update, Update):
            updates[update.request_id].append(update)
    return [Result.of(each) for each in updates.values()]


def api_call(
    model: ServedModel,
    fields: Mapping[str, Any],
    *,
    id: str,
    prompts: Mapping[str, list[int]],
    param: str,
    choices: int,
    images: PromptImages | None = None,
) -> ApiCall:
    """The call for prompts of token ids, which are given by their places in ``param``. ``images``: of the one prompt.

    Raises ApiError for settings that cannot work.
    """
    most, truncate = fields["max_tokens"], fields["truncate_prompt_tokens"]
    checked = [
        model.checked_prompt(list(ids), max_tokens=most, truncate=truncate, param=param, place=place)
        for place, ids in prompts.items()
    ]
    beams = None
    if fields["use_beam_search"]:
        beams, choices = BeamSearch(width=choices, length_penalty=fields["length_penalty"]), 1
    seed = secrets.randbits(31) if fields["seed"] is None else fields["seed"]
    sampling, stop = sampling_of(fields, model), stop_rules(fields, model)
    requests = [
        Request(
            id=f"{id}-{number * choices + choice}",
            prompt=ids,  # one object for all choices, which goes to the engine once
            max_tokens=model.room(ids) if most is None else most,
            sampling=sampling,
            stop=stop,
            skip_special_tokens=fields["skip_special_tokens"],
            seed=seed,
            choice=choice,
            logprobs=_logprobs_of(fields, ranked=choices > fields["n"]),
            prompt_logprobs=_prompt_logprobs_of(fields),
            beams=beams,
            adapter=model.adapter(fields["model"]),
            images=images,
        )
        for number, ids in enumerate(map(tuple, checked))
        for choice in range(choices)
    ]
    fewest = min(request.max_tokens for request in requests)
    if sampling.min_tokens > fewest:
        raise ApiError(f"min_tokens {sampling.min_tokens} is more than max_tokens {fewest}", param="min_tokens")
    check_scored(requests, param="prompt_logprobs" if fields.get("prompt_logprobs") is not None else "logprobs")
    requests = list(map(model.placed, requests))
    return ApiCall(
        id=id,
        fields=fields,
        prompts=checked,
        requests=requests,
        choices=choices,
        seed=None if beams else seed,
        form=form_of(fields),
    )


def check_scored(requests: Sequence[Request], *, param: str) -> None:
    """Raise ApiError for more log-probabilities of prompts than an answer can have."""
    count = sum(len(each.prompt) * (1 + each.prompt_logprobs) for each in requests if each.prompt_logprobs is not None)
    if count > _MOST_SCORED:
        raise ApiError(
            f"the answer would have {count:,} log-probabilities of prompts, and can have at most {_MOST_SCORED:,}: "
            "send fewer or shorter prompts in a request, or ask for fewer choices or fewer of the most probable tokens",
            param=param,
        )


def check_together(fields: Mapping[str, Any], *, choices: int) -> None:
    """Raise ApiError for fields that can't go together."""
    if fields["stream_options"] and not fields["stream"]:
        raise ApiError("stream_options need stream: true", param="stream_options")
    if fields["stream"] and choices > fields["n"]:
        raise ApiError(
            f"best_of {choices} with n {fields['n']} cannot be streamed, since the best are known at the end: leave "
            "out best_of or stream",
            param="best_of",
        )
    if fields["stream"] and fields.get("prompt_logprobs") is not None:
        raise ApiError("prompt_logprobs cannot be streamed: leave out one of both", param="prompt_logprobs")
    check_beams(fields)
    if fields["truncate_prompt_tokens"] == 0:
        raise ApiError(
            "truncate_prompt_tokens is 0; it must be 1 or more, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )


def check_beams(fields: Mapping[str, Any]) -> None:
    """Raise ApiError for fields that have no effect with ``use_beam_search``, or only with it."""
    if not fields["use_beam_search"]:
        if fields["length_penalty"] != 1.0:
            raise ApiError("length_penalty has no effect without use_beam_search: true", param="length_penalty")
        return
    if fields["stream"]:
        raise ApiError("use_beam_search cannot be streamed, since the best are known at the end", param="stream")
    neutral_values: dict[str, tuple[Any, ...]] = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    neutral_values |= {"seed": (None,), "stop": ([],)}
    for name, neutral in neutral_values.items():
        if fields[name] not in neutral:
            why = "whose texts end with tokens (stop_token_ids)" if name == "stop" else "which samples no tokens"
            raise ApiError(f"{name} has no effect with use_beam_search, {why}: leave it out", param=name)


def sampling_of(fields: Mapping[str, Any], model: ServedModel) -> Sampling:
    """How tokens are sampled; raises ApiError for ids that the model doesn't have."""
    bias = {_token_id(key, model): value for key, value in fields["logit_bias"].items()}
    allowed = fields["allowed_token_ids"]
    if allowed is not None:
        model.check_ids(allowed, param="allowed_token_ids")
    try:
        return Sampling(
            temperature=fields["temperature"],
            top_k=max(fields["top_k"], 0),
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            repetition_penalty=fields["repetition_penalty"],
            presence_penalty=fields["presence_penalty"],
            frequency_penalty=fields["frequency_penalty"],
            logit_bias=tuple(bias.items()),
            min_tokens=fields["min_tokens"],
            allowed_ids=None if allowed is None else frozenset(allowed),
            bad_words=tuple(tuple(ids) for word in fields["bad_words"] for ids in _spellings(word, model)),
        )
    except MegatronError as error:
        raise ApiError(str(error)) from None


def stop_rules(fields: Mapping[str, Any], model: ServedModel) -> StopRules:
    """What ends a text; raises ApiError for ids that the model doesn't have."""
    model.check_ids(fields["stop_token_ids"], param="stop_token_ids")
    stop = fields["stop"]
    return StopRules(
        token_ids=frozenset(fields["stop_token_ids"]) | (frozenset() if fields["ignore_eos"] else model.end_ids),
        strings=(stop,) if isinstance(stop, str) else tuple(stop),
        include_string=fields["include_stop_str_in_output"],
    )


def usage(call: ApiCall, *, generated: int, cached: Sequence[int]) -> dict[str, Any]:
    """The counts of tokens in an answer: each prompt once, and all ``generated`` tokens.

    ``cached``: tokens of each request's prompt that were in the cache.
    """
    prompt = sum(map(len, call.prompts))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached[:: call.choices])},
    }


@dataclass
class Answer(ABC):
    """The answer to an OpenAI request, or its chunks, made from the engine's updates.

    ``prefix``: the beginning of its id. ``kind``, ``chunk_kind``: the ``object`` of an answer and a chunk.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    model: ServedModel
    call: ApiCall
    created: int = field(default_factory=lambda: int(time.time()), init=False)

    def whole(self, found: Sequence[Result]) -> dict[str, Any]:
        """The whole answer, with the ``n`` texts of the highest mean log-probability where there are more."""
        call, choices = self.call, list[dict[str, Any]]()
        for number in range(len(call.prompts)):
            group = [each for one in found[number * call.choices : (number + 1) * call.choices] for each in one.answers]
            if call.choices > call.answered:
                group = sorted(group, key=_mean_logprob, reverse=True)
            for answer in group[: call.answered]:
                choices.append(self.choice(len(choices), answer, number))
        generated, cached = sum(each.num_generated for each in found), [each.cached_tokens for each in found]
        return self.enveloped(self.kind, choices) | {"usage": usage(call, generated=generated, cached=cached)}

    def last(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk with the counts."""
        return self.enveloped(self.chunk_kind, []) | {"usage": counts}

    @abstractmethod
    def choice(self, index: int, part: Update, number: int) -> dict[str, Any]:
        """Choice ``index``, which continues prompt ``number``, from an update or from all of them."""

    @abstractmethod
    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """The chunks of an update of choice ``index``."""

    def enveloped(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Choices with the fields that every answer and every chunk has."""
        return {
            "id": f"{self.prefix}-{self.call.fields['request_id'] or self.call.id}",
            "object": kind,
            "created": self.created,
            "model": self.call.fields["model"] or self.model.name,
            "choices": choices,
            "system_fingerprint": self.model.fingerprint,
            "seed": self.call.seed,
        }


def ending(finish: Finish | None, call: ApiCall) -> dict[str, Any]:
    """``finish_reason``, and ``stop_reason``: the string or id of the request that ended the text."""
    stop = finish.stop if finish else None
    named = isinstance(stop, str) or stop in call.fields["stop_token_ids"]
    return {"finish_reason": finish and finish.reason, "stop_reason": stop if named else None}


def _mean_logprob(result: Result) -> float:
    values = [token.logprobs.logprob for token in result.tokens if token.logprobs is not None]
    return sum(values) / max(1, len(values))


def _spellings(word: str, model: ServedModel) -> list[list[int]]:
    """Token ids of a word at the beginning of a text, and after a space."""
    return [model.ids_of_text(text, whole=False, param="bad_words") for text in (word, f" {word.lstrip()}")]


def _token_id(key: str, model: ServedModel) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise ApiError(f"logit_bias has the key {shown(key)}; keys are token ids", param="logit_bias")
    model.check_ids([int(key)], param="logit_bias")
    return int(key)


def _logprobs_of(fields: Mapping[str, Any], *, ranked: bool) -> int | None:
    most = fields["logprobs"]
    if isinstance(most, bool):
        most = fields["top_logprobs"] if most else None
    return 0 if most is None and ranked else most


def _prompt_logprobs_of(fields: Mapping[str, Any]) -> int | None:
    echoed = fields["logprobs"] if fields["echo"] else None
    return max((each for each in (echoed, fields.get("prompt_logprobs")) if each is not None), default=None)
