"""The exponential moving average of the weights (EMA; arXiv:1412.6980, section 7.2): sharded as master weights are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.buffers import Span
from megatron.core.optimizer.storage import PlainStateStorage

AVERAGE = "ema"
AVERAGES = f"optimizer.{AVERAGE}."
"""The average in a checkpoint is ``optimizer.ema.<parameter>``."""


def lacks_average(where: str) -> str:
    """The sentence about a checkpoint without a moving average."""
    return (
        f"{where} holds no moving average of the weights: --load-ema needs a checkpoint of a run with --ema-decay, "
        "saved with its optimizer state after a step"
    )


@dataclass(frozen=True, eq=False)
class WeightAverage(PlainStateStorage):
    """The average of the weights of a span that a rank owns, in fp32 or wider: decay · average + (1 - decay) · weights
    after each step.
    """

    decay: float

    @classmethod
    def of(cls, decay: float, size: int, wide: torch.dtype, device: torch.device) -> WeightAverage:
        """An average of nothing yet: the first weights that it follows become its value."""
        return cls(torch.zeros(size, dtype=wide, device=device), wide, decay)

    def follow(self, part: Span, weights: Tensor, *, is_first: bool) -> None:
        """Take the wide ``weights`` of a part after a step, and forget what came before if ``is_first``."""
        average = part.of(self.numbers)
        if is_first:
            average.copy_(weights)
        else:
            average.lerp_(weights, 1.0 - self.decay)
