"""Likelihoods of texts of any length: windows over them that score every token once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, stop)`` of a text as input, of whose predictions those from ``first_scored`` on count."""

    start: int
    stop: int
    first_scored: int


def windows(num_predictions: int, *, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``length`` tokens that score predictions ``0 .. num_predictions - 1`` once each.

    Prediction ``i`` is that of token ``i + 1`` from the tokens up to ``i``. Window ``n`` begins at ``n · stride``, and
    all but the first score their last ``stride`` predictions, so every later prediction sees at least ``length -
    stride`` tokens. These are the windows of Megatron-LM's WikiText task without those that score nothing.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"a stride of {stride} must be from 1 to the window of {length} tokens")
    start = scored = 0
    while scored < num_predictions:
        stop = min(start + length, num_predictions)
        yield Window(start, stop, scored)
        start, scored = start + stride, stop


@dataclass(frozen=True, eq=False)
class Sample:
    """A text that a model reads at once, and the predictions in it that are scored.

    ``tokens`` ``[length + 1]``: all but the last are read, all but the first are predicted. ``first_scored``: the first
    prediction that is scored; all after it are, too.
    """

    tokens: NDArray[Any]
    first_scored: int = 0

    @property
    def length(self) -> int:
        """Number of input tokens."""
        return len(self.tokens) - 1

    @property
    def num_scored(self) -> int:
        """Predictions that are scored."""
        return self.length - self.first_scored


def samples_of(ids: list[int], *, length: int, stride: int) -> Iterator[Sample]:
    """A text's tokens as samples that score each token but the first once."""
    tokens = np.array(ids, dtype=np.int64)
    for window in windows(len(ids) - 1, length=length, stride=stride):
        yield Sample(tokens[window.start : window.stop + 1], window.first_scored - window.start)


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 as in Megatron-LM, so that an untrained model's is finite."""
    return math.exp(min(20.0, loss))


@dataclass(frozen=True)
class TextScore:
    """Negative log-likelihood in nats of ``tokens`` tokens."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(1, self.tokens)

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits per byte of the original text: comparable between tokenizers."""
        return self.nats / math.log(2) / num_bytes
