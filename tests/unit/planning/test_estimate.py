"""Parameters and memory by arithmetic, against models that are really built and what torch really keeps."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import Fp8Config, ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.registry import family_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.optimizer.element_rules import AdamW
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import sharding_of
from megatron.core.tensor_parallel.fp8_linear import delayed_scaling
from megatron.core.transformer.block import RecomputePlan
from megatron.planning import estimate, fitting
from megatron.planning.estimate import MemoryEstimate
from megatron.planning.fitting import Fit
from tests.harness import closed_forms
from tests.harness.kept import bytes_kept
from tests.tiers import pairs
from tests.unit.config.command_lines import run_of

QUIET = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
LLAMA = {
    **QUIET,
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
LATENT = {
    **{name: value for name, value in LLAMA.items() if "group" not in name},
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": QUIET,
    "hidden dropout": {"attention_dropout": 0.0},
    "attention dropout": {},
    "llama": LLAMA,
    "grouped": {**QUIET, "group_query_attention": True, "num_query_groups": 4},
    "one group": {**QUIET, "group_query_attention": True},
    "head norms": {**QUIET, "qk_layernorm": True},
    "head norms, rotary, grouped": {**LLAMA, "qk_layernorm": True},
    "head norms, one group": {**QUIET, "group_query_attention": True, "qk_layernorm": True},
    "head norms, scores": {"qk_layernorm": True},
    "norm over all heads": {**LLAMA, "qk_layernorm": True, "qk_layernorm_kind": "all_heads", "norm_placement": "after"},
    "norm weights per head": {**QUIET, "qk_layernorm": True, "qk_layernorm_kind": "per_head"},
    "l2 norm": {**LLAMA, "qk_l2_norm": True},
    "norms before and after": {**QUIET, "norm_placement": "both"},
    "norms after": {**QUIET, "norm_placement": "after"},
    "norms without weights": {**QUIET, "norm_parameters": "none"},
    "output gate": {**LLAMA, "attention_output_gate": True},
    "output gate, head norms, grouped": {
        **LLAMA,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "group_query_attention": True,
        "num_query_groups": 4,
    },
    "output gate, scores": {"attention_output_gate": True},
    "clipped": {**LLAMA, "clip_qkv": 8.0},
    "clipped scores": {"clip_qkv": 8.0},
    "multipliers": {**LLAMA, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_multiplier": 0.5},
    "multipliers, dropout": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "capped logits": {**QUIET, "final_logit_softcapping": 30.0},
    "wide heads": {**QUIET, "kv_channels": 32},
    "squared relu": {**QUIET, "activation": "squared_relu"},
    "clamped": {**QUIET, "activation": "quick_geglu", "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    "geglu": {**QUIET, "activation": "geglu_tanh"},
    "qkv bias": {**LLAMA, "add_qkv_bias": True},
    "mlp and output biases": {**LLAMA, "add_mlp_bias": True, "add_attention_output_bias": True},
    "norm of the embedding": {"attention_dropout": 0.0, "embedding_norm": True},
    "narrow words": {**QUIET, "word_embedding_size": 32},
    "first attention without norm": {**QUIET, "embedding_norm": True, "first_attention_norm": False},
    "parallel, one norm": {**QUIET, "parallel_attention": True},
    "parallel, two norms": {"attention_dropout": 0.0, "parallel_attention": True, "parallel_layernorm": True},
    "bias of the output layer": {**QUIET, "add_output_layer_bias": True},
    "windows, soft cap": {**LLAMA, "window_size": (31, 0), "attn_logit_softcapping": 5.0, "attention_backend": "auto"},
    "sinks": {**LLAMA, "softmax_type": "learnable"},
    "alibi, scores": {**QUIET, "position_embedding_type": "alibi", "attention_backend": "auto"},
    "latent attention": {**LATENT, "q_lora_rank": 48, "qk_layernorm": True, "v_head_dim": 12},
    "latent attention, equal widths": {**LATENT, "qk_layernorm": True, "v_head_dim": 24},
    "latent attention without norms": {**LATENT, "v_head_dim": 16, "add_qkv_bias": True},
    "future tokens": {**LLAMA, "mtp_num_layers": 2},
    "no positions": {**QUIET, "position_embedding_type": "none"},
}
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "runs of two": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "first two": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}


def train_spec(run: RunConfig) -> TrainSpec:
    return family_of(run.extra).train_spec


def kept_activations(run: RunConfig) -> list[int]:
    return [costs.kept for costs in estimate.stage_costs(run, train_spec(run))]


def memory_estimate(run: RunConfig) -> MemoryEstimate:
    return estimate.memory_estimate(run, train_spec(run))


def rank_parameters(run: RunConfig, *, pipeline_rank: int = 0) -> int:
    """What planning counts; the closed form says the same."""
    counted = estimate.rank_parameters(run, train_spec(run), pipeline_rank=pipeline_rank).total
    assert counted == closed_forms.rank_parameters(run, pipeline_rank=pipeline_rank)
    return counted


def model_parameters(run: RunConfig) -> int:
    """What planning counts; the closed form says the same."""
    counted = estimate.model_parameters(run, train_spec(run))
    assert counted == closed_forms.model_parameters(run)
    return counted


def what_fits(run: RunConfig, **device: Any) -> list[Fit]:
    return fitting.what_fits(run, train_spec(run), **device)


def context(dtype: torch.dtype, mesh: Mesh | None = None) -> ModelContext:
    mesh, device = mesh or Mesh.single(), torch.device("cpu")
    rng = RngStreams(1, mesh, device)
    return ModelContext(mesh=mesh, rng=rng, device=device, dtype=dtype, sequence_parallel=False)


def build(run: RunConfig, mesh: Mesh | None = None) -> nn.Module:
    dtype = torch.bfloat16 if run.precision.bf16 else torch.float32
    plan, here = RecomputePlan.of(run.training), context(dtype, mesh)
    here = dataclasses.replace(here, low_precision=LowPrecision(run.fp8, run.num_layers))
    model = train_spec(run).build_model(run.model, run.extra, here, recompute=plan).train()
    delayed_scaling([model], here)
    return model


def measured(run: RunConfig) -> int:
    """Bytes of all storages, parameters aside, that a forward pass leaves behind for the backward pass."""
    model = build(run)
    torch.nn.init.normal_(model.get_parameter("embedding.word_embeddings.weight"))
    tokens = torch.zeros(run.training.micro_batch_size, run.data.seq_length, dtype=torch.int64)
    mask = {"attention_mask": torch.ones_like(tokens, dtype=torch.bool)} if run.find(BertConfig) else {}
    depths = run.model.mtp_num_layers
    later = {"future_tokens": tokens.unsqueeze(1).expand(-1, depths, -1)} if depths else {}
    return bytes_kept(model, tokens, **mask, **later)


def run_with(model: dict[str, Any], precision: dict[str, Any], training: dict[str, Any] | None = None) -> RunConfig:
    # What auto takes on an accelerator; on a CPU it may take another one, which keeps a little less.
    fused = "sdpa" if model.get("attention_dropout", 0.1) == 0 else "auto"
    sizes = {"hidden_size": 128, "attention_backend": fused, **model}
    base = run_of(length=128, model=sizes, training=training or {})
    return dataclasses.replace(base, precision=PrecisionConfig(**precision))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "one group" not in name])
def test_parameters(name: str, ranks: int) -> None:
    """The closed form equals the model that is built: no layer is dropped and none is forgotten."""
    run = dataclasses.replace(
        run_of(ranks=ranks, model=ARCHITECTURES[name]), parallel=ParallelConfig(tensor_model_parallel_size=ranks)
    )
    model = build(run, Mesh.of(tp=ranks))
    assert rank_parameters(run) == sum(parameter.numel() for parameter in model.parameters())
    logical = sum(math.prod(sharding_of(parameter).shape) for parameter in model.parameters())
    assert model_parameters(run) == logical


@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_of_ranks_that_share_key_heads(groups: int) -> None:
    """Each rank holds the whole key/value head that it shares."""
    model = {**LLAMA, "num_query_groups": groups, "add_qkv_bias": True}
    run = dataclasses.replace(run_of(ranks=4, model=model), parallel=ParallelConfig(tensor_model_parallel_size=4))
    for rank in range(4):
        built = build(run, Mesh.of(tp=4, rank=rank))
        assert rank_parameters(run) == sum(parameter.numel() for parameter in built.parameters())


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}}
WITHOUT_NORMS = {"alone": ("layernorm",), "with networks": ("layernorm", "mlp")}


@pytest.mark.parametrize(("name", "precision"), pairs(ARCHITECTURES, PRECISIONS, rich=PRECISIONS))
def test_activations(name: str, precision: str) -> None:
    """The estimate is within 3 % of what torch keeps."""
    run = run_with(ARCHITECTURES[name], PRECISIONS[precision])
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bias_linear": False, "normalization": "RMSNorm"}], ids=["biases", "none"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_of_bert(ranks: int, more: dict[str, Any], binary_head: bool) -> None:
    """Kinds of tokens and both heads are counted as they are built."""
    run = dataclasses.replace(
        run_of(ranks=ranks, model={**QUIET, **more}),
        parallel=ParallelConfig(tensor_model_parallel_size=ranks),
        extra=(BertConfig(bert_binary_head=binary_head),),
    )
    model = build(run, Mesh.of(tp=ranks))
    assert rank_parameters(run) == sum(parameter.numel() for parameter in model.parameters())
    assert model_parameters(run) == sum(math.prod(sharding_of(each).shape) for each in model.parameters())


@pytest.mark.parametrize("model", [QUIET, {}, LLAMA], ids=["plain", "dropout", "rotary"])
@pytest.mark.parametrize("original", [False, True], ids=["norms first", "original"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_activations_of_bert(precision: dict[str, Any], original: bool, model: dict[str, Any]) -> None:
    """Padding and the first head included, the estimate is within 3 % of what torch keeps."""
    arranged = {**model, "apply_residual_connection_post_layernorm": original}
    run = dataclasses.replace(run_with(arranged, precision), extra=(BertConfig(),))
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


@pytest.mark.parametrize("name", RECOMPUTATION)
@pytest.mark.parametrize("model", [QUIET, {}, LLAMA], ids=["gpt2", "dropout", "llama"])
def test_activations_with_recomputation(name: str, model: dict[str, Any]) -> None:
    """What is recomputed is not kept."""
    run = run_with(model, {}, RECOMPUTATION[name])
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "latent" in name])
@pytest.mark.parametrize(
    "modules", [("mla_up_proj",), ("mla_up_proj", "core_attn"), ("core_attn",), ("mlp",)], ids=" ".join
)
def test_activations_with_recomputed_modules(name: str, modules: tuple[str, ...]) -> None:
    """Heads made from latents, or a dense network's inside, aren't kept."""
    training = {"recompute_granularity": "selective", "recompute_modules": modules}
    run, whole = run_with(ARCHITECTURES[name], {}, training), run_with(ARCHITECTURES[name], {})
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]
    only_sums = modules == ("core_attn",) and "equal" in name  # one fp32 number for each query: nothing is widened
    assert kept_activations(run)[0] < (1 if only_sums else 0.95) * kept_activations(whole)[0]


@pytest.mark.parametrize(("name", "modules"), pairs(ARCHITECTURES, WITHOUT_NORMS, rich=WITHOUT_NORMS))
def test_activations_without_results_of_norms(name: str, modules: str) -> None:
    """What a norm before a branch computes again isn't kept, in branches one after the other and in parallel."""
    training = {"recompute_granularity": "selective", "recompute_modules": WITHOUT_NORMS[modules]}
    run, whole = run_with(ARCHITECTURES[name], {"bf16": True}, training), run_with(ARCHITECTURES[name], {"bf16": True})
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]
    if not (run.model.apply_residual_connection_post_layernorm or run.model.norm_placement == "after"):
        assert kept_activations(run)[0] < 0.98 * kept_activations(whole)[0]


