"""/tokenize, /detokenize and /tokenizer_info: the tokenizer for clients that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from megatron.core.images.prompts import CutImage
from megatron.serving.chat import conversation_prompt
from megatron.serving.errors import ApiError
from megatron.serving.fields import DETOKENIZE, TOKENIZE, read_fields
from megatron.serving.model import ServedModel
from megatron.serving.responses import json_response
from megatron.serving.token_texts import TokenTexts


def read_tokenize(body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """The fields of a request, checked. Raises ApiError."""
    fields = read_fields(body, TOKENIZE)
    model.check_name(fields["model"])
    if (fields["prompt"] is None) == (fields["messages"] is None):
        raise ApiError("give either prompt or messages", param="prompt")
    return fields


def tokenized(
    fields: Mapping[str, Any], model: ServedModel, conversation: str | None, pictures: Sequence[CutImage] = ()
) -> Response:
    """The token ids of a text, or of the ``conversation`` that a template has written, with images. Raises ApiError.

    The name of a special token alone, without ``add_special_tokens``, is that token, also where texts cannot spell it:
    clients know it by its name in /tokenizer_info only.
    """
    if conversation is not None:
        ids, _ = conversation_prompt(conversation, fields, model, pictures)
    else:
        ids = _ids_of_text(fields["prompt"], model, whole=fields["add_special_tokens"] is not False)
    texts = TokenTexts(model.tokenizer)
    answer = {
        "count": len(ids),
        "max_model_len": model.max_length,
        "tokens": ids,
        "token_strs": [texts.spelled(each) for each in ids] if fields["return_token_strs"] else None,
    }
    return json_response(answer)


def detokenized(body: Mapping[str, Any], model: ServedModel) -> Response:
    """The text of token ids. Raises ApiError."""
    fields = read_fields(body, DETOKENIZE)
    model.check_name(fields["model"])
    model.check_ids(fields["tokens"], param="tokens")
    return json_response({"prompt": model.tokenizer.detokenize(fields["tokens"])})


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Special tokens and the chat template."""
    texts = TokenTexts(model.tokenizer)
    return {
        "tokenizer_class": model.tokenizer.name,
        "vocab_size": model.tokenizer.vocab_size,
        "model_max_length": model.max_length,
        **{role: None if each is None else texts.spelled(each) for role, each in _special_tokens(model).items()},
        "chat_template": model.templates.source if model.templates else None,
    }


def _special_tokens(model: ServedModel) -> dict[str, int | None]:
    """Special tokens by role; ``eos_token``: what ends the texts that the model writes."""
    tokenizer = model.tokenizer
    is_decoder_text = model.decoder_start is not None and tokenizer.eos is not None
    end = tokenizer.eos if is_decoder_text else tokenizer.eod
    return {"bos_token": tokenizer.bos, "eos_token": end, "pad_token": tokenizer.pad}


def _ids_of_text(text: str, model: ServedModel, *, whole: bool) -> list[int]:
    texts = TokenTexts(model.tokenizer)
    special = [each for each in _special_tokens(model).values() if each is not None and texts.spelled(each) == text]
    return special[:1] if special and not whole else model.ids_of_text(text, whole=whole, param="prompt")
