"""The Mamba-2 mixer: forward and gradients of transformers', texts in generation, initial values, types and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.config.mamba import MambaConfig
from megatron.config.training import RecomputeModule
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.costs import Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.ssm.mamba import MambaMixer, mamba_branch
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, StackConfig
from tests.unit.ssm.mixers import VOCABULARY as VOCABULARY
from tests.unit.ssm.mixers import (
    assert_bf16_is_near_fp32,
    assert_cached_texts_are_whole_ones,
    assert_counted_is_kept,
    assert_packed_documents_are_those_apart,
    inputs,
    settings,
)

SMALL = MambaConfig(mamba_state_dim=6, mamba_head_dim=8, mamba_num_groups=2, mamba_chunk_size=5)


def mixer(config: MambaConfig = SMALL, *, dtype: torch.dtype = torch.float64, hidden: int = 32) -> MambaMixer:
    model, context = settings(hidden=hidden), ModelContext.single(dtype=dtype)
    stack = StackConfig(model, causal=True, pattern=((mamba_branch(config),),))
    made = MambaMixer(BranchPlace(stack, context, 0), config=config)
    initialize(made, context.mesh, seed=3)
    return made


def hybrid(
    letters: str,
    config: MambaConfig = SMALL,
    *,
    context: ModelContext | None = None,
    recompute: tuple[RecomputeModule, ...] = (),
) -> GPTModel:
    """Layers of one branch: ``M`` the mixer, ``*`` attention, ``-`` an MLP."""
    model = settings(len(letters))
    kinds = {"M": mamba_branch(config), "*": SELF_ATTENTION, "-": FEED_FORWARD}
    stack = StackConfig(model, causal=True, pattern=tuple((kinds[letter],) for letter in letters))
    plan = RecomputePlan("selective", modules=recompute) if recompute else RecomputePlan()
    return GPTModel(model, context or ModelContext.single(dtype=torch.float64), stack=stack, seed=5, recompute=plan)


@pytest.mark.parametrize(
    ("groups", "limits"), [(2, None), (1, (0.01, 0.05)), (8, (0.02, 1e30))], ids=["groups", "limits", "least step"]
)
def test_forward_and_gradients_are_those_of_transformers(groups: int, limits: tuple[float, float] | None) -> None:
    """Another order of z, x, B, C and dt, or of gate and norm, makes every published model talk nonsense."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    ours = mixer(replace(SMALL, mamba_num_groups=groups, mamba_time_step_limits=limits))
    reference = modeling.Mamba2Mixer(
        modeling.Mamba2Config(
            num_heads=8,
            head_dim=8,
            hidden_size=32,
            state_size=6,
            n_groups=groups,
            chunk_size=4,
            time_step_limit=limits or (0.0, float("inf")),
        ),
        layer_idx=0,
    ).double()
    weights = dict(ours.named_parameters())
    reference.load_state_dict(weights)
    given, upstream = torch.randn(2, 3, 17, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:, :2]
    theirs, mine = given.clone().requires_grad_(), given.transpose(0, 1).clone().requires_grad_()
    (expected := reference(theirs)).backward(upstream)
    (found := ours(mine, inputs()).transpose(0, 1)).backward(upstream)
    # transformers computes norm and scan in fp32.
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(mine.grad.transpose(0, 1), theirs.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in reference.named_parameters():
        found = weights[name].grad
        assert found is not None and torch.allclose(found, parameter.grad, rtol=1e-4, atol=1e-4), name


def test_documents_in_one_sequence_are_those_apart() -> None:
    """State and convolution of one document reached into the next that is packed behind it."""
    assert_packed_documents_are_those_apart(mixer())


def test_initial_values_are_mamba_2s() -> None:
    """Time steps between 0.001 and 0.1, decays between 1 and 16: with others a state forgets at once, or never."""
    ours = mixer(MambaConfig(mamba_state_dim=4, mamba_head_dim=1, mamba_num_groups=1), hidden=256)
    steps, decays = F.softplus(ours.dt_bias.detach()), ours.A_log.detach().exp()
    assert 0.001 * 0.99 <= steps.min() < 0.0012 and 0.09 < steps.max() <= 0.1 * 1.01
    assert float(steps.log().mean()) == pytest.approx(-4.6, abs=0.15)  # the middle on a logarithmic scale
    assert 1.0 <= decays.min() < 1.2 and 15.8 < decays.max() <= 16.0
    assert {*ours.D.tolist()} == {1.0} == {*ours.norm.weight.tolist()}
    limit = ours.conv1d.weight.detach().abs().max(), ours.conv1d.bias.detach().abs().max()
    assert [float(each) for each in limit] == pytest.approx([0.5, 0.5], abs=0.01)


def test_steps_and_decays_stay_wide_in_bf16_and_do_not_decay() -> None:
    """A decay near 1 in bf16 has three digits: a state would forget at another pace. Decaying weights would pull it."""
    ours = mixer(dtype=torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    assert wide == {"A_log", "D", "dt_bias"} and {*types.values()} == {torch.float32, torch.bfloat16}
    decaying = {name for name, policy in parameter_policies(ours.named_parameters()).items() if policy.decays}
    assert decaying == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}
    assert_bf16_is_near_fp32(lambda dtype: mixer(dtype=dtype), 0.02)


@pytest.mark.parametrize("letters", ["M*-M", "MM"])
def test_cached_texts_are_those_of_whole_forward_passes(letters: str) -> None:
    """Prompts in parts beside each other, one token after the other: any slip of a state shows in later tokens."""
    assert_cached_texts_are_whole_ones(hybrid(letters))


@pytest.mark.parametrize("recompute", [(), ("mamba",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("limits", [None, (0.001, 0.1)], ids=["free", "limits"])
def test_memory_is_what_torch_keeps(
    recompute: tuple[RecomputeModule, ...], dtype: torch.dtype, limits: tuple[float, float] | None
) -> None:
    """The dry run would promise a run that doesn't fit."""
    context = ModelContext.single(dtype=dtype)
    sizes = replace(SMALL, mamba_state_dim=16, mamba_chunk_size=16, mamba_time_step_limits=limits)
    shorter, longer = (hybrid(letters, sizes, context=context, recompute=recompute) for letters in ("MM", "MMMM"))
    assert_counted_is_kept(shorter, longer, context)


def test_a_small_model_s_heads_divide_as_before() -> None:
    """A parity check of a published hybrid was refused: its small hidden size left a single head for 8 groups."""
    small, heads = MambaConfig().shrunk((56,), (4,)), replace(SMALL, mamba_num_heads=10).shrunk((4,), (2,))
    assert small.num_heads(settings()) % (8 * 8) == 0 and small.mamba_num_groups == 8
    assert (heads.mamba_num_heads, heads.mamba_num_groups) == (10, 2)


def test_flops_are_those_of_the_formula() -> None:
    """Throughput in reports."""
    ours, tokens = mixer(replace(SMALL, mamba_chunk_size=8)), 3 * 32
    d, gn, h, n = 64, 12, 8, 6
    per_token = 2 * 32 * (2 * d + 2 * gn + h) + 2 * d * 32 + 8 * (d + 2 * gn) + 2 * 8 * gn + 2 * 8 * d + 4 * d * n
    workload = Workload(context=ours._context, batch=3, length=32, stream_itemsize=8)
    assert costs_of(ours, workload).flops == tokens * per_token
    assert costs_of(ours, workload).uncounted == frozenset()