IN_FP8 = (
    *("gpt2", "attention dropout", "llama", "head norms, rotary, grouped", "squared relu", "norms before and after"),
    *("parallel, one norm", "parallel, two norms", "latent attention", "future tokens", "clipped"),
    "latent attention, equal widths",
)


@pytest.mark.parametrize(
    ("recipe", "name"),
    pairs(("tensorwise", "delayed", "blockwise", "mxfp8"), IN_FP8, rich=("llama",), more={"mxfp8": IN_FP8}),
)
def test_activations_in_fp8(recipe: str, name: str) -> None:
    """Linear layers keep their inputs in half the bytes, and share none of them."""
    whole = run_with(ARCHITECTURES[name], {"bf16": True})
    run = dataclasses.replace(whole, fp8=Fp8Config(fp8_format="e4m3", fp8_recipe=recipe))  # type: ignore[arg-type]
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]
    assert kept_activations(run)[0] < 0.97 * kept_activations(whole)[0]


def test_copies_of_weights_in_fp8() -> None:
    """Two bytes for each weight of a layer that multiplies in FP8: the first and the last don't."""
    fp8 = Fp8Config(fp8_format="hybrid", first_last_layers_bf16=True)
    run = dataclasses.replace(run_with({**LLAMA, "num_layers": 3}, {"bf16": True}), fp8=fp8)
    layer = sum(each.numel() for name, each in build(run).named_parameters() if ".1." in name and "linear" in name)
    assert memory_estimate(run).copies == 2 * layer > 0


