"""Faults that tests put into a run: flipped bits of weights and gradients, and spoiled results."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from megatron.config.guards import BitFlip, GuardsConfig
from megatron.core.distributed.buffers import FlatBuffer, parts_of
from megatron.core.parallel.rng import derive_seed
from megatron.training.guards.results import WORDS
from megatron.training.step import StepNumbers


def flip_bit(x: Tensor, bit: int | None) -> None:
    """Flip a bit of the largest element of ``x`` in place; None: the highest one of its exponent that is 0."""
    size, flat = x.element_size(), x.detach().view(-1)
    words = flat.view(WORDS[size])[int(flat.abs().argmax()) :][:1]
    pattern = int(words) % (1 << 8 * size)
    if bit is None:
        bit = next(each for each in reversed(range(8 * size - 1)) if not pattern >> each & 1)
    flipped = pattern ^ (1 << bit % (8 * size))
    words.fill_(flipped - (1 << 8 * size) if flipped >> (8 * size - 1) else flipped)


def flip_in(buffers: list[FlatBuffer], flip: BitFlip) -> None:
    """Flip a bit of this rank's first parameter, or of its gradient."""
    for buffer, _, span in parts_of(buffers, FlatBuffer.portion):
        flip_bit(buffer.own(span) if flip.where == "weight" else buffer.own_grads(span), flip.bit)
        return


def spoils(settings: GuardsConfig, iteration: int, *, seed: int) -> bool:
    """Whether ``--error-injection-rate`` spoils the result of an iteration: the same answer on every rank."""
    rate = settings.error_injection_rate
    return rate > 0 and derive_seed(seed, "error injection", iteration) % rate == 0


def spoiled(numbers: StepNumbers) -> StepNumbers:
    """The numbers with losses that are not finite."""
    totals = {name: (math.nan, count) for name, (_, count) in numbers.loss.totals.items()}
    return replace(numbers, loss=replace(numbers.loss, totals=totals))
