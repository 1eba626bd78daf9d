"""The gated delta net: packed documents, texts in generation, initial values, types and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.training import RecomputeModule
from megatron.core.conversion.huggingface.formats import config_from_model
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.layer_kinds import decoder_stack
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig
from megatron.errors import CheckpointError
from tests.harness.kept import bytes_kept
from tests.harness.sentences import expect_error
from tests.unit.ssm.mixers import (
    VOCABULARY,
    assert_bf16_is_near_fp32,
    assert_cached_texts_are_whole_ones,
    assert_counted_is_kept,
    assert_packed_documents_are_those_apart,
    settings,
)

SMALL = GatedDeltaNetConfig(
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="2",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_attention_chunk_size=5,
)
NAMES: tuple[tuple[RecomputeModule, ...], ...] = ((), ("gated_delta_net",))


def mixer(config: GatedDeltaNetConfig = SMALL, *, dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
    context = ModelContext.single(dtype=dtype)
    made = GatedDeltaNet(BranchPlace(StackConfig(settings(), causal=True), context, 0), config=config)
    initialize(made, context.mesh, seed=3)
    return made


def model_of(
    config: GatedDeltaNetConfig,
    layers: int,
    *,
    context: ModelContext | None = None,
    recompute: tuple[RecomputeModule, ...] = (),
) -> GPTModel:
    model = settings(layers, attention_output_gate=True)
    context = context or ModelContext.single(dtype=torch.float64)
    plan = RecomputePlan("selective", modules=recompute) if recompute else RecomputePlan()
    return GPTModel(model, context, stack=decoder_stack(model, (config,)), recompute=plan, seed=5)


def test_documents_in_one_sequence_are_those_apart() -> None:
    """State and convolution of one document must not reach into the next that is packed behind it."""
    assert_packed_documents_are_those_apart(mixer())


def test_initial_values() -> None:
    """Decays between 1 and 16 and biases of 1 (Megatron-LM's), and a norm that begins as one."""
    ours = mixer(replace(SMALL, linear_num_key_heads=64, linear_num_value_heads=256))
    decays = ours.A_log.detach().exp()
    assert 1.0 <= decays.min() < 1.2 and 15.8 < decays.max() <= 16.0
    assert {*ours.dt_bias.tolist()} == {1.0} == {*ours.out_norm.weight.tolist()}
    assert float(ours.conv1d.weight.detach().abs().max()) == pytest.approx(0.5, abs=0.01)


def test_decays_stay_wide_in_bf16_and_do_not_decay() -> None:
    """A decay near 1 in bf16 has three digits: a state would forget at another pace. Decaying weights would pull it."""
    ours = mixer(dtype=torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {"A_log", "dt_bias"}
    decaying = {name for name, policy in parameter_policies(ours.named_parameters()).items() if policy.decays}
    assert decaying == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}
    assert_bf16_is_near_fp32(lambda dtype: mixer(dtype=dtype), 0.03)


def test_cached_texts_are_those_of_whole_forward_passes() -> None:
    """Prompts in parts beside each other, one token after the other: any slip of a state shows in later tokens."""
    assert_cached_texts_are_whole_ones(model_of(SMALL, 4))


def test_recomputed_nets_have_the_same_gradients_and_keep_less() -> None:
    """A part that was left out when it is computed again, such as the borders of documents, would train otherwise."""
    tokens = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(24) >= 10).long().expand(2, -1)
    kept, gradients = [], []
    for modules in NAMES:
        of = model_of(SMALL, 2, recompute=modules).train()
        kept.append(bytes_kept(of, tokens))
        result = of(tokens, document_ids=ids).logits_with_gradient().square().sum()
        gradients.append(torch.autograd.grad(result, [*of.parameters()]))
    assert kept[1] < kept[0]
    assert all(torch.equal(*each) for each in zip(*gradients))


@pytest.mark.parametrize("recompute", NAMES, ids=["kept", "recomputed"])
@pytest.mark.parametrize("doubled", [False, True], ids=["positive", "negative eigenvalues"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_memory_is_what_torch_keeps(dtype: torch.dtype, doubled: bool, recompute: tuple[RecomputeModule, ...]) -> None:
    """The dry run would promise a run that doesn't fit."""
    context = ModelContext.single(dtype=dtype)
    sizes = replace(
        SMALL,
        linear_attention_freq="[1]",
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_attention_chunk_size=16,
        linear_negative_eigenvalues=doubled,
    )
    shorter, longer = (model_of(sizes, layers, context=context, recompute=recompute) for layers in (1, 2))
    assert_counted_is_kept(shorter, longer, context)


def test_a_published_type_without_them_does_not_fit() -> None:
    """A model with gated delta nets must not be written as a Llama."""
    described = replace(
        settings(4),
        position_embedding_type="rope",
        activation="swiglu",
        untie_embeddings_and_output_weights=True,
    )
    with expect_error(CheckpointError, "olmo_hybrid"):
        config_from_model(described, (GPTConfig(), SMALL), dtype="float32", source={}, tokens={})