def test_weights_gathered_in_fp8() -> None:
    """One byte of each weight and this rank's shard in bf16, and in a step a copy; one rank alone saves nothing."""
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    run = run_with(LLAMA, {"bf16": True})
    sizes = [each.numel() for name, each in build(run).named_parameters() if "layers." in name and each.dim() == 2]
    weights, quantized = sum(sizes), 5 * max(sizes)  # a matrix in fp32, and its codes
    for ranks in (1, 4):
        training = dataclasses.replace(run.training, global_batch_size=ranks * run.training.micro_batch_size)
        parallel = dataclasses.replace(run.parallel, use_distributed_optimizer=True)
        of = functools.partial(dataclasses.replace, run, training=training, parallel=parallel, world_size=ranks)
        off = memory_estimate(of(fp8=Fp8Config(**fp8)))  # type: ignore[arg-type]
        on = memory_estimate(of(fp8=Fp8Config(**fp8, fp8_param_gather=True)))  # type: ignore[arg-type]
        if ranks == 1:
            assert on == off
        else:
            assert off.weights - on.weights == weights - 2 * weights // ranks
            assert off.copies - on.copies == weights == on.copies
            assert (off.updating, on.updating) == (0, 2 * weights - on.copies + quantized)  # whole for a checkpoint


def test_activations_in_fp8_with_wide_gradients_of_weights() -> None:
    """These keep the inputs as they are."""
    run = run_with(LLAMA, {"bf16": True})
    fp8 = Fp8Config(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False)
    in_fp8 = dataclasses.replace(run, fp8=fp8)
    assert kept_activations(in_fp8) == kept_activations(run) == [pytest.approx(measured(in_fp8), rel=0.03)]


