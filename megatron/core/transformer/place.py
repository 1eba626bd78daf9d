"""Where a residual branch is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.config.model import ModelConfig
from megatron.config.training import RecomputeModule
from megatron.core.parallel.model_context import ModelContext


class StackSettings(Protocol):
    """What the branches of a stack share: sizes and choices of the model, and whether tokens see no later ones."""

    @property
    def model(self) -> ModelConfig:
        """Sizes and choices, and the number of the stack's layers."""

    @property
    def causal(self) -> bool:
        """Whether self-attention is causal."""

    @property
    def residual_writers(self) -> int:
        """Branches that add to the residual stream, as initial weights count them."""


@dataclass(frozen=True, eq=False)
class BranchPlace:
    """Where a branch is built: number of its layer in the whole model, and settings of its stack.

    ``recompute``: modules that are recomputed in the backward pass.
    """

    stack: StackSettings
    context: ModelContext
    number: int
    recompute: frozenset[RecomputeModule] = frozenset()
