"""How a layer adds its branches to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.stack import CROSS_ATTENTION, FEED_FORWARD, SELF_ATTENTION, Layer, StackConfig

AFTER, AFTER_MLP = "post_self_attn_layernorm", "post_mlp_layernorm"
LAYERS: dict[str, Layer] = {
    "in sequence": (SELF_ATTENTION, FEED_FORWARD),
    "norms before and after": (replace(SELF_ATTENTION, norm_after=AFTER), replace(FEED_FORWARD, norm_after=AFTER_MLP)),
    "norms after": (
        replace(SELF_ATTENTION, norm=None, norm_after=AFTER),
        replace(FEED_FORWARD, norm=None, norm_after=AFTER_MLP),
    ),
    "in parallel": (SELF_ATTENTION, replace(FEED_FORWARD, parallel=True)),
    "in parallel behind one norm": (SELF_ATTENTION, replace(FEED_FORWARD, norm="input_layernorm", parallel=True)),
    "scaled": (replace(SELF_ATTENTION, scale=0.25), replace(FEED_FORWARD, scale=4.0)),
}


def expected(name: str, layer: nn.Module, x: Tensor, inputs: LayerInputs) -> Tensor:
    """The formulas of the papers, from the layer's own modules."""
    part: dict[str, Any] = dict(layer.named_children())
    attention, mlp = part["self_attention"], part["mlp"]
    before, middle = part.get("input_layernorm"), part.get("pre_mlp_layernorm")
    after, last = part.get("post_self_attn_layernorm"), part.get("post_mlp_layernorm")
    if name == "in parallel behind one norm":
        assert middle is None and before is not None
        y: Tensor = x + attention(before(x), inputs) + mlp(before(x), inputs)
    elif name == "in parallel":
        assert middle is not None and before is not None
        y = x + attention(before(x), inputs) + mlp(middle(x), inputs)
    elif name == "norms after":
        assert middle is before is None and after is not None and last is not None
        y = x + after(attention(x, inputs))
        y = y + last(mlp(y, inputs))
    elif name == "norms before and after":
        assert before and middle and after and last
        y = x + after(attention(before(x), inputs))
        y = y + last(mlp(middle(y), inputs))
    else:
        assert before and middle
        first, second = (0.25, 4.0) if name == "scaled" else (1.0, 1.0)
        y = x + first * attention(before(x), inputs)
        y = y + second * mlp(middle(y), inputs)
    return y


@pytest.mark.parametrize("stream", [torch.float64, torch.float32], ids=["fp64", "fp32 residual of bf16"])
def test_arrangements_of_branches(stream: torch.dtype) -> None:
    """Each arrangement is its paper's formula; the residual stream keeps its type, and branches compute in theirs."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, hidden_dropout=0, attention_dropout=0)
    context = ModelContext.single(dtype=torch.bfloat16 if stream == torch.float32 else stream)
    inputs = LayerInputs(StreamKey(0), SideLosses())
    found = {}
    for name, branches in LAYERS.items():
        layer = TransformerLayer(StackConfig(config, causal=True, pattern=(branches,)), context, number=0)
        torch.manual_seed(0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(5, 2, 16, dtype=stream)
        found[name] = layer(x, inputs)
        assert found[name].dtype == stream
        if stream == torch.float64:
            torch.testing.assert_close(found[name], expected(name, layer, x, inputs), rtol=0, atol=1e-12)


def test_modules_of_a_layer_have_different_names() -> None:
    """The second module of a name replaced the first, and branches in sequence shared a norm, without a word."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    for branches in (
        (FEED_FORWARD, replace(FEED_FORWARD, norm="other")),
        (SELF_ATTENTION, replace(FEED_FORWARD, norm=SELF_ATTENTION.norm)),
        (SELF_ATTENTION, replace(FEED_FORWARD, norm_after="mlp")),
    ):
        stack = StackConfig(config, causal=True, pattern=(branches,))
        with pytest.raises(AssertionError, match="need different names"):
            TransformerLayer(stack, ModelContext.single(), number=0)


def test_every_dropout_of_a_layer_has_a_stream_of_its_own() -> None:
    """Scores of self-attention and cross-attention would lose the same places, and nothing else show it."""
    config, context = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2), ModelContext.single()
    pattern = ((SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD),)
    layer = TransformerLayer(StackConfig(config, causal=True, pattern=pattern), context, number=0)
    initialize(layer, context.mesh, seed=1)
    inputs = LayerInputs(StreamKey(0), SideLosses(), encoder_hidden_states=torch.randn(4, 1, 16))
    with mock.patch.object(type(context.rng), "enter", autospec=True) as enter:
        layer(torch.randn(3, 1, 16), inputs)
    places = [call.args[2] for call in enter.call_args_list]
    assert len({*places}) == len(places) == 5
