"""Attention with linear biases (ALiBi, arXiv:2108.12409): the slope of each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """How much a score loses for each position between query and key, [heads] in fp64.

    For a power of two n the slopes are 2^(-8/n), 2^(-16/n), …; the heads beyond the largest power of two have every
    second slope of twice as many heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)
