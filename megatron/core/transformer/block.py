"""A stage's layers in order, named by their global number.

When asked, activations are recomputed in the backward pass or wait for it in main memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.training import RecomputeModule, TrainingConfig
from megatron.core.ops.text_cache import LayerStates, Paged, Slotted
from megatron.core.parallel.activation_offload import Offload
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.stack import StackConfig


@dataclass(frozen=True)
class RecomputePlan:
    """Which activations are recomputed instead of kept, and which are kept in main memory.

    ``selective``: ``modules`` of each layer (arXiv:2205.05198). ``full``: whole layers; method ``uniform`` recomputes
    every layer in runs of ``num_layers``, ``block`` only the first ``num_layers`` layers of the stage. ``offloaded``:
    how many layers of the stage, the first, keep in main memory what they keep, in tensors of ``least_offloaded``
    elements or more.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[RecomputeModule, ...] = ("core_attn",)
    offloaded: int = 0
    least_offloaded: int = 1 << 20

    @classmethod
    def of(cls, training: TrainingConfig) -> RecomputePlan:
        """What ``--recompute-…`` and ``--cpu-offloading-…`` ask for."""
        return cls(
            granularity=training.recompute_granularity,
            method=training.recompute_method or "uniform",
            num_layers=training.recompute_num_layers or 1,
            modules=training.recompute_modules,
            offloaded=training.offloaded_layers,
            least_offloaded=training.min_offloaded_tensor_size,
        )

    @property
    def selected(self) -> frozenset[RecomputeModule]:
        """The modules of each layer that are recomputed one by one."""
        return frozenset(self.modules if self.granularity == "selective" else ())

    def runs(self, count: int) -> list[tuple[int, int, bool]]:
        """Layers ``0 … count-1`` of a stage as consecutive (start, stop, recomputed?) runs, of one layer unless several
        are recomputed together. Those that begin before layer ``offloaded`` are offloaded.
        """
        if self.granularity == "full" and self.method == "uniform":
            return [(i, min(i + self.num_layers, count), True) for i in range(0, count, self.num_layers)]
        first = min(self.num_layers, count) if self.granularity == "full" else 0
        return [(i, i + 1, i < first) for i in range(count)]


class TransformerBlock(nn.Module):
    """The layers of one stage, named by their number in the stack, and the final norm of the stack on its last."""

    def __init__(
        self,
        stack: StackConfig,
        context: ModelContext,
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

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        plan = self._recompute
        offload = self._offload(x, inputs) if plan.offloaded and self.training and torch.is_grad_enabled() else None
        for start, stop, recompute in plan.runs(len(self.layers)):
            leaves = offload is not None and start < plan.offloaded
            with offload.group() if offload is not None and leaves else nullcontext():
                if recompute and self.training:
                    x = recomputed(self._run, x, inputs, start, stop)
                else:
                    x = self._run(x, inputs, start, stop)
            if offload is not None:
                offload.follow(x, grouped=leaves)
        if offload is not None:
            offload.finish()
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def layer_states(self) -> LayerStates:
        """What its layers need of a text in generation. A branch that declares nothing, and a second one of a kind in
        a layer, needs the whole text.
        """
        paged, slotted, unknown = dict[int, Paged](), dict[int, Slotted](), list[str]()
        for layer in self.layers.values():
            assert isinstance(layer, TransformerLayer), "layers of a block"
            for name, state in layer.text_states().items():
                if isinstance(state, Paged) and layer.number not in paged:
                    paged[layer.number] = state
                elif isinstance(state, Slotted) and layer.number not in slotted:
                    slotted[layer.number] = state
                elif state is not None:
                    unknown.append(type(getattr(layer, name)).__name__)
        return LayerStates(paged, slotted, tuple(dict.fromkeys(unknown)))

    def costs(self, workload: Workload) -> Costs:
        """A recomputed run of layers keeps its input; its working memory is what its layers would keep. An offloaded
        one keeps nothing here, but what two of them keep is here while one is computed and the next comes or goes.

        In the backward pass of a run, those behind it and the final norm have freed what they kept, unless the schedule
        splits that pass.
        """
        layers = [costs_of(layer, workload) for layer in self.layers.values()]
        found, aside = costs_of(self.final_layernorm, workload), list[int]()
        given, plan = workload.rows * self._hidden_size * workload.stream_itemsize, self._recompute
        offloads = workload.rows * self._hidden_size >= plan.least_offloaded
        stays = given if layers and "0" not in self.layers else 0  # what another stage sent, until its gradient is sent
        for start, stop, recompute in reversed(plan.runs(len(layers))):
            *earlier, run = layers[start:stop]
            for layer in reversed(earlier):
                run = layer.before(run, splits_backward=workload.splits_backward)
            if recompute:
                first = [*self.layers.values()][start]
                assert isinstance(first, TransformerLayer), "layers of a block"
                run = run.recomputed(given, keeps_input=first.begins_with_norm)
                others = run.gathered - layers[stop - 1].gathered - layers[stop - 1].ahead  # weights that are whole
                run = dataclasses.replace(run, working=run.working + max(others, 0))
            if offloads and start < plan.offloaded:
                here = run.replayed + (stays if start == 0 else 0)
                aside.append(run.kept - here)
                run = dataclasses.replace(run, kept=here, offloaded=run.kept - here)
            found = run.before(found, splits_backward=workload.splits_backward)
        both = max((one + other for one, other in zip(aside, [*aside[1:], 0])), default=0)
        return dataclasses.replace(found, working=found.working + max(0, both - found.kept))

    def _offload(self, x: Tensor, inputs: LayerInputs) -> Offload:
        """Offload of a forward pass's activations. What all layers share stays on the device: their inputs beside
        hidden states, and weights.
        """
        given = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
        stays = [*self.parameters(), *(each for each in given if isinstance(each, Tensor))]
        stays += [part for table in inputs.rotary.values() for part in (table.cos, table.sin)]
        stays += [x] if x.is_leaf else []
        return Offload(x.device, least=self._recompute.least_offloaded, kept=stays)

    def _run(self, x: Tensor, inputs: LayerInputs, start: int, stop: int) -> Tensor:
        for layer in list(self.layers.values())[start:stop]:
            x = layer(x, inputs)
        return x
