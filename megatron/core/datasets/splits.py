"""Cut one data set into training, validation and test, and say how many samples each must give."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Literal, get_args

from megatron.errors import ConfigError

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


@dataclass(frozen=True)
class SplitSizes:
    """Samples asked of each split; None: every sample once; 0: the split isn't needed."""

    train: int | None
    valid: int | None
    test: int | None

    @classmethod
    def of_run(
        cls, *, train_samples: int, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
    ) -> SplitSizes:
        """Sizes for a run: all training samples, one validation per interval and a last one, one test."""
        one_evaluation = eval_iters * global_batch_size
        evaluations = train_iters // eval_interval + 1
        return cls(train=train_samples, valid=evaluations * one_evaluation, test=one_evaluation)

    def of(self, split: SplitName) -> int | None:
        """Samples asked of one split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


@dataclass(frozen=True)
class Share:
    """The part ``[low, high)`` of a data set, as fractions of its documents."""

    low: float
    high: float

    def units(self, count: int) -> range:
        """The ones of ``count`` that are this share's; halves round to even, as Megatron-LM does."""
        return range(round(self.low * count), round(self.high * count))


WHOLE = Share(0.0, 1.0)
MOCK_SPLIT = "1,1,1"


def parse_split(text: str) -> dict[SplitName, Share | None]:
    """Shares from ``--split``, e.g. ``969, 30, 1``: proportions in any unit; None for a share of nothing.

    Raises ConfigError when the text holds no proportions.
    """
    try:
        proportions = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        proportions = []
    if not 1 <= len(proportions) <= len(SPLITS) or sum(proportions) == 0:
        raise ConfigError(
            f"--split {text!r} must be one to three shares with a sum above 0: write train,valid,test, e.g. 969,30,1"
        )
    proportions += [0.0] * (len(SPLITS) - len(proportions))
    total = sum(proportions)
    bounds = itertools.accumulate((proportion / total for proportion in proportions), initial=0.0)
    shares = [Share(low, high) if low < high else None for low, high in itertools.pairwise(bounds)]
    return dict(zip(SPLITS, shares))
