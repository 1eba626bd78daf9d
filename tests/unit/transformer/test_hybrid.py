"""The layers that a hybrid's pattern builds: one mixer each, drawn as Megatron-LM draws a hybrid's weights."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config.hybrid import HybridConfig
from megatron.config.moe import MoEConfig
from megatron.core.models.gpt.layer_kinds import decoder_stack, layers_with_experts
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from megatron.core.transformer.block import RecomputePlan
from tests.unit.config.command_lines import parse

GROUPS = (
    HybridConfig(hybrid_layer_pattern="*-E/E*/E*"),
    MoEConfig(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16),
)


def hybrid() -> GPTModel:
    """A small hybrid with two depths of multi-token prediction."""
    sizes = "--num-layers 3 --mtp-num-layers 2 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
    model = parse(sizes).model
    return GPTModel(model, ModelContext.single(), stack=decoder_stack(model, GROUPS), recompute=RecomputePlan(), seed=1)


def test_depths_have_their_own_layers() -> None:
    """Each depth has the layers of its part of the pattern, in that order, which reports of routers count after the
    model's.
    """
    built = hybrid()
    assert built.mtp is not None
    for depth in built.mtp.layers.values():
        first, second = depth.get_submodule("layers").children()
        assert hasattr(first.mlp, "experts") and hasattr(second, "self_attention")
    model = parse("--num-layers 3 --mtp-num-layers 2 --position-embedding-type rope").model
    assert layers_with_experts(model, GROUPS) == (
        *(False, False, True),
        *(True, False),
        *(True, False),
    )


@pytest.mark.parametrize(("name", "writers"), [("decoder.layers.0.self_attention.linear_proj.weight", 3)])
def test_initial_weights_count_what_writes_to_the_residual(name: str, writers: int) -> None:
    """Megatron-LM divides by sqrt(layers) in a hybrid, whose layers write once; by sqrt(2 layers) elsewhere."""
    weight = hybrid().get_parameter(name)
    assert torch.std(weight).item() == pytest.approx(0.02 / math.sqrt(writers), rel=0.05)
