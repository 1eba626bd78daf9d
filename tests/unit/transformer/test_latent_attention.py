"""Latent attention against DeepSeek's in transformers, and what its settings mean."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.positions import RotaryPositions, score_factor_of
from megatron.core.transformer.stack import StackConfig

pytest.importorskip("transformers", reason="the other latent attention is that of the dev extra's transformers")

from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tests.harness.published import in_fp64

HIDDEN, LENGTH = 42, 24
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 3, "q_lora_rank": 14, "kv_lora_rank": 10}
THEIRS: dict[str, Any] = {**SIZES, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
OURS: dict[str, Any] = {**SIZES, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 5}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8}
NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (v3, DeepseekV3Config, {"mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    "DeepSeek-V2": (v2, DeepseekV2Config, {"mscale": 0.707, "mscale_all_dim": 0.707}, {}),
    "one scale": (v3, DeepseekV3Config, {"mscale": 1.3, "mscale_all_dim": 0.6}, {"attention_bias": True}),
    "direct queries": (v3, DeepseekV3Config, {}, {"q_lora_rank": None}),
    "other pairs": (v3, DeepseekV3Config, {}, {"rope_interleave": False}),
}


def ours(scales: dict[str, Any], more: dict[str, Any]) -> ModelConfig:
    settings: dict[str, Any] = {**OURS, "q_lora_rank": more.get("q_lora_rank", SIZES["q_lora_rank"])}
    bias = more.get("attention_bias", False)
    return ModelConfig(
        num_layers=1,
        vocab_size=9,
        max_position_embeddings=64,
        multi_latent_attention=True,
        position_embedding_type="yarn",
        rotary_base=100.0,
        rotary_scaling_factor=8.0,
        original_max_position_embeddings=8,
        rotary_interleaved=more.get("rope_interleave", True),
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        qk_layernorm=True,
        add_bias_linear=False,
        add_qkv_bias=bias,
        add_attention_output_bias=bias,
        attention_dropout=0.0,
        **settings,
        **scales,
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str) -> None:
    """Another scale of scores, order of channels or share of the rotary key trains another model; to 1e-9."""
    module, kind, scales, more = CASES[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 2, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(LENGTH, 2, HIDDEN, generator=generator, dtype=torch.float64)
    with in_fp64():
        config = kind(**{**THEIRS, **more}, num_key_value_heads=3, rope_parameters={**YARN, **scales})
        config._attn_implementation = "eager"
        prefix = kind.__name__.removesuffix("Config")
        theirs = getattr(module, f"{prefix}Attention")(config, 0).double().eval()
        weights = {}
        for parameter_name, parameter in theirs.named_parameters():
            parameter.data.normal_(0.0, 0.4, generator=generator)
            weights[parameter_name] = parameter
        angles = getattr(module, f"{prefix}RotaryEmbedding")(config)(x, torch.arange(LENGTH).unsqueeze(0))
        hidden = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)[None, None]
        out = theirs(x.transpose(0, 1), position_embeddings=angles, attention_mask=hidden)[0].transpose(0, 1)
        found_theirs = torch.autograd.grad(out, [x, *weights.values()], upstream)

    context, config = ModelContext.single(dtype=torch.float64), ours(scales, more)
    layer = LatentAttention(BranchPlace(StackConfig(config, causal=True), context, 0))
    pairs = dict(layer.named_parameters())
    renamed = {name: f"{NAMES[name.split('.')[0]]}.{name.split('.')[1]}" for name in pairs}
    assert sorted(renamed.values()) == sorted(weights)
    with torch.no_grad():
        for own, other in renamed.items():
            pairs[own].copy_(weights[other])
    inputs = LayerInputs(StreamKey(0), SideLosses(), rotary=RotaryPositions(config, context)(x, None))
    result = layer(x, inputs)
    found = dict(zip(["x", *renamed.values()], torch.autograd.grad(result, [x, *pairs.values()], upstream)))
    assert (result - out).abs().max() < 1e-9
    for other, expected in zip(["x", *weights], found_theirs):
        assert (found[other] - expected).abs().max() < 1e-9, other


def test_a_given_scale_replaces_that_of_yarn() -> None:
    """--softmax-scale is the whole factor of scores, without the one for longer contexts."""
    context, found = ModelContext.single(dtype=torch.float64), []
    usual = score_factor_of(ours({}, {})) / math.sqrt(OURS["qk_head_dim"] + OURS["qk_pos_emb_head_dim"])
    x = torch.randn(LENGTH, 2, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for scale in (None, usual, usual / 2):
        config = dataclasses.replace(ours({}, {}), softmax_scale=scale, init_method_std=0.4)
        layer = LatentAttention(BranchPlace(StackConfig(config, causal=True), context, 0))
        initialize(layer, context.mesh, seed=3)
        rotary = RotaryPositions(config, context)(x, None)
        found.append(layer(x, LayerInputs(StreamKey(0), SideLosses(), rotary=rotary)))
    assert (found[0] - found[1]).abs().max() < 1e-12
    assert (found[0] - found[2]).abs().max() > 1e-3


def test_a_window_hides_earlier_tokens() -> None:
    """With --window-size 3 0 a token sees itself and three before it, as in other attention."""
    context, config = ModelContext.single(dtype=torch.float64), dataclasses.replace(ours({}, {}), window_size=(3, 0))
    layer = LatentAttention(BranchPlace(StackConfig(config, causal=True), context, 0))
    initialize(layer, context.mesh, seed=3)
    x = torch.randn(LENGTH, 1, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = LayerInputs(StreamKey(0), SideLosses(), rotary=RotaryPositions(config, context)(x, None))
    with torch.no_grad():
        before = layer(x, inputs)
        x[0] += 1.0
        moved = (layer(x, inputs) - before).abs().amax((1, 2)) > 1e-12
    assert moved.tolist() == [True] * 4 + [False] * (LENGTH - 4)


def test_widths_of_heads_follow() -> None:
    """Rules, estimates and rotary tables read one width, whatever --kv-channels says."""
    config = ours({}, {})
    assert (config.kv_channels, config.rotary_width, config.num_query_groups) == (14, 8, 3)
