"""Parameters, FLOPs and memory of expert models: published figures, closed forms, and what torch really keeps."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron.config.moe import MoEConfig
from megatron.config.training import RecomputeModule
from megatron.core.models.gpt.train_spec import TRAIN_SPEC
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.transformer.block import RecomputePlan
from megatron.planning import estimate
from megatron.planning.shrinking import shrunk
from tests.harness.kept import bytes_kept
from tests.unit.config.command_lines import run_of

SWIGLU: dict[str, Any] = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "group_query_attention": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def run_with(model: dict[str, Any], moe: dict[str, Any], *, ranks: int = 1, **parallel: Any) -> RunConfig:
    base = run_of(ranks=ranks, length=64, model=SWIGLU | model)
    return dataclasses.replace(base, extra=(MoEConfig(**moe),), parallel=ParallelConfig(**parallel))


def llama_like(layers: int, hidden: int, heads: int, groups: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": groups}
    return sizes | {"vocab_size": vocabulary} | more


@pytest.mark.parametrize(
    ("model", "moe", "whole", "active"),
    [
        pytest.param(
            llama_like(32, 4096, 32, 8, 32000, ffn_hidden_size=14336), {"num_experts": 8}, 46.703, 12.880, id="8x7B"
        ),
        pytest.param(
            llama_like(56, 6144, 48, 8, 32768, ffn_hidden_size=16384), {"num_experts": 8}, 140.630, 39.161, id="8x22B"
        ),
        pytest.param(
            llama_like(48, 2048, 32, 4, 151936, kv_channels=128, qk_layernorm=True),
            {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
            30.532,
            3.353,
            id="Qwen3-30B-A3B",
        ),
        pytest.param(
            llama_like(28, 3584, 28, 4, 151936, add_qkv_bias=True),
            {
                "num_experts": 64,
                "moe_router_topk": 8,
                "moe_ffn_hidden_size": 2560,
                "moe_shared_expert_intermediate_size": 20480,
                "moe_shared_expert_gate": True,
            },
            57.409,
            14.249,
            id="Qwen2-57B-A14B",
        ),
    ],
)
def test_published_models(model: dict[str, Any], moe: dict[str, Any], whole: float, active: float) -> None:
    """A dry run that counted an expert twice, or every expert for each token, would plan another model."""
    run = run_with(model, moe)
    assert estimate.model_parameters(run, TRAIN_SPEC) / 1e9 == pytest.approx(whole, abs=6e-4)
    assert estimate.active_parameters(run, TRAIN_SPEC) / 1e9 == pytest.approx(active, abs=6e-4)


def test_flops_are_those_of_the_chosen_experts() -> None:
    """Six for each active parameter of a matrix and token, and attention: MFU is stated with it."""
    moe = {"num_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 32}
    few, many = run_with({}, moe), run_with({}, moe | {"num_experts": 32})
    router = 6 * 16 * 64 * 4 * 64  # FLOPs of 16 more logits, in 4 layers, for 64 tokens
    difference = estimate.flops_per_sample(many, TRAIN_SPEC) - estimate.flops_per_sample(few, TRAIN_SPEC)
    assert difference == pytest.approx(router)
    more = run_with({}, moe | {"moe_router_topk": 5})
    difference = estimate.flops_per_sample(more, TRAIN_SPEC) - estimate.flops_per_sample(few, TRAIN_SPEC)
    assert difference == pytest.approx(6 * 3 * 32 * 64 * 4 * 64)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_gate": True, "moe_layer_freq": "2"},
        {"moe_router_dtype": "fp64"},
    ],
    ids=["plain", "sigmoid", "shared", "wide router"],
)
def test_activations(moe: dict[str, Any], precision: dict[str, Any]) -> None:
    """The estimate is within 3 % of what torch keeps."""
    sizes = {"hidden_size": 128, "attention_backend": "sdpa"}
    run = run_with(sizes, {"num_experts": 8, "moe_ffn_hidden_size": 256, **moe})
    run = dataclasses.replace(run, precision=PrecisionConfig(**precision))
    (costs,) = estimate.stage_costs(run, TRAIN_SPEC)
    assert costs.kept == pytest.approx(measured(run), rel=0.03)


@pytest.mark.parametrize(
    "modules",
    [("moe",), ("moe_act",), ("moe_act", "shared_experts"), ("layernorm", "moe_act", "shared_experts")],
    ids=" ".join,
)
def test_activations_with_recomputed_modules(modules: tuple[RecomputeModule, ...]) -> None:
    """What a module computes again isn't kept, but for the choices of its tokens."""
    moe = {"num_experts": 8, "moe_ffn_hidden_size": 256, "moe_shared_expert_intermediate_size": 128}
    whole = run_with({"hidden_size": 128, "attention_backend": "sdpa"}, moe)
    training = dataclasses.replace(
        whole.training, recompute_granularity="selective", recompute_modules=modules, seed=whole.training.seed
    )
    run = dataclasses.replace(whole, training=training)
    (costs,), (all_of_it,) = (estimate.stage_costs(each, TRAIN_SPEC) for each in (run, whole))
    assert costs.kept == pytest.approx(measured(run), rel=0.05)
    assert costs.kept < 0.9 * all_of_it.kept
    choices = 2 * 64 * 2 * 16 * 4  # of two sequences of 64 tokens, two each, in four layers
    assert (costs.replayed, costs.kept > choices) == (choices, True)