@pytest.mark.parametrize(
    "model",
    [
        {**LLAMA, "fp32_residual_connection": True},
        {"attention_softmax_in_fp32": True},
        {"attention_softmax_in_fp32": True, "attention_dropout": 0.0, "attention_backend": "eager"},
    ],
    ids=["fp32 residual", "fp32 softmax", "fp32 softmax without dropout"],
)
def test_activations_in_mixed_precision(model: dict[str, Any]) -> None:
    """Tensors that stay in fp32 count double."""
    run = run_with(model, {"bf16": True})
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


def test_recomputed_scores_exist_only_where_a_backend_makes_them() -> None:
    """A dry run with selective recomputation counted scores that a kernel never holds, and said it wouldn't fit."""
    fused, eager = (
        memory_estimate(
            run_of(length=4096, model=QUIET | {"attention_backend": name}, training=RECOMPUTATION["selective"])
        ).working
        for name in ("sdpa", "eager")
    )
    scores = 2 * 8 * 4096**2 * 4
    assert fused < scores / 8 < scores < eager


def test_working_memory_by_hand() -> None:
    """Nothing noticed when a layer's gradients, what it recomputes, or the loss's gradients were left out."""
    fused, tokens, hidden, inner = QUIET | {"attention_backend": "sdpa"}, 2 * 4096, 64, 256
    plain = run_of(length=4096, model=fused)
    # The MLP's gradients and two residual streams, when the final norm has freed what it kept.
    layer = tokens * (2 * inner + 2 * hidden - hidden)
    assert memory_estimate(plain).working == 4 * layer
    apart = dataclasses.replace(plain, parallel=ParallelConfig(gradient_accumulation_fusion=False))
    assert memory_estimate(apart).working == 4 * (layer + hidden * inner)  # and a weight's
    one_less = run_of(length=4096, model=fused | {"num_layers": 3})
    recomputed = run_of(length=4096, model=fused, training=RECOMPUTATION["full"])
    kept = memory_estimate(plain).kept - memory_estimate(one_less).kept
    assert memory_estimate(recomputed).working == 4 * layer + kept - 4 * tokens * hidden  # its input is there already
    words = run_of(length=4096, model=fused | {"vocab_size": 50000})
    rows = words.padded_vocab_size
    chunk = 1 << 27  # bytes of logits at a time
    assert memory_estimate(words).working == 4 * hidden * (2 * tokens + rows) + chunk


