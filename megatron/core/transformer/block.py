"""A stage's layers in order, named by their global number and, when asked, recomputed in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Work, costs_of
from megatron.core.parallel.recompute import recomputed
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import Norm


@dataclass(frozen=True)
class RecomputePlan:
    """Which activations are recomputed instead of kept.

    ``selective``: attention scores only (arXiv:2205.05198). ``full``: whole layers; method ``uniform`` recomputes
    every layer in runs of ``num_layers``, ``block`` only the first ``num_layers`` layers of the stage.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1

    @classmethod
    def of(cls, training: TrainingConfig) -> RecomputePlan:
        """What ``--recompute-…`` asks for."""
        return cls(
            granularity=training.recompute_granularity,
            method=training.recompute_method or "uniform",
            num_layers=training.recompute_num_layers or 1,
        )

    def runs(self, count: int) -> list[tuple[int, int, bool]]:
        """Layers ``0 … count-1`` of a stage as consecutive (start, stop, recomputed?) runs."""
        if self.granularity != "full":
            return [(0, count, False)]
        if self.method == "block":
            first = min(self.num_layers, count)
            return [(i, i + 1, True) for i in range(first)] + ([(first, count, False)] if first < count else [])
        return [(i, min(i + self.num_layers, count), True) for i in range(0, count, self.num_layers)]


class TransformerBlock(nn.Module):
    """The layers of one stage, named by their number in the whole stack, and the final norm of the stack on its last.

    ``first``: number in the whole model of the stack's first layer, for a model of more stacks than one. ``cross``:
    whether layers attend to what an encoder made, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        *,
        layer_numbers: Sequence[int],
        final_norm: bool,
        causal: bool,
        recompute: RecomputePlan,
        first: int = 0,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self._recompute, self._hidden_size = recompute, config.hidden_size
        selective = recompute.granularity == "selective"
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(
                    config, context, number=first + number, causal=causal, cross=cross, recompute_core=selective
                )
                for number in layer_numbers
            }
        )
        self.final_layernorm = Norm(config.hidden_size, config, context) if final_norm else None

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        for start, stop, recompute in self._recompute.runs(len(self.layers)):
            if recompute and self.training:
                x = recomputed(self._run, x, inputs, start, stop)
            else:
                x = self._run(x, inputs, start, stop)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def costs(self, work: Work) -> Costs:
        """A run of layers that is recomputed keeps its input, and works with what its layers would keep."""
        layers, found = [costs_of(layer, work) for layer in self.layers.values()], costs_of(self.final_layernorm, work)
        for start, stop, recompute in self._recompute.runs(len(layers)):
            run = sum(layers[start:stop], start=Costs())
            if recompute:
                given = work.rows * self._hidden_size * work.stream_width
                run = dataclasses.replace(run, kept=given, working=run.working + run.kept)
            found += run
        return found

    def _run(self, x: Tensor, inputs: LayerInputs, start: int, stop: int) -> Tensor:
        for layer in list(self.layers.values())[start:stop]:
            x = layer(x, inputs)
        return x
