"""Made-up documents, to try a model without any files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_DOCUMENTS = 100_000
_LENGTHS = (1, 4096)


class MockDocuments:
    """100,000 documents of 1 to 4,095 tokens that count 1, 2, 3 … and end with EOD, as Megatron-LM's mock data do.

    Counting starts over at the end of a smaller vocabulary.
    """

    prefix = fingerprint = "mock data"

    def __init__(self, *, eod: int, vocab_size: int) -> None:
        self.lengths: NDArray[np.int32] = np.random.default_rng(0).integers(*_LENGTHS, _NUM_DOCUMENTS).astype(np.int32)
        self._counting = np.arange(_LENGTHS[1]) % vocab_size
        self._eod = eod

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a document."""
        end = self.lengths.item(index)
        stop = end if length is None else offset + length
        tokens = self._counting[offset + 1 : stop + 1].copy()
        if stop == end:
            tokens[-1:] = self._eod
        return tokens
