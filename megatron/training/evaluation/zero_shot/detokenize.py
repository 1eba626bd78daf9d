"""Detokenizers of word-by-word corpora, chosen by the file's path as in Megatron-LM.

Published perplexities depend on these replacements and on their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron.errors import DataError
from megatron.training.evaluation.zero_shot.files import FLAG

Replacement = tuple[str, str]

_WIKITEXT_BEFORE: tuple[Replacement, ...] = (
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
# Blanks on the inner side of a pair, up to the nearest closing one.
_WIKITEXT_PAIRS = tuple(
    (
        re.compile(rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"),
        rf"{opening}\1{closing}",
    )
    for opening, closing in ("()", "[]", "{}", '""', "''")
)
_WIKITEXT_AFTER: tuple[Replacement, ...] = (
    *((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB: tuple[Replacement, ...] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """Text of WikiText-2 and WikiText-103."""
    text = _replaced(text, _WIKITEXT_BEFORE)
    for pattern, pair in _WIKITEXT_PAIRS:
        text = pattern.sub(pair, text)
    return _replaced(text, _WIKITEXT_AFTER)


def penn_treebank(text: str) -> str:
    """Text of the Penn Treebank's language-modelling version."""
    return _replaced(text, _PTB)


def unchanged(text: str) -> str:
    """LAMBADA's file for GPT-2 holds plain text."""
    return text


def detokenizer_for(path: Path, *, flag: str = FLAG) -> Callable[[str], str]:
    """The detokenizer for a path that contains the corpus's name; raises DataError for another path."""
    known = {"ptb": penn_treebank, "wiki": wikitext, "lambada": unchanged}
    found = next((function for name, function in known.items() if name in str(path)), None)
    if found is None:
        raise DataError(
            f"{flag} {path}: WIKITEXT103 recognizes the corpus by its path, which must contain ptb, "
            "wiki or lambada; rename the file, or use LM for other text"
        )
    return found


def _replaced(text: str, replacements: tuple[Replacement, ...]) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text
