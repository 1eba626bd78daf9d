"""/v1/completions: texts that continue prompts, whole or as a stream, in the shape of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from megatron.core.inference.detokenizer import token_texts
from megatron.core.inference.request import TokenLogprobs, Update
from megatron.serving.errors import ApiError
from megatron.serving.fields import COMPLETION, read_fields
from megatron.serving.generating import Answer, ApiCall, api_call, check_together, ending
from megatron.serving.model import ServedModel
from megatron.serving.token_texts import TokenTexts, finite

_DEFAULT_TOKENS = 16


def read_completion(body: Mapping[str, Any], model: ServedModel, *, id: str) -> ApiCall:
    """A request, checked. Raises ApiError."""
    fields = read_fields(body, COMPLETION)
    model.check_name(fields["model"])
    choices = fields["best_of"] or fields["n"]
    if choices < fields["n"]:
        raise ApiError(f"best_of {choices} is less than n {fields['n']}: ask for at least n", param="best_of")
    check_together(fields, choices=choices)
    if fields["max_tokens"] == 0 and not fields["echo"]:
        scored = "" if model.decoder_start is not None else ", or 0 with echo: true to score a prompt"
        raise ApiError(f"max_tokens is 0; it must be 1 or more{scored}", param="max_tokens")
    if fields["echo"]:
        model.check_continues("echo begins a text with its prompt", param="echo")
    if fields["prompt_logprobs"] is not None:
        model.check_continues("prompt_logprobs score a prompt", param="prompt_logprobs")
    prompts = _prompts(fields, model)
    if fields["max_tokens"] is None:
        room = min(map(model.room, prompts.values()))
        fields["max_tokens"] = max(1, min(_DEFAULT_TOKENS, room if fields["truncate_prompt_tokens"] is None else 16))
    return api_call(model, fields, id=id, prompts=prompts, param="prompt", choices=choices)


def _prompts(fields: Mapping[str, Any], model: ServedModel) -> dict[str, list[int]]:
    """Token ids of the prompts by their places in the request."""
    given, whole, is_cut = fields["prompt"], fields["add_special_tokens"], fields["truncate_prompt_tokens"] is not None
    if isinstance(given, str) or isinstance(given[0], int):
        prompts = {"prompt": given}
    else:
        prompts = {f"prompt[{number}]": each for number, each in enumerate(given)}
    return {
        place: model.ids_of_text(each, whole=whole, param="prompt", place=place, is_cut=is_cut)
        if isinstance(each, str)
        else each
        for place, each in prompts.items()
    }


@dataclass
class _ChoiceProgress:
    """How many characters of a choice have been sent; ``at_start``: nothing of it was sent yet.

    ``prompt_logprobs``: those of the prompt, kept until the first token.
    """

    length: int = 0
    at_start: bool = True
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def offsets(self, texts: Iterable[str]) -> list[int]:
        """Where the texts of the next tokens begin."""
        found = []
        for text in texts:
            found.append(self.length)
            self.length += len(text)
        return found


@dataclass
class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    _progress: dict[int, _ChoiceProgress] = field(default_factory=dict)

    @override
    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """The chunks of an update of choice ``index``."""
        progress = self._progress.setdefault(index, _ChoiceProgress())
        if self.call.fields["echo"] and progress.at_start:  # the prompt is one chunk, however many steps have read it
            progress.prompt_logprobs += update.prompt_logprobs
            if not update.tokens and update.finish is None:
                return
            update = replace(update, prompt_logprobs=progress.prompt_logprobs)
        choice = self.choice(index, update, index // self.call.choices)
        if choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
            yield self.enveloped(self.chunk_kind, [choice])

    @override
    def choice(self, index: int, part: Update, number: int) -> dict[str, Any]:
        """Choice ``index``, which continues prompt ``number``, from an update or from all of them."""
        fields, prompt = self.call.fields, self.call.prompts[number]
        progress = self._progress.setdefault(index, _ChoiceProgress())
        echoed = prompt if fields["echo"] and progress.at_start else []
        text = (self.model.tokenizer.detokenize(echoed) if echoed else "") + part.text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, **ending(part.finish, self.call)}
        if fields["logprobs"] is not None and (echoed or part.tokens):
            choice["logprobs"] = self._logprobs(part, echoed, progress)
        if fields["prompt_logprobs"] is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, part.prompt_logprobs)
        if fields["return_token_ids"]:
            choice["token_ids"] = [token.id for token in part.tokens]
            choice["prompt_token_ids"] = list(prompt) if progress.at_start else None
        progress.at_start = False
        return choice

    def _logprobs(self, part: Update, echoed: Sequence[int], progress: _ChoiceProgress) -> dict[str, Any]:
        texts = TokenTexts(self.model.tokenizer, as_ids=self.call.fields["return_tokens_as_token_ids"])
        most = self.call.fields["logprobs"]
        listed = [*zip(echoed, part.prompt_logprobs), *((token.id, token.logprobs) for token in part.tokens)]
        segments = [*token_texts(self.model.tokenizer, echoed), *(token.text for token in part.tokens)]
        return {
            "tokens": [texts.spelled(token) for token, _ in listed],
            "token_logprobs": [each and finite(each.logprob) for _, each in listed],
            "top_logprobs": [each and texts.ranked(each, token, most=most) for token, each in listed],
            "text_offset": progress.offsets(segments),
        }

    def _prompt_logprobs(
        self, prompt: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, Any] | None]:
        texts, most = TokenTexts(self.model.tokenizer), self.call.fields["prompt_logprobs"]
        return [None if each is None else by_id(texts, each, token, most=most) for token, each in zip(prompt, found)]


def by_id(texts: TokenTexts, logprobs: TokenLogprobs, token: int, *, most: int) -> dict[str, Any]:
    """Log-probability, rank and text of the likeliest tokens and of ``token``, by id; its rank is null when unknown."""
    ranks = {each: rank for rank, (each, _) in enumerate(logprobs.top, start=1)}
    values = {**dict(logprobs.top[:most]), token: logprobs.logprob}
    return {
        str(each): {"logprob": finite(value), "rank": ranks.get(each), "decoded_token": texts.spelled(each)}
        for each, value in values.items()
    }
