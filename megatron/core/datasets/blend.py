"""Which source each sample of a run comes from, when several are mixed by weight.

At every position the source that is furthest below its share is taken, so any prefix of the run has the requested mix,
a longer run keeps the order of a shorter one, and the choice needs no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.errors import ConfigError

_STRIDE = 4096  # positions between stored counts


@dataclass(frozen=True)
class BlendSpec:
    """Prefixes and the weight of each; without weights, each is weighted by its size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def without(self, prefixes: Collection[str]) -> BlendSpec:
        """The blend without some prefixes, in unchanged proportions."""
        kept = [place for place, prefix in enumerate(self.prefixes) if prefix not in prefixes]
        weights = None if self.weights is None else tuple(self.weights[place] for place in kept)
        return BlendSpec(tuple(self.prefixes[place] for place in kept), weights)


def parse_blend(entries: Sequence[str], *, flag: str = "--data-path") -> BlendSpec:
    """Read ``PREFIX PREFIX …`` or ``WEIGHT PREFIX WEIGHT PREFIX …``; a prefix of weight 0 is left out.

    Raises ConfigError for a list that is neither: Megatron-LM takes ``1 a b c`` for four prefixes without weights.
    """
    firsts, seconds = entries[0::2], entries[1::2]
    weights = [_number(entry) for entry in firsts]
    if len(entries) % 2 == 0 and all(weight is not None for weight in weights):
        chosen = tuple(weight for weight in weights if weight is not None)
        if not all(math.isfinite(weight) and weight >= 0 for weight in chosen) or sum(chosen) == 0:
            raise ConfigError(f"{flag} has weights {list(firsts)}: weights are numbers from 0 up, at least one above 0")
        used = [(prefix, weight) for prefix, weight in zip(seconds, chosen) if weight > 0]
        return BlendSpec(tuple(prefix for prefix, _ in used), tuple(weight for _, weight in used))
    odd_one = next((entry for entry in entries if _number(entry) is not None), None)
    if odd_one is not None:
        raise ConfigError(
            f"{flag} {' '.join(entries)} is neither a list of prefixes nor of WEIGHT PREFIX pairs ({odd_one} is a "
            f"number): give a weight before each prefix, or no weight; if {odd_one} is a prefix, write ./{odd_one}"
        )
    return BlendSpec(tuple(entries))


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights scaled to a sum of 1, up to rounding."""
    values = np.asarray(weights, np.float64)
    with np.errstate(over="ignore"):
        total = values.sum()
    if not math.isfinite(total):
        values = values / values.max()
        total = values.sum()
    return [float(share) for share in values / total]


class Interleaving:
    """The source of each position of a run, and the source's own sample number there.

    ``choices`` [positions]: source of each position. ``counts`` [sources]: samples taken of each.
    """

    def __init__(self, choices: NDArray[Any], *, num_sources: int) -> None:
        self.choices = choices
        blocks = [
            np.bincount(choices[start : start + _STRIDE], minlength=num_sources)
            for start in range(0, len(choices), _STRIDE)
        ]
        self._before = np.cumsum([np.zeros(num_sources, np.int64), *blocks], axis=0)
        self.counts: NDArray[np.int64] = self._before[-1]

    def __len__(self) -> int:
        return len(self.choices)

    def locate(self, position: int) -> tuple[int, int]:
        """Source at a position, and how many samples of it come before."""
        source = self.choices.item(position)
        block = position // _STRIDE
        since = int(np.count_nonzero(self.choices[block * _STRIDE : position] == source))
        return source, self._before.item(block, source) + since


def interleave(shares: Sequence[float], *, size: int) -> Interleaving:
    """Sources of ``size`` positions in proportion to ``shares``, which are ``normalized`` and above 0.

    Their last bit matters: it decides which of two sources that are equally far below their shares comes first.
    """
    choices = _choose(np.asarray(shares), start=0, stop=size, counts=np.zeros(len(shares), np.int64))
    return Interleaving(choices, num_sources=len(shares))


def interleave_all(shares: Sequence[float], *, sizes: Sequence[int]) -> Interleaving:
    """Sources of all samples of all sources, each sample once: the same rule, among sources that have samples left."""
    exact, left = np.asarray(shares), np.asarray(sizes, np.int64)
    counts = np.zeros_like(left)
    parts = [np.empty(0, np.min_scalar_type(len(exact)))]
    while left.any():
        active, start = np.flatnonzero(left), int(counts.sum())
        lasts_for = math.ceil((left[active] / _rates(exact[active])).min())  # about, until the first one is used up
        choices = _choose(exact[active], start=start, stop=start + lasts_for, counts=counts[active])
        ends = [np.flatnonzero(choices == number)[count - 1 : count] + 1 for number, count in enumerate(left[active])]
        first_used_up = min((int(end[0]) for end in ends if end.size), default=len(choices))
        choices = active[choices[:first_used_up]]
        taken = np.bincount(choices, minlength=len(exact))
        counts, left = counts + taken, left - taken
        parts.append(choices.astype(parts[0].dtype))
    return Interleaving(np.concatenate(parts), num_sources=len(exact))


def _choose(shares: NDArray[np.float64], *, start: int, stop: int, counts: NDArray[np.int64]) -> NDArray[Any]:
    """Source of each position in ``[start, stop)``, when ``counts`` [sources] were taken before.

    Position j takes the first source with the largest share · max(j, 1) − count: a sequential rule. Its choices soon
    don't depend on the first counts, so many stretches are computed side by side from guessed counts. Those whose guess
    differs from the counts at the end of the previous stretch are computed again, until all guesses are right. So the
    result is exactly the sequential one.
    """
    num_sources, size = len(shares), stop - start
    steps = max(256, math.isqrt(size))
    firsts = np.arange(start, stop, steps)
    # The guess: the samples taken before each stretch, spread over the sources so that columns add up to them.
    taken = firsts - start
    edges = np.floor(np.outer(np.cumsum(_rates(shares))[:-1], taken)).astype(np.int64)
    begins = counts[:, None] + np.diff(edges, axis=0, prepend=0, append=taken[None, :])
    ends = np.empty_like(begins)
    choices = np.empty((len(firsts), steps), np.min_scalar_type(num_sources))
    again = np.arange(len(firsts))
    while again.size:
        choices[again], ends[:, again] = _run_stretches(shares, firsts[again], begins[:, again], steps=steps)
        again = np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0)) + 1
        begins[:, again] = ends[:, again - 1]
    return choices.reshape(-1)[:size]


def _rates(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of the positions of each source; the shares of sources without samples left go to all others equally."""
    rates: NDArray[np.float64] = shares + (1 - shares.sum()) / len(shares)
    return rates


def _run_stretches(
    shares: NDArray[np.float64], firsts: NDArray[np.int64], begins: NDArray[np.int64], *, steps: int
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Choices [stretches, steps] and counts after them, from positions ``firsts`` and counts ``begins``."""
    choices = np.empty((steps, len(firsts)), np.min_scalar_type(len(shares)))
    counts, stretches = begins.astype(np.float64), np.arange(len(firsts))
    for step in range(steps):
        chosen = (np.outer(shares, np.maximum(firsts + step, 1)) - counts).argmax(axis=0)
        counts[chosen, stretches] += 1
        choices[step] = chosen
    return choices.T, counts


def _number(text: str) -> float | None:
    try:
        return None if "_" in text or not text.isascii() else float(text)  # float() would take 1_0 for 10
    except ValueError:
        return None