def big(ranks: int = 8, **parallel: Any) -> RunConfig:
    """A model of seven billion parameters on some ranks, in bf16."""
    model = {**LLAMA, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    base = run_of(ranks=ranks, length=4096, model={**model, "vocab_size": 32000}, training={"global_batch_size": 64})
    return dataclasses.replace(base, parallel=ParallelConfig(**parallel), precision=PrecisionConfig(bf16=True))


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_per_parameter"),
    [
        ({}, {}, 16),
        ({"bf16": True}, {}, 18),
        ({"fp16": True}, {}, 18),
        ({"bf16": True, "grad_reduce_in_bf16": True}, {}, 16),
        ({"bf16": True}, {"use_precision_aware_optimizer": True}, 16.125),
        ({"bf16": True}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, 14.125),
        (
            {"bf16": True, "main_grads_dtype": "bf16"},
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            10.125,
        ),
        ({"fp16": True}, {"use_precision_aware_optimizer": True}, 18),
        ({"bf16": True}, {"ema_decay": 0.999}, 22),
        ({}, {"optimizer": "sgd"}, 12),
        ({}, {"optimizer": "sgd", "sgd_momentum": 0.0}, 8),
    ],
)
def test_state(precision: dict[str, Any], optimizer: dict[str, Any], bytes_per_parameter: float) -> None:
    """Weights, gradients, main_params and moments are exact."""
    run = dataclasses.replace(
        run_of(), precision=PrecisionConfig(**precision), optimizer=OptimizerConfig(lr=1.0, **optimizer)
    )
    memory = memory_estimate(run)
    state = memory.weights + memory.gradients + memory.main_params + memory.moments
    assert state == rank_parameters(run) * bytes_per_parameter


