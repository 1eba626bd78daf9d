"""The model for transformers, written on its own: it is what a conversion's proof compares with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from typing_extensions import override


class RecurrentHFConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # transformers has few types
    """Settings as config.json has them."""

    model_type = "recurrent"


class Layer(nn.Module):
    """A recurrence and an MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.mlp_size
        self.floor = config.forget_floor
        self.norm1, self.norm2 = (nn.RMSNorm(size, eps=config.norm_eps) for _ in range(2))
        self.value, self.forget, self.gate, self.out = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.mlp_gate, self.mlp_up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, size, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h] -> [b, s, h]``."""
        normed, states = self.norm1(x), []
        forget = self.floor + (1 - self.floor) * self.forget(normed).sigmoid()
        value, state = self.value(normed), torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.lerp(value[:, t], state, forget[:, t])
            states.append(state)
        x = x + self.out(torch.stack(states, dim=1) * F.silu(self.gate(normed)))
        normed = self.norm2(x)
        out: Tensor = x + self.mlp_down(F.silu(self.mlp_gate(normed)) * self.mlp_up(normed))
        return out


class RecurrentForCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits of the next token."""

    config_class = RecurrentHFConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config) for _ in range(config.num_layers)),
                "norm": nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
            }
        )
        self.post_init()  # type: ignore[no-untyped-call]

    @override
    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """Ids ``[b, s]`` to logits ``[b, s, vocabulary]``."""
        x = self.model["embed"](input_ids)
        for layer in self.model["layers"]:
            x = layer(x)
        return CausalLMOutput(logits=F.linear(self.model["norm"](x), self.model["embed"].weight))


AutoConfig.register("recurrent", RecurrentHFConfig)
AutoModelForCausalLM.register(RecurrentHFConfig, RecurrentForCausalLM)
