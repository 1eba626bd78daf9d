"""Experts of a graph: each computes all tokens, and the router's weights, zero for most, add them up."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from megatron.core.moe.layer import MoELayer
from megatron.core.transformer.inputs import LayerInputs


class AllExperts(nn.Module):
    """The layer without sorting tokens by expert: sizes that depend on numbers have no place in a graph whose batches
    are computed at once.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self._layer = layer

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        layer, tokens = self._layer, x.flatten(0, 1)
        routing = layer.router(x, inputs)
        experts = layer.experts
        shares = tokens.new_zeros(tokens.shape[0], len(experts.linear_fc1.weight), dtype=routing.weights.dtype)
        shares = shares.scatter(1, routing.ids, routing.weights).to(tokens.dtype)
        out = experts.of_all_tokens(tokens, shares).view_as(x)
        return out if layer.shared_experts is None else out + layer.shared_experts(x, inputs)


def without_dispatch(model: nn.Module) -> None:
    """Replace layers of experts in ``model`` by ones whose experts compute all tokens."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MoELayer):
                setattr(parent, name, AllExperts(child))