def test_state_of_every_update_rule_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rule but SGD was counted as Adam, two tensors for each parameter: the memory of a new one was wrong."""
    monkeypatch.setattr(AdamW, "state_names", ("first", "second", "third"))
    run = run_of()
    assert memory_estimate(run).moments == rank_parameters(run) * 12


def test_frozen_parameters_take_their_weights_alone() -> None:
    """A run that fits because most of it is frozen would be refused at its start."""
    bf16 = dataclasses.replace(run_of(model={"attention_dropout": 0.0}), precision=PrecisionConfig(bf16=True))
    half = dataclasses.replace(bf16, optimizer=OptimizerConfig(lr=1.0, freeze=("embedding.*", "*.layers.0.*")))
    whole, layer = memory_estimate(bf16), estimate.rank_parameters(half, train_spec(half)).layers // 4
    assert estimate.frozen_parameters(half, train_spec(half)) == layer + (100 + 32) * 64  # words, positions
    here = layer + (128 + 32) * 64  # with the padding of the vocabulary
    assert memory_estimate(half) == dataclasses.replace(
        whole,
        gradients=whole.gradients - 4 * here,
        main_params=whole.main_params - 4 * here,
        moments=whole.moments - 8 * here,
        working=memory_estimate(half).working,
    )
    assert memory_estimate(half).working < whole.working  # the loss computes no gradient of frozen words


def test_sharded_optimizer() -> None:
    """Master weights and moments are divided over the replicas, weights and gradients are not."""
    whole, sharded = memory_estimate(big()), memory_estimate(big(use_distributed_optimizer=True))
    assert (sharded.weights, sharded.gradients) == (whole.weights, whole.gradients)
    assert sharded.main_params == pytest.approx(whole.main_params / 8, rel=1e-6)
    assert sharded.moments == pytest.approx(whole.moments / 8, rel=1e-6)


def test_offloaded_state_is_in_main_memory() -> None:
    """A run would be refused for state that isn't on its device, or fit only in the estimate."""
    base = dataclasses.replace(run_of(), precision=PrecisionConfig(bf16=True))
    half = OptimizerConfig(lr=1.0, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    whole, offloaded = memory_estimate(base), memory_estimate(dataclasses.replace(base, optimizer=half))
    assert offloaded.offloaded == pytest.approx((whole.main_params + whole.moments) / 2, rel=1e-6)
    assert offloaded.states == pytest.approx(whole.states - offloaded.offloaded, rel=1e-6)


def test_tensor_and_sequence_parallelism() -> None:
    """Tensor parallelism divides the inside of layers, sequence parallelism what lies between them."""
    (one,) = kept_activations(big())
    (split,) = kept_activations(big(tensor_model_parallel_size=8))
    (both,) = kept_activations(big(tensor_model_parallel_size=8, sequence_parallel=True))
    assert one / 2 > split > both > one / 8


def test_working_memory_never_holds_all_logits() -> None:
    """The vocabulary loss works in chunks, so a long micro batch costs hidden states, not logits."""
    run = big()
    logits = run.data.seq_length * run.training.micro_batch_size * run.padded_vocab_size * 4
    assert memory_estimate(run).working < logits


def test_what_fits_fits() -> None:
    """Suggestions hold what they promise, are cheapest first, and none contains another."""
    run = big(ranks=8)
    assert memory_estimate(run).total > 80e9
    fits = what_fits(run, device_bytes=80e9, ranks_per_node=8)
    assert 0 < len(fits) <= 3
    assert fits[0].flags == "--use-distributed-optimizer"
    for fit in fits:
        assert fit.total <= 80e9
        assert not any(other is not fit and set(other.flags.split()) < set(fit.flags.split()) for other in fits)


def test_nothing_fits_into_nothing() -> None:
    """No promise is made that cannot be kept."""
    assert what_fits(big(), device_bytes=1e6, ranks_per_node=8) == []


def test_suggestions_respect_the_rules() -> None:
    """Three heads cannot be split over two ranks, so that is not suggested."""
    model = {"num_layers": 24, "hidden_size": 3072, "num_attention_heads": 3, **QUIET}
    run = run_of(ranks=4, length=2048, model=model, training={"micro_batch_size": 8})
    fits = what_fits(run, device_bytes=60e9, ranks_per_node=8)
    assert fits
    assert not any("--tensor-model-parallel-size" in fit.flags for fit in fits)


def test_long_sequences_are_divided() -> None:
    """A sequence too long for a rank is what context parallelism is for; three heads leave nothing else to divide."""
    model = {"num_layers": 24, "hidden_size": 3072, "num_attention_heads": 3, **QUIET}
    run = run_of(ranks=8, length=1 << 17, model=model, training={"micro_batch_size": 1, "global_batch_size": 8})
    full = dataclasses.replace(run, training=dataclasses.replace(run.training, recompute_granularity="full"))
    fits = what_fits(full, device_bytes=50e9, ranks_per_node=8)
    assert fits and all("--context-parallel-size" in fit.flags for fit in fits)
    sliced = dataclasses.replace(full, parallel=ParallelConfig(context_parallel_size=8))
    assert memory_estimate(sliced).kept < memory_estimate(full).kept / 7


def test_model_groups_alone_need_a_vocabulary() -> None:
    """A size that is not known is not guessed."""
    with pytest.raises(AssertionError, match="vocabulary size"):
        ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1).padded_vocab_size(1)
