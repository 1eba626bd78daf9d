"""The model that is served: its name, its limits, its tokenizer, and where it comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron.config.flags import plural_s
from megatron.core.inference.limits import NamedFolder
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import ForbiddenAfter
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import MegatronError
from megatron.serving.errors import ApiError

if TYPE_CHECKING:
    from megatron.serving.pictures import Pictures
    from megatron.serving.templates import Templates


_MOST_NAMES = 10  # that an error lists
_LONGEST_CUT = 1 << 20  # characters of a prompt of which only the end is kept


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server serves. ``max_length``: tokens of a prompt and its generated text together.
    ``vocab_size``: ids that prompts may have.

    ``fingerprint``: says which checkpoint and tokenizer the answers come from. ``end_ids``: tokens that end a text.
    ``templates``: None where no chat template is known. ``decoder_start``: what texts of an encoder-decoder model begin
    with, whose encoder reads the prompt; None for a model whose texts continue their prompts. ``adapters``: those of
    which a request may name one in place of the model, in the order of their numbers. ``pictures``: reads images; None
    for a model that reads texts alone.
    """

    name: str
    tokenizer: Tokenizer
    max_length: int
    fingerprint: str
    end_ids: frozenset[int]
    templates: Templates | None = None
    decoder_start: int | None = None
    adapters: tuple[NamedFolder, ...] = ()
    pictures: Pictures | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def newline_after_colon(self) -> ForbiddenAfter:
        """No token that begins with a newline follows one that ends with a colon."""
        texts = [self.tokenizer.detokenize([token]) for token in range(self.tokenizer.vocab_size)]
        return ForbiddenAfter(
            previous=frozenset(token for token, text in enumerate(texts) if text.endswith(":")),
            tokens=frozenset(token for token, text in enumerate(texts) if text.startswith("\n")),
        )

    def check_name(self, name: str | None) -> None:
        """Raise ApiError (404) for another model than this one or one of its adapters; None is this one."""
        if name is not None and name not in self.names:
            has = ", ".join(map(repr, self.names[:_MOST_NAMES])) + ", ..." * (len(self.names) > _MOST_NAMES)
            raise ApiError(
                f"the model {name[:100]!r} does not exist here; this server has {has}",
                status=404,
                param="model",
                code="model_not_found",
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What requests may name: the model, and its adapters."""
        return (self.name, *(each.name for each in self.adapters))

    def adapter(self, name: str | None) -> int:
        """The number of the adapter that a checked name means; 0 for the model itself."""
        return 0 if name is None else self.names.index(name)

    def listed(self, name: str | None = None) -> dict[str, Any]:
        """The model, or its adapter of this name, as /v1/models lists it."""
        number = self.adapter(name)
        return {
            "id": self.names[number],
            "object": "model",
            "created": self.created,
            "owned_by": "megatron",
            "root": self.names[number],
            "parent": self.name if number else None,
            "max_model_len": self.max_length,
            "is_encoder_decoder": self.decoder_start is not None,
            "reads_images": self.pictures is not None,
        }

    @cached_property
    def longest_text(self) -> int:
        """Characters of a text that may fit: each token has at most as many as the longest one has bytes, and a space
        beside it that no token has.
        """
        longest = max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size))
        return self.max_length * (longest + 1)

    def ids_of_text(
        self, text: str, *, whole: bool, param: str, place: str | None = None, is_cut: bool = False
    ) -> list[int]:
        """Token ids; ``whole``: with those that the tokenizer puts around a text. ``place``: of the text in ``param``.

        ``is_cut``: only the last of them are kept. Raises ApiError, also for a text that can't fit, before tokens are
        made of it: they take a hundred times its memory.
        """
        self.check_text_length(text, param=param, place=place, is_cut=is_cut)
        encode = self.tokenizer.tokenize_batch if whole else self.tokenizer.tokenize_parts
        try:
            return list(encode([text])[0])
        except MegatronError as error:
            raise ApiError(f"{place or param}: {error}", param=param) from None

    def check_text_length(self, text: str, *, param: str, place: str | None = None, is_cut: bool = False) -> None:
        """Raise ApiError for a text that can't fit into the model. Arguments as of ``ids_of_text``."""
        most = max(self.longest_text, _LONGEST_CUT) if is_cut else self.longest_text
        if len(text) > most:
            raise ApiError(
                f"{place or param} has {len(text):,} characters; at most {most:,} are read, and a text has at most "
                f"{self.max_length:,} tokens here: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def check_ids(self, ids: Sequence[int], *, param: str, place: str | None = None) -> None:
        """Raise ApiError for an id that the vocabulary doesn't have. ``place``: of the ids in ``param``."""
        size = self.tokenizer.vocab_size
        for wrong in (min(ids, default=0), max(ids, default=0)):
            if 0 <= wrong < size:
                continue
            raise ApiError(f"{place or param} has the token id {wrong}; this model has 0 to {size - 1}", param=param)

    def checked_prompt(
        self,
        ids: list[int],
        *,
        max_tokens: int | None,
        param: str,
        place: str,
        limit: str = "max_tokens",
        truncate: int | None = None,
    ) -> list[int]:
        """A prompt that fits: at least one token, and room for ``max_tokens`` or, without them, for one.

        ``place``: of the prompt in ``param``. ``limit``: the field that ``max_tokens`` has come from. ``truncate``:
        keep the last tokens, this many or, at -1, as many as fit. Raises ApiError.
        """
        self.check_ids(ids, param=param, place=place)
        most_new = 1 if max_tokens is None else max_tokens
        if truncate is not None:
            most = self.max_length - (most_new if self.decoder_start is None else 0)
            keep = most if truncate == -1 else truncate
            ids = ids[-keep:] if keep > 0 else []
        if not ids:
            first = self.tokenizer.bos if self.tokenizer.bos is not None else self.tokenizer.eod
            ids = [first]
        if self.decoder_start is not None:
            self._check_decoder(len(ids), most_new, param=param, place=place, limit=limit)
            return ids
        total, room = len(ids) + most_new, self.max_length - len(ids)
        if total > self.max_length:
            found = f"{place} has {len(ids):,} token{plural_s(len(ids))}"
            whole = f"a text has at most {self.max_length:,} here, the prompt included"
            if max_tokens is None or room < 1:
                message = f"{found}, and {whole}: shorten it"
            else:
                message = (
                    f"{found}; with {limit} {max_tokens:,} that makes {total:,}, and {whole}: shorten it, or lower "
                )
                message += f"{limit} to {room:,}"
            raise ApiError(message, param=param, code="context_length_exceeded")
        return ids

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that a text of this prompt can have."""
        return self.max_length - (len(prompt) if self.decoder_start is None else 1)

    def placed(self, request: Request) -> Request:
        """The request as the engine takes it, with its prompt for the encoder where the model has one."""
        if self.decoder_start is None:
            return request
        return replace(request, prompt=(self.decoder_start,), encoder_prompt=request.prompt)

    def check_continues(self, what: str, *, param: str) -> None:
        """Raise ApiError for ``what``, which needs texts that continue their prompts, on a model with an encoder."""
        if self.decoder_start is not None:
            raise ApiError(
                f"{what}, and the encoder of this model reads prompts, which its texts don't continue: ask "
                "/v1/completions for a text alone",
                param=param,
                code="encoder_decoder",
            )

    def _check_decoder(self, length: int, most_new: int, *, param: str, place: str, limit: str) -> None:
        """Raise ApiError for a prompt that the encoder, or a text that the decoder has no room for."""
        if length > self.max_length:
            message = f"{place} has {length:,} tokens, and the encoder reads at most {self.max_length:,}: shorten it"
        elif most_new >= self.max_length:
            message = (
                f"{limit} {most_new:,} is too many: a text has at most {self.max_length:,} tokens here, the one that "
                f"it begins with included; lower {limit} to {self.max_length - 1:,}"
            )
            param = limit
        else:
            return
        raise ApiError(message, param=param, code="context_length_exceeded")
