"""How likely a model finds given texts: every token scored once, in windows that slide over texts of any length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TokenLosses(Protocol):
    """The model, as scoring sees it."""

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy ``[b, s]`` in nats of ``labels`` ``[b, s]``, each given the ``tokens`` ``[b, s]`` up to it."""
        ...


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, stop)`` of a text as input, of whose predictions those from ``first_scored`` on count."""

    start: int
    stop: int
    first_scored: int


def windows(num_predictions: int, *, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``length`` tokens that score predictions ``0 .. num_predictions - 1`` once each.

    Prediction ``i`` is that of token ``i + 1`` from the tokens up to ``i``. Windows after the first advance by
    ``stride``, so every later prediction sees at least ``length - stride`` tokens.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"a stride of {stride} doesn't fit windows of {length} tokens")
    scored = min(length, num_predictions)
    if scored:
        yield Window(0, scored, 0)
    while scored < num_predictions:
        stop = min(scored + stride, num_predictions)
        yield Window(max(0, stop - length), stop, scored)
        scored = stop


@dataclass(frozen=True)
class TextScore:
    """Negative log-likelihood in nats of ``tokens`` tokens."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss)

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits per byte of the original text: comparable between tokenizers."""
        return self.nats / math.log(2) / num_bytes


@torch.inference_mode()
def score_texts(
    token_losses: TokenLosses,
    texts: Sequence[Sequence[int]],
    *,
    length: int,
    stride: int,
    batch_size: int,
    device: torch.device,
) -> Iterator[TextScore]:
    """Scores of batches of windows over ``texts``; their sum is the score of all. The first token of a text is given.

    Windows are batched with others of about their length and padded on the right, where no prediction counts.
    """
    work = [(text, window) for text in texts for window in windows(len(text) - 1, length=length, stride=stride)]
    work.sort(key=lambda item: item[1].start - item[1].stop)
    for first in range(0, len(work), batch_size):
        batch = work[first : first + batch_size]
        widest = max(window.stop - window.start for _, window in batch)
        tokens = torch.zeros(len(batch), widest, dtype=torch.int64)
        labels, counts = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
        for row, (text, window) in enumerate(batch):
            size = window.stop - window.start
            tokens[row, :size] = torch.tensor(text[window.start : window.stop])
            labels[row, :size] = torch.tensor(text[window.start + 1 : window.stop + 1])
            counts[row, window.first_scored - window.start : size] = True
        losses = token_losses(tokens.to(device), labels.to(device))
        nats = losses.double()[counts.to(device)].sum()
        yield TextScore(float(nats), int(counts.sum()))
