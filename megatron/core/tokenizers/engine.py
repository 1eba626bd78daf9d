"""Engines that turn batches of text into arrays of ids: the tokenizer's own library, or a faster one with the same ids.

The optional ``gigatoken`` library encodes byte-level BPE several times faster. It is used only where it is installed
and gives the same ids as the tokenizer's own library on a sample of the text to be encoded; further texts are compared
while they are encoded.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.base import Tokenizer, encoded_texts
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError

OWN, GIGATOKEN = "the tokenizer's own library", "gigatoken"
PROBE_BYTES = 1 << 19
CHECK_EVERY, CHECKED_CHARACTERS = 16, 8192  # one text in so many batches is compared, if one is short enough
CACHE_BYTES = 128 << 20  # of words seen: the library keeps them all, so it is loaded anew beyond this


@dataclass(frozen=True)
class Ids:
    """Ids of several texts, end to end, and the number of each text's."""

    flat: NDArray[Any]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class OwnEngine:
    """The tokenizer itself; ``dtype`` holds its ids. ``parts``: the texts to encode are parts of whole texts."""

    tokenizer: Tokenizer
    dtype: str
    parts: bool

    def encode(self, texts: Sequence[str]) -> Ids:
        """Ids of each text; raises DataError for text that has none, as Tokenizer does."""
        ids = (self.tokenizer.tokenize_parts if self.parts else self.tokenizer.tokenize_batch)(texts)
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        return Ids(np.fromiter(chain.from_iterable(ids), self.dtype, count=int(lengths.sum())), lengths)


class GigatokenEngine:
    """The gigatoken library, loaded with the pipeline of the tokenizer."""

    def __init__(self, tokenizer: RustTokenizer, dtype: str, *, parts: bool) -> None:
        self._pipeline, self._own = tokenizer.pipeline, OwnEngine(tokenizer, dtype, parts)
        self._dtype, self._batches = dtype, 0
        self._begin()

    def _begin(self) -> None:
        import gigatoken

        self._encode = gigatoken.Tokenizer(self._pipeline).backend.encode
        self._memory = resident_bytes()

    def encode(self, texts: Sequence[str]) -> Ids:
        """Ids of each text, as OwnEngine; raises ConfigError when a check finds other ids than the tokenizer's."""
        # One by one: batches are arrays of the awkward library, whose import takes longer than encoding most texts.
        ids = list(map(self._encode, encoded_texts(texts)))
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        flat = np.concatenate(ids, dtype=self._dtype, casting="unsafe") if ids else np.zeros(0, self._dtype)
        self._batches += 1
        if self._batches % CHECK_EVERY == 0:
            number = next((n for n, text in enumerate(texts) if 0 < len(text) <= CHECKED_CHARACTERS), None)
            if number is not None and not np.array_equal(self._own.encode([texts[number]]).flat, ids[number]):
                raise ConfigError(
                    "gigatoken and the tokenizer give different ids for the text that starts with "
                    f"{texts[number][:40]!r}: use --tokenizer-engine own"
                )
            if resident_bytes() > self._memory + CACHE_BYTES:
                self._begin()
        return Ids(flat, lengths)


Engine = OwnEngine | GigatokenEngine


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system doesn't report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def build_engine(name: str, tokenizer: Tokenizer, dtype: str, *, parts: bool = False) -> Engine:
    """The engine that ``choose_engine`` named."""
    if name == GIGATOKEN:
        assert isinstance(tokenizer, RustTokenizer), "gigatoken takes over the library's pipeline"
        return _gigatoken(tokenizer, dtype, parts)
    return OwnEngine(tokenizer, dtype, parts)


@lru_cache(maxsize=1)
def _gigatoken(tokenizer: RustTokenizer, dtype: str, parts: bool) -> GigatokenEngine:
    """One engine for a process, since it takes over the vocabulary."""
    return GigatokenEngine(tokenizer, dtype, parts=parts)


@dataclass(frozen=True)
class EngineChoice:
    """Which engine, and why."""

    name: str
    reason: str


def choose_engine(tokenizer: Tokenizer, probe: Sequence[str], dtype: str, *, parts: bool = False) -> EngineChoice:
    """gigatoken where it is installed and encodes ``probe`` exactly as the tokenizer does, else the tokenizer."""
    if not isinstance(tokenizer, RustTokenizer):
        return EngineChoice(OWN, f"gigatoken does not know {tokenizer.name}")
    try:
        found = build_engine(GIGATOKEN, tokenizer, dtype, parts=parts).encode(probe)
    except ImportError:
        return EngineChoice(OWN, "gigatoken is not installed")
    except Exception as error:  # whatever fails in the optional library, the tokenizer's own works
        said = str(error).partition("\n")[0]  # the other lines are a trace of the library's source
        return EngineChoice(OWN, f"gigatoken failed on a probe of the text: {said}")
    expected = build_engine(OWN, tokenizer, dtype, parts=parts).encode(probe)
    if not (np.array_equal(found.lengths, expected.lengths) and np.array_equal(found.flat, expected.flat)):
        return EngineChoice(OWN, "gigatoken gave different ids on a probe of the text")
    return EngineChoice(GIGATOKEN, f"identical on a probe of {len(probe):,} documents")
