"""Low-rank adapters beside the linear layers of experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config.lora import LoraConfig
from megatron.core.moe.grouped_linear import GroupedLinear
from megatron.core.ops.dropout import dropout
from megatron.core.ops.grouped_matmul import Groups, choose
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, sharding_of
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.tensor_parallel.low_rank import WHOLE, LowRankPair, check_parts


class ExpertAdapter(nn.ModuleDict):
    """What adapters add to a linear layer of every expert: a pair for each of its matrices, stacked over experts.

    ``weight``: the layer's, [experts, matrices, out, in], whose outputs expert tensor parallelism divides, or
    [experts, out, in], whose inputs it divides. ``place``: of the layer in the model. ``linear``: multiplies.
    """

    def __init__(
        self, weight: Tensor, settings: LoraConfig, context: ModelContext, *, place: str, parts: frozenset[str]
    ) -> None:
        super().__init__()
        self._context, self._place = context, place
        self._scale, self._dropout, self.rank = settings.scale, settings.dropout, settings.rank
        layout = sharding_of(weight)
        experts, *matrices, outputs, inputs = layout.shape
        self._names = ("gate", "up") if matrices == [2] else (WHOLE,)
        check_parts(parts, self._names, place)
        self._outputs, is_first = weight.shape[-2], bool(matrices)
        widths = (weight.shape[-1], self._outputs, self.rank)
        self.linear = GroupedLinear(choose(context.dtype, context.device, widths).backend, context)
        divided: dict[int, Axis] = {0: "ep", 1 if is_first else 2: "etp"}
        split = Sharding((experts,), divided, reduce=layout.reduce)
        whole = replace(split, split={0: "ep"}, partial_grad=("etp",))  # each rank multiplies by its part of the other
        of_a = replace(whole if is_first else split, shape=(experts, self.rank, inputs))
        of_b = replace(split if is_first else whole, shape=(experts, outputs, self.rank))
        for name in self._names:
            if "" in parts or name in parts:
                self[name] = LowRankPair(of_a, of_b, context, make=make_parameter)
        for parameter in self.parameters():
            parameter.active_share = getattr(weight, "active_share", 1.0)  # type: ignore[attr-defined]

    def add(self, rows: Tensor, groups: Groups) -> Tensor:
        """``[n, in]`` of each expert's rows to what is added to the layer's output, ``[n, matrices·out]``."""
        if self.training and self._dropout:
            rng = self._context.rng
            rng.enter(rng.key, f"adapter of {self._place}")
            rows = dropout(rows, self._dropout, rng.split)
        found, multiply = [], partial(self.linear, groups=groups)
        for name in self._names:
            if name not in self:
                found.append(rows.new_zeros(len(rows), self._outputs))
                continue
            pair = self[name]
            assert isinstance(pair, LowRankPair), "adapters hold pairs"
            found.append(pair.b(pair.a(rows, multiply) * self._scale, multiply))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
