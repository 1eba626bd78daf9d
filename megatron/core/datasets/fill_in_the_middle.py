"""Rearranges documents so that a model learns to fill in a missing middle (Bavarian et al. 2022, arXiv:2207.14255).

A document is cut at two random characters into prefix, middle and suffix. It becomes ``<prefix> prefix <suffix> suffix
<middle> middle``, or, with the prefix last, ``<prefix> <suffix> suffix <middle> prefix middle``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import random_state
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

_UNREADABLE = "\ufffd"  # the text of bytes that are no character
_STREAM = 0xF111
_NUM_MARKS = 3


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Rearranges each document of a sample with probability ``rate``, and a share ``spm_rate`` of these prefix last.

    ``prefix``, ``middle``, ``suffix``: ids of the marks. ``eod`` ends documents.
    """

    tokenizer: Tokenizer
    eod: int
    seed: int
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int

    def __call__(self, tokens: NDArray[np.int64], *, index: int, copy: int = 0) -> NDArray[np.int64]:
        """The sample's tokens, rearranged: as many, or fewer where the parts take fewer tokens than the whole.

        Depends on the seed, ``index``, ``copy`` (which of several uses of the data) and the tokens alone.
        """
        random = random_state(self.seed, _STREAM, copy, index & 0xFFFFFFFF, index >> 32)
        ends = np.flatnonzero(tokens == self.eod)
        parts = []
        for start, stop in zip([0, *(ends + 1).tolist()], [*ends.tolist(), len(tokens)]):
            chosen, last, *cuts = random.random_sample(4).tolist()
            part = tokens[start:stop]
            parts.append(self._rearranged(part, cuts, prefix_last=last < self.spm_rate) if chosen < self.rate else part)
            parts.append(tokens[stop : stop + 1])
        return np.concatenate(parts)

    def _rearranged(self, tokens: NDArray[np.int64], cuts: list[float], *, prefix_last: bool) -> NDArray[np.int64]:
        """A document, or a part of one, in at most as many tokens: the marks take the place of its last ones."""
        text = self.tokenizer.detokenize(tokens[:-_NUM_MARKS].tolist())
        first, second = sorted(int(cut * (len(text) + 1)) for cut in cuts)
        pieces = (text[:first], text[first:second], text[second:])
        prefix, middle, suffix = (self.tokenizer.tokenize(piece) for piece in pieces)
        too_many = len(prefix) + len(middle) + len(suffix) + _NUM_MARKS - len(tokens)  # cut words take more tokens
        if not text or _UNREADABLE in text or too_many > len(suffix):
            return tokens
        suffix = suffix[: len(suffix) - max(too_many, 0)]
        if prefix_last:
            arranged = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            arranged = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(arranged, np.int64)


def mark_id(tokenizer: Tokenizer, token: str, *, flag: str) -> int:
    """Id of a mark; raises ConfigError when it isn't one token, or the tokenizer adds tokens to every text."""
    added = tokenizer.tokenize("")
    if added:
        raise ConfigError(
            f"--fim-rate cuts texts into three parts, and this tokenizer adds to the start or end of each {added}: "
            "use a tokenizer that adds nothing, or leave --fim-rate out"
        )
    ids = tokenizer.tokenize(token)
    if len(ids) != 1:
        raise ConfigError(
            f"{flag} {token!r} is {len(ids)} tokens of this tokenizer: give one of its special tokens, for example one "
            "that --vocab-extra-ids adds"
        )
    return ids[0]
