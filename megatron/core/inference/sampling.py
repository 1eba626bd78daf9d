"""Sampling of the next token: greedy, temperature, top-k and top-p, from logits and random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    ``temperature`` divides the logits (0: always the likeliest token). ``top_k`` keeps the k likeliest tokens (0: all;
    1: always the likeliest). ``top_p`` keeps the likeliest tokens until their probabilities exceed p (0: all).
    With both, top-p looks at what top-k has left.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (always the most probable token) or above"
            )
        if self.top_k < 0:
            raise ConfigError(f"top-k is {self.top_k}; it must be 0 (all tokens) or the number of tokens to keep")
        if not 0.0 <= self.top_p <= 1.0:
            raise ConfigError(f"top-p is {self.top_p}; it is a probability from 0 (all tokens) to 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.top_k == 1 or self.temperature == 0.0


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """``logits`` ``[b, v]`` divided by the temperature, with -inf wherever top-k or top-p removes a token."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if 0.0 < sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        # A token is removed when the more probable ones together exceed p, so the first always stays.
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before > sampling.top_p)
        logits = logits.masked_fill(removed, float("-inf"))
    return logits


def next_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """Token ids ``[b]`` for ``logits`` ``[b, v]``.

    ``uniforms`` ``[b]``: a float64 number in [0, 1) per row, which picks the token by inverting the cumulative
    distribution. So a row's token depends on its own logits and number only, not on its neighbours in the batch.
    """
    if sampling.is_greedy:
        return logits.argmax(dim=-1)
    cumulative = filtered_logits(logits, sampling).double().softmax(dim=-1).cumsum(dim=-1)
    targets = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
