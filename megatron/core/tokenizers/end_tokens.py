"""The tokens that end a text: the tokenizer's own end, and what a model's answers end with."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import ConfigError, DataError


def own_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """What ends every text: the ids that end a document and a sequence."""
    return frozenset({tokenizer.eod, *([] if tokenizer.eos is None else [tokenizer.eos])})


def end_ids(tokenizer: Tokenizer, chat: ChatSettings | None, words: Iterable[str] = ()) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's own, and those of ``chat`` or, in their place, of ``words``.

    ``words``: those of ``--end-tokens``, tokens or their ids. Raises ConfigError for one that is no single token. Ids
    that the tokenizer doesn't have, which no text can hold, are left out.
    """
    given = [_id_of(word, tokenizer) for word in words]
    stored = chat.end_tokens if chat is not None and not given else ()
    return own_ends(tokenizer).union(given, (each for each in stored if each < tokenizer.vocab_size))


def described(ids: Collection[int], tokenizer: Tokenizer) -> str:
    """The tokens as users know them, each with its id: ``<|im_end|> (1002), <|endoftext|> (1000)``."""
    texts = {each: tokenizer.detokenize([each]) for each in sorted(ids)}
    return ", ".join(
        f"{_shown(text)} ({each})" if text not in ("", str(each)) else str(each) for each, text in texts.items()
    )


def _shown(text: str) -> str:
    return text if text.isprintable() and text.strip() == text else json.dumps(text)


def describe_chat(chat: ChatSettings | None, tokenizer: Tokenizer) -> Iterator[str]:
    """What checkpoints of a run keep of the conversations that its model has learned, in a line."""
    if chat is not None:
        template = ", and their chat template" if chat.template is not None else ""
        ends = described(end_ids(tokenizer, chat), tokenizer)
        yield f"checkpoints keep the end tokens of answers, {ends}{template}"


def _id_of(word: str, tokenizer: Tokenizer) -> int:
    if word.isascii() and word.isdecimal():
        if len(word) > 10 or int(word) >= tokenizer.vocab_size:
            raise ConfigError(
                f"--end-tokens {word[:20]} is a token id, and this tokenizer has 0 to {tokenizer.vocab_size - 1}: give "
                "one of these, or a token's text"
            )
        return int(word)
    try:
        ids = tokenizer.tokenize_parts([word])[0]
    except DataError as error:
        raise ConfigError(f"--end-tokens {word[:40]!r}: {error}") from None
    if len(ids) != 1:
        raise ConfigError(
            f"--end-tokens {word[:40]} is {len(ids)} tokens of this tokenizer: give single tokens, or their ids"
        )
    return ids[0]
