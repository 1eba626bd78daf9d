"""/v1/chat/completions: the next message of a conversation, whole or as a stream, in the shape of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from megatron.core.images.prompts import CutImage, PromptImages
from megatron.core.inference.request import Finish, GeneratedToken, Update
from megatron.errors import MegatronError
from megatron.serving.errors import ApiError
from megatron.serving.fields import CHAT, read_fields
from megatron.serving.generating import Answer, ApiCall, api_call, check_together, ending
from megatron.serving.model import ServedModel
from megatron.serving.pictures import without_images
from megatron.serving.token_texts import TokenTexts, finite


def read_chat(body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """The fields of a request, checked. Raises ApiError."""
    fields = read_fields(body, CHAT)
    model.check_name(fields["model"])
    if fields["max_completion_tokens"] is not None:
        if fields["max_tokens"] not in (None, fields["max_completion_tokens"]):
            raise ApiError(
                f"max_tokens {fields['max_tokens']} and max_completion_tokens {fields['max_completion_tokens']} are "
                "two names of one limit: give one",
                param="max_completion_tokens",
            )
        fields["max_tokens"] = fields["max_completion_tokens"]
    if fields["max_tokens"] == 0:
        raise ApiError("max_tokens is 0; it must be 1 or more", param="max_tokens")
    if fields["top_logprobs"] and not fields["logprobs"]:
        raise ApiError("top_logprobs need logprobs: true", param="top_logprobs")
    for listed, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if fields[listed] and fields[choice] != "none":
            raise ApiError(
                f'this server calls no {listed}: leave out {listed}, or send {choice}: "none" with them',
                param=listed,
            )
    check_together(fields, choices=fields["n"])
    return fields


async def conversation(fields: Mapping[str, Any], model: ServedModel, *, trust_templates: bool) -> str:
    """The ``messages`` as the chat template writes them. Raises ApiError."""
    if fields["continue_final_message"]:
        model.check_continues("continue_final_message goes on with a message", param="continue_final_message")
    if fields["chat_template"] is not None and not trust_templates:
        raise ApiError(
            "chat_template: this server uses its own template alone (--trust-request-chat-template would change that)",
            param="chat_template",
        )
    if fields["continue_final_message"] and fields["add_generation_prompt"]:
        raise ApiError(
            "add_generation_prompt and continue_final_message cannot both be true: the answer either begins a message "
            "or continues the last one",
            param="continue_final_message",
        )
    if model.templates is None:
        raise ApiError(
            "this model has no chat template: start the server with --chat-template FILE, or use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    variables = fields["chat_template_kwargs"]
    own = {"messages", "add_generation_prompt", *model.templates.tokens}
    if fields.get("documents") is not None:
        own.add("documents")
    for name in variables:
        if name in own:
            raise ApiError(
                f"chat_template_kwargs has {name}, which the template gets from the "
                f"{'tokenizer' if name in model.templates.tokens else 'field of this name'}: leave it out there",
                param="chat_template_kwargs",
            )
    return await model.templates.write(
        fields["messages"],
        source=fields["chat_template"],
        begin_answer=fields["add_generation_prompt"] is not False,
        continue_last=fields["continue_final_message"],
        variables={"documents": fields.get("documents"), **variables},
    )


async def with_images(fields: dict[str, Any], model: ServedModel) -> tuple[dict[str, Any], list[CutImage]]:
    """The fields with marks in place of images in ``messages``, and the images. Raises ApiError."""
    messages, urls = without_images(fields["messages"])
    if not urls:
        return fields, []
    if model.pictures is None:
        raise ApiError(f"{next(iter(urls))} is an image, and this model reads only text", param="messages")
    if fields.get("truncate_prompt_tokens") is not None:
        raise ApiError("truncate_prompt_tokens would cut images: leave it out", param="truncate_prompt_tokens")
    return {**fields, "messages": messages}, await model.pictures.read(urls)


def conversation_prompt(
    text: str, fields: Mapping[str, Any], model: ServedModel, pictures: Sequence[CutImage] = ()
) -> tuple[list[int], PromptImages | None]:
    """Token ids of a conversation that a template has written, and the images in it. Raises ApiError."""
    is_cut = fields.get("truncate_prompt_tokens") is not None
    whole = bool(fields["add_special_tokens"])
    if not pictures:
        return model.ids_of_text(text, whole=whole, param="messages", place="the conversation", is_cut=is_cut), None
    assert model.pictures is not None, "a model that reads images has read some"
    model.check_text_length(text, param="messages", place="the conversation")
    try:
        return model.pictures.prompts.encoded(text, pictures, whole=whole)
    except MegatronError as error:
        raise ApiError(f"the conversation: {error}", param="messages") from None


def chat_call(
    fields: Mapping[str, Any], text: str, model: ServedModel, *, id: str, pictures: Sequence[CutImage] = ()
) -> ApiCall:
    """The engine's requests for the text of a conversation and its images. Raises ApiError."""
    ids, images = conversation_prompt(text, fields, model, pictures)
    prompts = {"the conversation": ids}
    return api_call(model, fields, id=id, prompts=prompts, param="messages", choices=fields["n"], images=images)


@dataclass
class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    _begun: set[int] = field(default_factory=set)

    @override
    def choice(self, index: int, part: Update, number: int) -> dict[str, Any]:
        """Choice ``index`` of an answer."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(part.tokens, part.finish, first=True)}

    @override
    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """The chunks of an update of choice ``index``: the role, the text, and the end as a chunk of its own."""
        tokens = update.tokens
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""}, first=True)
        if update.text or (tokens and (self.call.fields["logprobs"] or self.call.fields["return_token_ids"])):
            yield self._chunk(index, {"content": update.text}, tokens)
        if update.finish is not None:
            yield self._chunk(index, {}, finish=update.finish)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        tokens: Sequence[GeneratedToken] = (),
        finish: Finish | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, **self._rest(tokens, finish, first=first)}
        return self.enveloped(self.chunk_kind, [choice])

    def _rest(self, tokens: Sequence[GeneratedToken], finish: Finish | None, *, first: bool) -> dict[str, Any]:
        """The fields of choices and chunks besides their text."""
        fields, found = self.call.fields, {"logprobs": None, **ending(finish, self.call)}
        if fields["logprobs"] and tokens:
            found["logprobs"] = {"content": [self._logprob(token) for token in tokens], "refusal": None}
        if fields["return_token_ids"]:
            found["token_ids"] = [token.id for token in tokens]
            found["prompt_token_ids"] = list(self.call.prompts[0]) if first else None
        return found

    def _logprob(self, token: GeneratedToken) -> dict[str, Any]:
        texts = TokenTexts(self.model.tokenizer, as_ids=self.call.fields["return_tokens_as_token_ids"])
        assert token.logprobs is not None, "they were asked for"
        top = token.logprobs.top[: self.call.fields["top_logprobs"]]
        return {
            **_entry(texts, token.id, token.logprobs.logprob),
            "top_logprobs": [_entry(texts, each, value) for each, value in top],
        }


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.spelled(token),
        "logprob": finite(logprob),
        "bytes": list(texts.tokenizer.token_bytes(token)),
    }
