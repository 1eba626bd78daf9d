"""Text of tokens as they are generated: whole characters only, and together the text of all tokens at once."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from itertools import islice

from megatron.core.tokenizers.base import Tokenizer

_UNKNOWN = "\ufffd"
_FIRST_LOOK = 8  # tokens of a prompt, which usually show how a text goes on
_LONGEST_LOOK = 64  # also where all of them are spaces, or each token of a long such text would decode all others


class IncrementalDetokenizer:
    """Text that continues ``prompt``, token by token. ``hidden``: tokens without text, such as special ones.

    Only new tokens are decoded, and some before them that have text: tokenizers drop a space at the beginning of what
    they decode. Bytes that are no character become U+FFFD. Where a tokenizer then replaces the valid characters before
    them as well, the text keeps these.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, hidden: Container[int] = ()) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        prompt = [*islice((token for token in reversed(prompt) if token not in hidden), _LONGEST_LOOK)][::-1]
        length = min(_FIRST_LOOK, len(prompt))
        while length < len(prompt) and not _is_clear(tokenizer.detokenize_part(prompt[-length:])):
            length = min(2 * length, len(prompt))
        self._tokens = prompt[len(prompt) - length :]
        self._num_context = length
        for token in self._tokens:
            self._bytes.decode(tokenizer.token_bytes(token))
        text = tokenizer.detokenize_part(self._tokens)
        unfinished = text[len(text) - self._num_unfinished :]
        self._num_shown = len(text) - len(unfinished) + len(unfinished.rstrip(_UNKNOWN))
        self._new = ""  # text of the tokens after the context

    def add(self, token: int) -> str:
        """Add a token. Returns the characters that it completes."""
        piece = b"" if token in self._hidden else self._tokenizer.token_bytes(token)
        if not piece:
            return ""
        self._tokens.append(token)
        self._bytes.decode(piece)
        if self._num_unfinished:
            return ""
        text = self._tokenizer.detokenize_part(self._tokens)
        added, self._num_shown = text[self._num_shown :], len(text)
        self._new += added
        if self._new.strip() or len(self._tokens) >= self._num_context + _LONGEST_LOOK:  # enough for what comes
            self._tokens = self._tokens[self._num_context :]
            self._num_context, self._new = len(self._tokens), ""
            self._num_shown = len(self._tokenizer.detokenize_part(self._tokens))
        return added

    def finish(self) -> str:
        """Returns U+FFFD for an incomplete character at the end of the text, else nothing."""
        return self._tokenizer.detokenize_part(self._tokens)[self._num_shown :]

    @property
    def _num_unfinished(self) -> int:
        """Bytes of a character of which more must come."""
        return len(self._bytes.getstate()[0])


def token_texts(
    tokenizer: Tokenizer, tokens: Sequence[int], *, prompt: Sequence[int] = (), hidden: Container[int] = ()
) -> list[str]:
    """A text for each token, which together are the text of all: "" where a later one completes the character."""
    stream = IncrementalDetokenizer(tokenizer, prompt, hidden=hidden)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.finish()] if texts else []


def _is_clear(text: str) -> bool:
    """Whether a text has something else than spaces, and didn't begin inside a character."""
    return bool(text.strip()) and _UNKNOWN not in text
