"""The model: a GPT in which a gated recurrence takes the place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.models.gpt.model import GPTModel
from megatron.core.moe.layer import expert_layers, layers_with
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import StackedPart
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import Branch, StackConfig
from recurrent.config import RecurrentConfig


class Recurrence(nn.Module):
    """``h[t] = f[t]·h[t-1] + (1 - f[t])·v[t]``, and ``silu(g[t])·h[t]`` comes out (after HGRN, arXiv:2311.04823).

    Tensor parallelism splits the channels: each rank computes its own from the first token to the last. In generation
    the cache keeps the last ``h`` of each text.
    """

    def __init__(self, place: BranchPlace, *, forget_floor: float) -> None:
        super().__init__()
        self._floor, self._number = forget_floor, place.number
        config, context = place.stack.model, place.context
        hidden, bias = config.hidden_size, config.add_bias_linear
        parts = (StackedPart(hidden),) * 3
        self.linear_in = ColumnParallelLinear(
            hidden, 3 * hidden, context, init=input_init(config), bias=bias, parts=parts
        )
        self.linear_out = RowParallelLinear(hidden, hidden, context, init=output_init(place.stack), bias=bias)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``, through ``[S, b, h/tp]``."""
        fused = self.linear_in(x)
        if inputs.cache is None:
            mixed, _ = self._advance({"h": fused.new_zeros(x.shape[1], fused.shape[-1] // 3)}, fused)
        else:
            mixed = inputs.cache.advance(self._number, self._advance, fused)
        out: Tensor = self.linear_out(mixed)
        return out

    @property
    def text_state(self) -> Slotted:
        """What generation keeps of a text: this rank's channels of ``h``."""
        weight = self.linear_out.weight
        return Slotted({"h": (weight.shape[1],)}, {"h": weight.dtype})

    def _advance(self, states: States, fused: Tensor) -> tuple[Tensor, States]:
        """t tokens of n texts ``[t, n, 3h/tp]``, and the texts' states ``[n, h/tp]`` before them, to what comes out and
        the states behind them.
        """
        value, forget, gate = fused.chunk(3, dim=-1)
        kept = self._floor + (1 - self._floor) * torch.sigmoid(forget)
        new, state, each = (1 - kept) * value, states["h"], []
        for kept_now, new_now in zip(kept, new):
            state = kept_now * state + new_now
            each.append(state)
        return F.silu(gate) * torch.stack(each), {"h": state}

    def costs(self, workload: Workload) -> Costs:
        """Matmuls, and seven tensors of the rank's channels that the backward pass needs; ``--dry-run`` adds it up."""
        kept = 7 * workload.tokens * self.linear_out.weight.shape[1] * workload.itemsize
        return total_of((self.linear_in, self.linear_out), workload) + Costs(kept=kept)


def recurrent_model(config: ModelConfig, groups: Sequence[object], context: ModelContext, **part: Any) -> GPTModel:
    """A GPT of layers of a recurrence and an MLP or experts; ``part``: see ``GPTModel``."""
    build = partial(Recurrence, forget_floor=RecurrentConfig.among(groups).forget_floor)
    recurrence, moe = Branch("recurrence", "pre_recurrence_layernorm", "recurrence", build), MoEConfig.among(groups)
    marked = expert_layers(moe, (config.num_layers,), mtp_layers=config.mtp_num_layers)
    stack = StackConfig(config, causal=True, pattern=layers_with((recurrence,), moe, marked))
    return GPTModel(config, context, stack=stack, **part)
