"""The zero-shot tasks, by the names that flags give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.training.evaluation.zero_shot.lambada import Lambada
from megatron.training.evaluation.zero_shot.lm import LM
from megatron.training.evaluation.zero_shot.task import Asked, ZeroShotTask
from megatron.training.evaluation.zero_shot.wikitext import WikiText

ZERO_SHOT_TASKS: Mapping[str, Callable[[Asked], ZeroShotTask]] = {
    "WIKITEXT103": WikiText,
    "LAMBADA": Lambada,
    "LM": LM,
}
