"""Scaled rotary frequencies, with which a model reads longer sequences than it was first trained on.

A kind of scaling maps base, rotated width and the length of the sequence to one frequency for each pair of channels, in
fp64 on the CPU. ``original_length`` is the length of the sequences that the model was first trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """No scaling, and what all kinds share. ``attention_factor`` multiplies cosine and sine."""

    attention_factor: float = 1.0

    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """Angle per position of each pair of ``width`` channels, ``[width / 2]``, for a sequence of ``length``."""
        return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


UNSCALED = Scaling()
"""Plain rotary positions."""


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Divides positions by ``factor`` (position interpolation, arXiv:2306.15595)."""

    factor: float

    @override
    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """All divided by the factor."""
        return super().frequencies(width, base, length=length) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Divides by ``factor`` what turns less than ``low`` times within the original length, and keeps what turns more
    than ``high`` times; between them it interpolates (Llama 3.1, arXiv:2407.21783).
    """

    factor: float
    low: float
    high: float
    original_length: int

    @override
    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """Slow pairs are slowed."""
        plain = super().frequencies(width, base, length=length)
        turns = self.original_length * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return plain * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """Raises the base for sequences longer than the original length, with their length ("dynamic NTK", as transformers
    computes it). Shorter sequences keep the plain frequencies.
    """

    factor: float
    original_length: int

    @override
    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """Frequencies of a base that grows with ``length``."""
        stretch = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1.0)
        return super().frequencies(width, base * stretch ** (width / (width - 2)), length=length)


@dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """Divides slow pairs by ``factor`` and keeps fast ones (YaRN, arXiv:2309.00071).

    The number of a pair decides: from the one that turns ``beta_fast`` times within the original length to the one that
    turns ``beta_slow`` times, the division fades in. ``round_to_int``: these two are rounded to whole pairs.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    round_to_int: bool = True

    @override
    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """Slow pairs are slowed."""
        plain = super().frequencies(width, base, length=length)
        first, last = (self._pair_that_turns(turns, width, base) for turns in (self.beta_fast, self.beta_slow))
        if self.round_to_int:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        span = last - first or 0.001  # one pair is the border: transformers' and Megatron-LM's step is as steep
        divided = ((torch.arange(width // 2, dtype=torch.float64) - first) / span).clamp(0.0, 1.0)
        return plain * (1.0 - divided + divided / self.factor)

    def _pair_that_turns(self, turns: float, width: int, base: float) -> float:
        """The number of the pair, not rounded, that turns so often within the original length."""
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True, kw_only=True)
class LongRope(Scaling):
    """Divides each pair by a factor of its own: one of ``long_factors`` in sequences longer than the original length,
    else one of ``short_factors`` (LongRoPE, arXiv:2402.13753).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int

    @override
    def frequencies(self, width: int, base: float, *, length: int) -> Tensor:
        """Each divided by its factor."""
        factors = self.long_factors if length > self.original_length else self.short_factors
        return super().frequencies(width, base, length=length) / torch.tensor(factors, dtype=torch.float64)


def yarn_attention_factor(factor: float, *, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's temperature of attention: ``0.1 ln(factor) + 1`` unless the two scales, DeepSeek's, say otherwise."""
    growth = 0.1 * math.log(max(factor, 1.0))
    return (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """LongRoPE's temperature of attention for a context ``factor`` times the original length."""
    return math.sqrt(1.0 + math.log(max(factor, 1.0)) / math.log(original_length))