def measured(run: RunConfig) -> int:
    """Bytes that torch keeps of a microbatch."""
    context = ModelContext.single(dtype=torch.bfloat16 if run.precision.bf16 else torch.float32)
    plan = RecomputePlan.of(run.training)
    model = TRAIN_SPEC.build_model(run.model, run.extra, context, recompute=plan, seed=1).train()
    tokens = torch.randint(100, (run.training.micro_batch_size, run.data.seq_length))
    return bytes_kept(model, tokens)


def test_state_of_experts_is_divided_over_their_replicas() -> None:
    """With as many expert ranks as data ranks, ZeRO 1 shards nothing of the experts."""
    sizes: dict[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 64}
    run = run_with({}, sizes, ranks=4, expert_model_parallel_size=4, use_distributed_optimizer=True)
    experts = 2 * 3 * 64 * 64 * 4  # of two experts on a rank, three matrices, four layers
    dense = estimate.rank_parameters(run, TRAIN_SPEC).total - experts
    memory = estimate.memory_estimate(run, TRAIN_SPEC)
    assert memory.moments == pytest.approx(8 * (experts + dense / 4), rel=1e-3)


def test_a_small_copy_keeps_its_experts() -> None:
    """The parity command compares a small model: without experts it would prove nothing about them."""
    model = ModelConfig(num_layers=61, hidden_size=512, num_attention_heads=8, vocab_size=100)
    moe = MoEConfig(num_experts=8, moe_layer_freq="[0]*3+[1]*58", moe_ffn_hidden_size=2048)
    run = run_with({}, {}, ranks=8, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    small = shrunk(dataclasses.replace(run, model=model, extra=(moe,)))
    (kept,) = (group for group in small.extra if isinstance(group, MoEConfig))
    assert kept.expert_layers(small.model.num_layers) == (False, True)
    assert (kept.num_experts, kept.moe_ffn_hidden_size) == (8, 64)
    assert small.world_size == 8


def test_a_layer_computes_its_gradients_when_those_behind_it_have_freed_what_they_kept() -> None:
    """A wide first layer was counted beside all that layers of experts keep: recomputing its MLP seemed to save a fifth
    of what it does. Zero-bubble schedules keep what later gradients of weights need.
    """
    experts: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 64}
    model = llama_like(4, 64, 4, 2, 100, ffn_hidden_size=8192)
    run = run_with(model, experts | {"moe_layer_freq": "[0, 1, 1, 1]"})
    (found,) = estimate.stage_costs(run, TRAIN_SPEC)
    (first,) = estimate.stage_costs(
        run_with(model | {"num_layers": 1}, experts | {"moe_layer_freq": "[0]"}), TRAIN_SPEC
    )
    with mock.patch.object(PipelineSettings, "splits_backward", True):
        (split,) = estimate.stage_costs(run, TRAIN_SPEC)
    assert split.kept == found.kept
    final_norm = 2 * 64 * 64 * 4  # of two sequences of 64 tokens
    assert split.working - found.working == found.kept - first.kept + final_norm
