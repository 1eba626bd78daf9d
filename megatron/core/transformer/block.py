"""A stage's layers in order, named by their global number and, when asked, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from megatron.config.training import RecomputeModule, TrainingConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.recompute import recomputed
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.stack import StackConfig


@dataclass(frozen=True)
class RecomputePlan:
    """Which activations are recomputed instead of kept.

    ``selective``: ``modules`` of each layer (arXiv:2205.05198). ``full``: whole layers; method ``uniform`` recomputes
    every layer in runs of ``num_layers``, ``block`` only the first ``num_layers`` layers of the stage.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[RecomputeModule, ...] = ("core_attn",)

    @classmethod
    def of(cls, training: TrainingConfig) -> RecomputePlan:
        """What ``--recompute-…`` asks for."""
        return cls(
            granularity=training.recompute_granularity,
            method=training.recompute_method or "uniform",
            num_layers=training.recompute_num_layers or 1,
            modules=training.recompute_modules,
        )

    @property
    def selected(self) -> frozenset[RecomputeModule]:
        """The modules of each layer that are recomputed one by one."""
        return frozenset(self.modules if self.granularity == "selective" else ())

    def runs(self, count: int) -> list[tuple[int, int, bool]]:
        """Layers ``0 … count-1`` of a stage as consecutive (start, stop, recomputed?) runs."""
        if self.granularity != "full":
            return [(0, count, False)]
        if self.method == "block":
            first = min(self.num_layers, count)
            return [(i, i + 1, True) for i in range(first)] + ([(first, count, False)] if first < count else [])
        return [(i, min(i + self.num_layers, count), True) for i in range(0, count, self.num_layers)]


class TransformerBlock(nn.Module):
    """The layers of one stage, named by their number in the stack, and the final norm of the stack on its last."""

    def __init__(
        self,
        stack: StackConfig,
        context: ParallelContext,
        *,
        layer_numbers: Sequence[int],
        final_norm: bool,
        recompute: RecomputePlan,
    ) -> None:
        super().__init__()
        model = stack.model
        self._recompute, self._hidden_size = recompute, model.hidden_size
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(stack, context, number=number, recompute=recompute.selected)
                for number in layer_numbers
            }
        )
        self.final_layernorm = Norm(model.hidden_size, model, context) if final_norm else None

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        for start, stop, recompute in self._recompute.runs(len(self.layers)):
            if recompute and self.training:
                x = recomputed(self._run, x, inputs, start, stop)
            else:
                x = self._run(x, inputs, start, stop)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def costs(self, workload: Workload) -> Costs:
        """A recomputed run of layers keeps its input; its working memory is what its layers would keep."""
        layers = [costs_of(layer, workload) for layer in self.layers.values()]
        found = costs_of(self.final_layernorm, workload)
        for start, stop, recompute in self._recompute.runs(len(layers)):
            run = sum(layers[start:stop], start=Costs())
            if recompute:
                given = workload.rows * self._hidden_size * workload.stream_itemsize
                run = run.recomputed(given)
            found += run
        return found

    def _run(self, x: Tensor, inputs: LayerInputs, start: int, stop: int) -> Tensor:
        for layer in list(self.layers.values())[start:stop]:
            x = layer(x, inputs)
        return x
