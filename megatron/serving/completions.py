"""/v1/completions: texts that continue prompts, whole or as a stream, in the shape of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.request import TokenLogprobs, Update
from megatron.core.inference.text import TextStream
from megatron.serving.errors import ApiError
from megatron.serving.fields import COMPLETION, read_fields
from megatron.serving.generating import Asked, Outcome, asked_of, best_of, check_together, ending, usage
from megatron.serving.model import ServedModel
from megatron.serving.token_texts import TokenTexts, finite

_DEFAULT_TOKENS = 16


def read_completion(body: Mapping[str, Any], model: ServedModel, *, id: str) -> Asked:
    """What a request asks. Raises ApiError."""
    fields = read_fields(body, COMPLETION)
    model.check_name(fields["model"])
    choices = fields["best_of"] or fields["n"]
    if choices < fields["n"]:
        raise ApiError(f"best_of {choices} is less than n {fields['n']}: ask for at least n", param="best_of")
    check_together(fields, choices=choices)
    if fields["max_tokens"] == 0 and not fields["echo"]:
        raise ApiError(
            "max_tokens is 0; it must be 1 or more, or 0 with echo: true to score a prompt", param="max_tokens"
        )
    prompts = _prompts(fields, model)
    if fields["max_tokens"] is None:
        room = min(model.max_length - len(ids) for ids in prompts)
        fields["max_tokens"] = max(1, min(_DEFAULT_TOKENS, room if fields["truncate_prompt_tokens"] is None else 16))
    return asked_of(model, fields, id=id, prompts=prompts, param="prompt", choices=choices)


def _prompts(fields: Mapping[str, Any], model: ServedModel) -> list[list[int]]:
    prompt = fields["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    whole = fields["add_special_tokens"]
    return [model.ids_of_text(each, whole=whole) if isinstance(each, str) else each for each in prompt]


@dataclass
class _Place:
    """Where in a choice's text the next token begins; ``at_start``: nothing of the choice was answered yet."""

    stream: TextStream
    length: int = 0
    at_start: bool = True

    def offsets(self, texts: Iterable[str]) -> list[int]:
        """Where the texts of the next tokens begin."""
        found = []
        for text in texts:
            found.append(self.length)
            self.length += len(text)
        return found


@dataclass
class CompletionAnswer:
    """Makes the answer, or its chunks, of what the engine tells."""

    model: ServedModel
    asked: Asked
    created: int
    _places: dict[int, _Place] = field(default_factory=dict)

    def whole(self, found: Sequence[Outcome]) -> dict[str, Any]:
        """The answer when all has come."""
        choices = [
            self._choice(index, outcome, number) for index, (number, outcome) in enumerate(best_of(found, self.asked))
        ]
        return self._envelope(choices) | {"usage": usage(self.asked, found)}

    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """The chunks of an update of choice ``index``."""
        part = Outcome(update.text, list(update.tokens), update.prompt_logprobs, finish=update.finish)
        choice = self._choice(index, part, index // self.asked.choices)
        if choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
            yield self._envelope([choice])

    def last(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk with the counts."""
        return self._envelope([]) | {"usage": counts}

    def _envelope(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.asked.id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
            "system_fingerprint": self.model.fingerprint,
            "seed": self.asked.seed,
        }

    def _choice(self, index: int, part: Outcome, number: int) -> dict[str, Any]:
        """What an update, or all of them, brought choice ``index``, which continues prompt ``number``."""
        fields, prompt, tokenizer = self.asked.fields, self.asked.prompts[number], self.model.tokenizer
        place = self._places.get(index)
        if place is None:
            hidden = tokenizer.special_ids if fields["skip_special_tokens"] else ()
            place = self._places[index] = _Place(TextStream(tokenizer, prompt, hidden=hidden))
        echoed = prompt if fields["echo"] and place.at_start else []
        text = (tokenizer.detokenize(echoed) if echoed else "") + part.text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, **ending(part.finish, self.asked)}
        if fields["logprobs"] is not None and (echoed or part.tokens):
            choice["logprobs"] = self._logprobs(part, echoed, place)
        if fields["prompt_logprobs"] is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, part.prompt_logprobs)
        if fields["return_token_ids"]:
            choice["token_ids"] = [token.id for token in part.tokens]
            choice["prompt_token_ids"] = list(prompt) if place.at_start else None
        place.at_start = False
        return choice

    def _logprobs(self, part: Outcome, echoed: Sequence[int], place: _Place) -> dict[str, Any]:
        texts = TokenTexts(self.model.tokenizer, as_ids=self.asked.fields["return_tokens_as_token_ids"])
        most = self.asked.fields["logprobs"]
        listed = [*zip(echoed, part.prompt_logprobs), *((token.id, token.logprobs) for token in part.tokens)]
        segments = [*texts.segments(echoed), *(place.stream.add(token.id) for token in part.tokens)]
        return {
            "tokens": [texts.spelled(token) for token, _ in listed],
            "token_logprobs": [each and finite(each.logprob) for _, each in listed],
            "top_logprobs": [each and texts.ranked(each, token, most=most) for token, each in listed],
            "text_offset": place.offsets(segments),
        }

    def _prompt_logprobs(
        self, prompt: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, Any] | None]:
        texts, most = TokenTexts(self.model.tokenizer), self.asked.fields["prompt_logprobs"]
        return [None if each is None else by_id(texts, each, token, most=most) for token, each in zip(prompt, found)]


def by_id(texts: TokenTexts, logprobs: TokenLogprobs, token: int, *, most: int) -> dict[str, Any]:
    """Log-probability, rank and text of the likeliest tokens and of ``token``, by id; its rank is null when unknown."""
    ranks = {each: rank for rank, (each, _) in enumerate(logprobs.top, start=1)}
    values = {**dict(logprobs.top[:most]), token: logprobs.logprob}
    return {
        str(each): {"logprob": finite(value), "rank": ranks.get(each), "decoded_token": texts.spelled(each)}
        for each, value in values.items()
    }
