"""Smaller models: what is left out is as if it were zero, and every number of ranks leaves out the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import LazyTensor, PortableModel, load_weights
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.pruning.importance import Importance, importance_of
from megatron.core.models.gpt.pruning.pruned import heads_of_groups, most_important, pruned
from megatron.core.models.gpt.pruning.targets import Targets, without_mtp
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError, ConfigError
from tests.harness import run_ranks
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tests.unit.conversion.expert_checkpoints import LATENT
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors

TOKENS = torch.randint(0, 96, (5, 16), generator=torch.Generator().manual_seed(0))
MOE = MoEConfig(
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=16,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_layer_freq="[0,1,1]",
)
NEURONS = Targets(ffn_hidden_size=32)
HEADS = Targets(num_attention_heads=2, num_query_groups=1)
GROUPED = {**MODERN, "num_attention_heads": 8, "num_query_groups": 4}
EXPERTS = Targets(num_experts=3, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=8)
KINDS: dict[str, tuple[dict[str, Any], tuple[object, ...], Targets]] = {
    "gated, grouped": (GROUPED, (), Targets(ffn_hidden_size=32, num_attention_heads=3, num_query_groups=3)),
    "a head less of each group": (GROUPED, (), Targets(num_attention_heads=4)),
    "biases, tied": (CLASSIC, (), Targets(ffn_hidden_size=100, num_attention_heads=3, drop=(1,))),
    "experts": (MODERN, (MOE,), dataclasses.replace(EXPERTS, ffn_hidden_size=32)),
    "experts with biases": (
        {**MODERN, "add_bias_linear": True},
        (dataclasses.replace(MOE, moe_router_score_function="softmax", moe_router_enable_expert_bias=False),),
        EXPERTS,
    ),
    "latent": ({**MODERN, **LATENT, "kv_channels": None}, (), Targets(num_attention_heads=3)),
    "gates, norms and sinks of heads": (
        {
            **GROUPED,
            "attention_output_gate": True,
            "softmax_type": "learnable",
            "qk_layernorm": True,
            "qk_layernorm_kind": "per_head",
        },
        (),
        Targets(num_attention_heads=4, num_query_groups=2),
    ),
    "windows, layers": (
        {**MODERN, "window_size": (4, 0), "window_attn_skip_freq": "[1,0,1]", "no_rope_freq": "[0,0,1]"},
        (),
        Targets(num_layers=2),
    ),
    "hybrid": (
        {**MODERN, "position_embedding_type": "none"},
        (
            HybridConfig(hybrid_layer_pattern="M-*E-"),
            MambaConfig(mamba_head_dim=8, mamba_num_groups=2, mamba_state_dim=4),
            dataclasses.replace(MOE, moe_layer_freq="[0,0,0,1,0]"),
        ),
        Targets(ffn_hidden_size=40, num_experts=2, num_attention_heads=2, num_query_groups=1, drop=(1,)),
    ),
    "delta nets": (
        MODERN,
        (
            GatedDeltaNetConfig(
                experimental_attention_variant="gated_delta_net",
                linear_attention_freq="[1,0,1]",
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
            ),
        ),
        Targets(num_attention_heads=2, num_query_groups=1, ffn_hidden_size=30, drop=(2,)),
    ),
}


def model_of(settings: dict[str, Any], *parts: object, layers: int = 3, **more: Any) -> PortableModel:
    """A model with random weights in fp64."""
    hybrid = HybridConfig.among(parts)
    model = ModelConfig(**{**settings, "num_layers": len(hybrid.letters) or layers, "vocab_size": 96, **more})
    groups = (GPTConfig(), *parts)
    return portable(model, random_tensors(model, groups, dtype=torch.float64), groups)


def whole(model: PortableModel) -> nn.Module:
    """All of it, in fp64."""
    context = dataclasses.replace(ModelContext.single(), dtype=torch.float64)
    built = family_of(model.groups).train_spec.build_model(model.model, model.groups, context).eval()
    load_weights(built, model, context.mesh)
    return built.requires_grad_(False)


def logits(model: PortableModel) -> Tensor:
    """Of the texts."""
    output = whole(model)(TOKENS)
    assert isinstance(output, VocabularyOutput)
    return output.logits()


def with_tensors(model: PortableModel, changed: Mapping[str, Tensor]) -> PortableModel:
    """The model with other numbers in some tensors."""
    lazy = {name: LazyTensor(tuple(each.shape), each.dtype, each.clone) for name, each in changed.items()}
    return dataclasses.replace(model, tensors={**model.tensors, **lazy})


@pytest.fixture(scope="module")
def scores() -> dict[str, Importance]:
    """Importance, measured once for each kind."""
    return {}


def scored(kind: str, scores: dict[str, Importance]) -> tuple[PortableModel, Importance, Targets]:
    """A kind of model, its importance, and what is asked of it."""
    settings, parts, targets = KINDS[kind]
    model = model_of({name: value for name, value in settings.items() if value is not None}, *parts)
    if kind not in scores:
        scores[kind] = importance_of(model, TOKENS, context=ParallelContext.single())
    return model, scores[kind], targets


FIRST = ["gated, grouped", "biases, tied", "experts", "latent", "gates, norms and sinks of heads", "hybrid"]


@pytest.mark.parametrize("kind", tiers(KINDS, first=FIRST))
def test_what_is_left_out_is_as_if_it_were_zero(kind: str, scores: dict[str, Importance]) -> None:
    """A row that stays with another head, or a gate without its neuron, is another model, and its loss hardly tells."""
    model, importance, targets = scored(kind, scores)
    made = pruned(model, targets, importance)
    changed = dict[str, Tensor]()

    def tensor(name: str) -> Tensor:
        return changed.setdefault(name, model.tensors[name].make().clone())

    for (unit, reader), kept in made.units.items():
        weight, place = tensor(reader), reader.rpartition(".experts.")[0]
        if unit == "experts":
            gone = torch.ones(len(weight), dtype=torch.bool)
            gone[kept] = False
            name = f"{place}.router.expert_bias"
            tensor(name if name in model.tensors else f"{place}.router.bias")[gone] = -1e9
        elif unit == "neurons of experts":
            for expert, own in enumerate(kept):
                weight[expert, :, [each for each in range(weight.shape[2]) if each not in own]] = 0.0
        else:
            width = weight.shape[1] // len(importance.units[unit, reader])
            blocks = weight.view(len(weight), -1, width)
            blocks[:, [each for each in range(blocks.shape[1]) if each not in kept]] = 0.0
    for layer in {*range(model.model.num_layers)} - {*made.layers}:
        for name in model.tensors:
            last = (".linear_proj.", ".linear_fc2.", ".out_proj.")
            if name.startswith(f"decoder.layers.{layer}.") and any(each in name for each in last):
                tensor(name).zero_()
    assert made.model.num_parameters < model.num_parameters
    torch.testing.assert_close(logits(made.model), logits(with_tensors(model, changed)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", tiers(KINDS, first=["experts", "hybrid"]))
def test_pruning_nothing_changes_nothing(kind: str, scores: dict[str, Importance], tmp_path: Path) -> None:
    """Bit for bit, in a checkpoint, too."""
    model, importance, _ = scored(kind, scores)
    made = pruned(model, Targets(), importance).model
    assert (made.model, made.groups) == (model.model, model.groups)
    write_native(made, tmp_path / "made", final=tmp_path / "made")
    back = read_native(tmp_path / "made")
    assert [*back.tensors] == [*model.tensors]
    assert all(torch.equal(back.tensors[name].make(), model.tensors[name].make()) for name in model.tensors)


@pytest.mark.parametrize("kind", tiers(["gated, grouped", "experts", "hybrid", "latent"], first=["hybrid"]))
def test_channels_are_left_out_everywhere(kind: str, scores: dict[str, Importance]) -> None:
    """Where all that writes a channel is zero, a norm of fewer channels differs by a factor of all of them alone."""
    model, importance, targets = scored(kind, scores)
    small, size = dataclasses.replace(targets, hidden_size=24), model.model.hidden_size
    model = dataclasses.replace(model, model=dataclasses.replace(model.model, norm_epsilon=1e-40))
    made = pruned(model, small, importance)
    without = pruned(model, targets, importance).model
    gone = torch.ones(size, dtype=torch.bool)
    gone[made.channels] = False
    written = {name: tensor.make().clone() for name, tensor in without.tensors.items()}
    for name, weight in written.items():
        if name.endswith(("linear_proj.weight", "out_proj.weight")) or ".linear_fc2." in name:
            weight.transpose(0, weight.dim() - 2)[gone] = 0.0
        elif "embeddings" in name:
            weight[:, gone] = 0.0
    factor = (size / 24) ** 0.5
    norms = {
        name: tensor.make() * factor
        for name, tensor in made.model.tensors.items()
        if name.endswith(("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight"))
        or (name.endswith((".norm.weight",)) and ".mixer." not in name)
    }
    found, right = logits(with_tensors(made.model, norms)), logits(with_tensors(without, written))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def test_scores_are_what_the_whole_model_shows() -> None:
    """Scores of a layer at a time, against one pass of the whole model."""
    model = model_of(MODERN)
    found, built = importance_of(model, TOKENS, context=ParallelContext.single()), whole(model)
    seen, read = dict[str, Tensor](), list[Tensor]()

    def norm_of_means(hidden: Tensor) -> Tensor:
        return hidden.abs().mean(0).square().sum(0).sqrt()

    influence = list[Tensor]()
    for name, module in built.named_modules():
        if isinstance(module, MLP):
            module.linear_fc2.register_forward_pre_hook(
                lambda _, given, name=name: seen.update({f"{name}.linear_fc2.weight": norm_of_means(given[0])})
            )
        if isinstance(module, Attention):
            module.linear_proj.register_forward_pre_hook(
                lambda _, given, name=name: seen.update({f"{name}.linear_proj.weight": norm_of_means(given[0])})
            )
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(
                lambda _, given, output: influence.append(1 - torch.cosine_similarity(given[0], output, dim=-1).mean())
            )
        if name.endswith("layernorm"):
            module.register_forward_hook(lambda _, given, output: read.append(norm_of_means(output)))
    output = built(TOKENS)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
    for (kind, reader), units in found.units.items():
        own = seen[reader] if kind == "neurons" else seen[reader].view(4, -1).square().sum(1).sqrt()
        torch.testing.assert_close(units, own, **close)
    torch.testing.assert_close(found.layers, torch.stack(influence), **close)
    torch.testing.assert_close(found.channels, torch.stack(read).sum(0), **close)
    loss = output.token_losses(TOKENS.roll(-1, 1))[:, :-1].mean()
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert len(found.units) == 6 and len(read) == 7


@pytest.mark.parametrize("weight", ["linear_fc2.weight", "word_embeddings.weight"])
def test_weights_that_are_no_numbers_are_refused(weight: str) -> None:
    """Any channels were kept of such a model, and a folder was written that could never be trained."""
    model = model_of(MODERN)
    name = next(each for each in model.tensors if each.endswith(weight))
    broken = torch.full_like(model.tensors[name].make(), float("nan"))
    with expect_error(CheckpointError, "layer 1"):
        importance_of(with_tensors(model, {name: broken}), TOKENS, context=ParallelContext.single())


def of_ranks(context: ParallelContext) -> Importance:
    """What a rank of several finds."""
    return importance_of(model_of(MODERN, MOE), TOKENS, context=context)


@pytest.mark.parametrize("layout", tiers(["dp2", "tp2", "pp8"], first=["tp2"]))
def test_every_layout_finds_the_same(layout: str) -> None:
    """Bit for bit: else two runs would leave out different neurons. A rank may have no text at all."""
    (alone,) = run_ranks(of_ranks, dp=1)
    axes: dict[str, Any] = {layout[:2]: int(layout[2:])}
    for found in run_ranks(of_ranks, **axes):
        assert found.loss == alone.loss and torch.equal(found.channels, alone.channels)
        assert torch.equal(found.layers, alone.layers) and found.units.keys() == alone.units.keys()
        assert all(torch.equal(found.units[key], alone.units[key]) for key in alone.units)


def test_the_largest_scores_are_kept_in_order() -> None:
    """Of equal ones the first; of heads equally many of each group."""
    assert most_important(torch.tensor([1.0, 3.0, 2.0, 3.0, 1.0]), 3).tolist() == [1, 2, 3]
    assert most_important(torch.ones(4), 2).tolist() == [0, 1]
    of_heads = torch.tensor([1.0, 9.0, 2.0, 3.0, 8.0, 8.0])
    assert heads_of_groups(of_heads, groups=3, heads=2, kept_groups=2).tolist() == [1, 4]
    assert heads_of_groups(of_heads, groups=3, heads=4, kept_groups=2).tolist() == [0, 1, 4, 5]
    assert heads_of_groups(of_heads, groups=3, heads=3, kept_groups=3).tolist() == [1, 3, 4]


def test_multi_token_prediction_is_left_out_when_it_is_said(scores: dict[str, Importance]) -> None:
    """Its layers have the sizes of the others, and nothing measures them."""
    model = model_of(MODERN, mtp_num_layers=1)
    with expect_error(ConfigError, "1 depth", "--drop-mtp"):
        NEURONS.sizes(model)
    left = without_mtp(model)
    importance = importance_of(left, TOKENS, context=ParallelContext.single())
    assert not any(name.startswith("mtp.") for name in pruned(left, NEURONS, importance).model.tensors)


REFUSED: dict[str, tuple[PortableModel, Targets, tuple[str, ...]]] = {
    "larger": (model_of(MODERN), Targets(ffn_hidden_size=49), ("--target-ffn-hidden-size 49", "48")),
    "no experts": (model_of(MODERN), Targets(num_experts=2), ("--target-num-moe-experts 2",)),
    "heads": (model_of(GROUPED), Targets(num_attention_heads=6), ("--target-num-attention-heads 6", "4", "8")),
    "groups alone": (model_of(GROUPED), Targets(num_query_groups=2), ("--target-num-query-groups", "8", "4")),
    "alibi": (model_of({**CLASSIC, "position_embedding_type": "alibi"}), HEADS, ("alibi", "--target-hidden-size")),
    "a norm of all heads": (
        model_of({**MODERN, "qk_layernorm": True, "qk_layernorm_kind": "all_heads"}),
        HEADS,
        ("all_heads", "--target-ffn-hidden-size"),
    ),
    "mup": (model_of(MODERN, use_mup=True, mup_base_hidden_size=16), Targets(hidden_size=24), ("--use-mup",)),
    "too few experts": (model_of(MODERN, MOE), Targets(num_experts=1), ("--target-num-moe-experts 1", "2 experts")),
    "groups of experts": (
        model_of(MODERN, dataclasses.replace(MOE, moe_router_num_groups=2, moe_router_group_topk=1)),
        Targets(num_experts=2),
        ("2 groups", "--target-moe-ffn-hidden-size"),
    ),
    "no such layer": (model_of(MODERN), Targets(drop=(3,)), ("--layers-to-drop 4", "1 to 3")),
    "all layers": (model_of(MODERN), Targets(drop=(0, 1, 2)), ("--layers-to-drop", "all 3")),
    "twice": (model_of(MODERN), Targets(drop=(0,), num_layers=2), ("--layers-to-drop", "--target-num-layers")),
    "layers with experts": (model_of(MODERN, MOE), Targets(drop=(1, 2)), ("2, 3", "--layers-to-drop")),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes(mistake: str) -> None:
    """One sentence each, with what would work."""
    model, targets, facts = REFUSED[mistake]
    scores = Importance(torch.ones(32), torch.ones(3), {}, 0.0)
    with expect_error(ConfigError, *facts):
        pruned(model, targets, scores)
