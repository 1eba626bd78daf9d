"""A layer of experts against a loop over tokens and experts, written from the papers' formulas."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe import experts
from megatron.core.moe.capacity import within_capacity
from megatron.core.moe.grouped_linear import GroupedLinear
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.routing import Routing, choose_experts, chosen, scores_of, weights_of
from megatron.core.ops import matmul
from megatron.core.ops.grouped_matmul import BACKENDS, Groups, choose
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig

SWIGLU: dict[str, Any] = {"activation": "swiglu", "add_bias_linear": False}
HIDDEN, WIDTH, EXPERTS = 16, 8, 8


def model_config(**settings: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=WIDTH,
        init_method_std=0.5,
        **SWIGLU | settings,
    )


def moe_config(**settings: Any) -> MoEConfig:
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH}
    return MoEConfig(**sizes | settings)


def route(logits: Tensor, scores: Tensor, moe: MoEConfig, *, bias: Tensor | None = None) -> Routing:
    ids = choose_experts(scores, moe, bias=bias)
    return Routing(ids, weights_of(ids, logits, scores, moe))


def layer(model: ModelConfig, moe: MoEConfig, *, dtype: torch.dtype = torch.float64, number: int = 0) -> MoELayer:
    context = ModelContext.single(dtype=dtype)
    built = MoELayer(moe, BranchPlace(StackConfig(model, causal=True), context, number))
    initialize(built, context.mesh, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
    return built


def inputs() -> LayerInputs:
    return LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses())


def hidden_states(*, seed: int = 0, batch: int = 2, length: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True)


def chosen_by_hand(logits: list[float], moe: MoEConfig) -> dict[int, float]:
    """Weights of the experts that a token with these logits chooses."""
    exponentials = [math.exp(each) for each in logits]
    score = {
        "softmax": [each / sum(exponentials) for each in exponentials],
        "sigmoid": [1 / (1 + math.exp(-each)) for each in logits],
        "sqrtsoftplus": [math.sqrt(math.log1p(each)) for each in exponentials],
    }[moe.moe_router_score_function]
    allowed = set(range(len(logits)))
    if moe.moe_router_num_groups and moe.moe_router_group_topk:
        size = len(logits) // moe.moe_router_num_groups
        groups = [range(start, start + size) for start in range(0, len(logits), size)]
        best = {"max": 1, "top2": 2, "sum": moe.moe_router_topk // moe.moe_router_group_topk}[
            moe.moe_router_group_score
        ]
        groups.sort(key=lambda group: -sum(sorted((score[e] for e in group), reverse=True)[:best]))
        allowed = {expert for group in groups[: moe.moe_router_group_topk] for expert in group}
    ids = sorted(allowed, key=lambda expert: -score[expert])[: moe.moe_router_topk]
    weights = {expert: score[expert] for expert in ids}
    normalizes = not moe.moe_router_pre_softmax and (moe.moe_router_score_function == "softmax" or len(ids) > 1)
    total = sum(weights.values()) if normalizes else 1.0
    factor = moe.moe_router_topk_scaling_factor or 1.0
    return {expert: factor * weight / total for expert, weight in weights.items()}


def expert_by_hand(built: MoELayer, expert: int, x: Tensor, activation: str) -> Tensor:
    first, second = built.experts.linear_fc1, built.experts.linear_fc2
    inner = [matrix @ x for matrix in first.weight[expert]]
    if first.bias is not None:
        inner = [each + bias for each, bias in zip(inner, first.bias[expert])]
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": torch.nn.functional.silu,
        "geglu": torch.nn.functional.gelu,
        "squared_relu": lambda x: torch.relu(x) ** 2,
    }
    act = acts[activation]
    out: Tensor = second.weight[expert] @ (act(inner[0]) * inner[1] if len(inner) == 2 else act(inner[0]))
    return out if second.bias is None else out + second.bias[expert]


def by_hand(built: MoELayer, x: Tensor, moe: MoEConfig, activation: str) -> Tensor:
    """The layer, one token and one expert after the other."""
    out = []
    for token in x.flatten(0, 1):
        logits = built.router.weight @ token
        if built.router.bias is not None:
            logits = logits + built.router.bias
        weights = chosen_by_hand(logits.tolist(), moe)
        graph = route(logits[None], scores_of(logits[None], moe), moe)  # for the gradient, checked against the numbers
        for expert, weight in zip(graph.ids[0].tolist(), graph.weights[0].tolist()):
            assert weights[expert] == pytest.approx(weight, abs=1e-12)
        pairs = zip(graph.ids[0].tolist(), graph.weights[0])
        out.append(sum(weight * expert_by_hand(built, expert, token, activation) for expert, weight in pairs))
    return torch.stack([torch.as_tensor(each) for each in out]).view_as(x)


NOTHING: dict[str, Any] = {}
CHOICES: list[dict[str, Any]] = [
    {"moe_router_score_function": score, **groups, **extra}
    for score, groups, extra in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"),
        (
            NOTHING,
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
            {"moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_group_score": "max"},
            {
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 3,
                "moe_router_topk": 5,
                "moe_router_group_score": "top2",
            },
        ),
        (NOTHING, {"moe_router_topk_scaling_factor": 2.5}),
    )
] + [
    {"moe_router_pre_softmax": True},
    {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    {"moe_router_topk": EXPERTS},
]


def test_layers_equal_a_loop_over_tokens_and_experts() -> None:
    """A wrong weight, order or expert trains another model; every kind of router and expert, forward and backward."""
    kinds: list[dict[str, Any]] = [
        NOTHING,
        {"activation": "squared_relu"},
        {"activation": "geglu", "add_mlp_bias": True},
    ]
    cases = [(choice, NOTHING) for choice in CHOICES] + [(CHOICES[0], kind) for kind in kinds[1:]]
    for choice, kind in cases:
        moe, model = moe_config(**choice), model_config(**kind)
        built, x = layer(model, moe), hidden_states()
        out, expected = built(x, inputs()), by_hand(built, x, moe, model.activation)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12, msg=str(choice))
        upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        leaves = [x, *built.parameters()]
        wanted = torch.autograd.grad((expected * upstream).sum(), leaves, allow_unused=True)
        torch.autograd.backward(out, upstream)
        for leaf, gradient in zip(leaves, wanted):
            assert leaf.grad is not None
            zero = torch.zeros_like(leaf) if gradient is None else gradient
            torch.testing.assert_close(leaf.grad, zero, rtol=0, atol=1e-12, msg=str(choice))


def test_golden_weights() -> None:
    """Numbers computed elsewhere: E 4, k 2, logits 2, 1, 0, -1."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    for settings, expected in (
        ({}, (0.7310586, 0.2689414)),
        ({"moe_router_pre_softmax": True}, (0.6439143, 0.2368828)),
        ({"moe_router_score_function": "sigmoid"}, (0.5464491, 0.4535509)),
    ):
        moe = moe_config(num_experts=4, **settings)
        found = route(logits, scores_of(logits, moe), moe)
        assert found.ids.tolist() == [[0, 1]]
        assert found.weights[0].tolist() == pytest.approx(expected, abs=5e-8)


def test_a_bias_moves_the_choice_alone() -> None:
    """A bias in the weights would train the router towards the balance instead of the loss."""
    moe = moe_config(num_experts=4, moe_router_score_function="sigmoid")
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    scores, bias = scores_of(logits, moe), torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = route(logits, scores, moe, bias=bias)
    assert found.ids.tolist() == [[3, 0]]
    torch.testing.assert_close(found.weights[0], scores[0, [3, 0]] / scores[0, [3, 0]].sum())


def test_groups_of_negative_scores_hide_no_expert() -> None:
    """With a negative bias a masked expert of score 0 would be better than all those of the best groups."""
    moe = moe_config(moe_router_num_groups=4, moe_router_group_topk=1, moe_router_topk=2)
    scores = torch.tensor([[-5.0, -6.0, -1.0, -2.0, -9.0, -9.0, -9.0, -9.0]])
    assert sorted(chosen(scores, moe)[0].tolist()) == [2, 3]


def test_one_expert_is_the_dense_network() -> None:
    """Bit for bit: one expert, chosen by every token with weight 1."""
    model = model_config()
    moe = moe_config(num_experts=1, moe_router_topk=1, moe_router_pre_softmax=True)
    for dtype in (torch.float64, torch.float32):
        built = layer(model, moe, dtype=dtype)
        x = hidden_states().detach().to(dtype)
        first, second = built.experts.linear_fc1.weight[0].flatten(0, 1), built.experts.linear_fc2.weight[0]
        gate, value = torch.nn.functional.linear(x, first).chunk(2, dim=-1)
        dense = torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, second)
        assert torch.equal(built(x, inputs()), dense)


needs_grouped_mm = pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm")


@needs_grouped_mm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_agree(dtype: torch.dtype) -> None:
    """The fast kernel and the loop compute the same layer, experts without tokens included."""
    model = model_config()
    found = []
    for backend in ("grouped_mm", "loop"):
        built = layer(model, moe_config(num_experts=32, moe_matmul_backend=backend), dtype=dtype)
        x = hidden_states(length=3).detach().to(dtype).requires_grad_()
        out = built(x, inputs())
        torch.autograd.backward(out, torch.ones_like(out))
        assert x.grad is not None
        found.append([out, x.grad, *(each.grad for each in built.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)
    for number in (0, 1):  # a slice of few rows, which counts as contiguous
        rows, groups = torch.ones(number, HIDDEN + 1, dtype=dtype)[:, :HIDDEN], Groups(torch.tensor([number, 0]))
        for implementation in BACKENDS.values():
            assert implementation.multiply(rows, torch.ones(2, HIDDEN, 8, dtype=dtype), groups).shape == (number, 8)
            assert implementation.outer(rows, rows, groups)[1].count_nonzero() == 0
    grads, rows, groups = torch.rand(5, 8).to(dtype), torch.rand(5, HIDDEN).to(dtype), Groups(torch.tensor([4, 0, 1]))
    for implementation in BACKENDS.values():
        total = torch.ones(3, 8, HIDDEN)
        implementation.add_outer(total, grads, rows, groups)
        torch.testing.assert_close(total.to(dtype), (1.0 + implementation.outer(grads, rows, groups).float()).to(dtype))
        assert torch.equal(total[1], torch.ones(8, HIDDEN))


@needs_grouped_mm
def test_products_in_fp32_of_bf16_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert by expert where processors are slow in bf16; generation multiplies as it came, as a row's bits may not
    depend on how many others there are.
    """
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: True)
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
    choice = choose(torch.bfloat16, device, (HIDDEN, HIDDEN))
    assert choice.name == "loop" and choice.backend.for_generation() is BACKENDS["grouped_mm"]
    assert choose(torch.float32, device, (HIDDEN, HIDDEN)).name == "grouped_mm"
    assert choose(torch.float32, torch.device("meta"), (HIDDEN, HIDDEN)).name == "loop", "rehearsals take a GPU's"
    assert choose(torch.bfloat16, device, (HIDDEN, HIDDEN), "grouped_mm").name == "grouped_mm"
    rows, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((160, 512), (2, 96, 512)))
    groups, context = Groups(torch.tensor([80, 80])), ModelContext.single(dtype=torch.bfloat16)
    layers = GroupedLinear(choice.backend, context)
    by_expert = [(part, matrix.t()) for part, matrix in zip(groups.parts(rows), weight)]
    wide = torch.cat([(part.float() @ matrix.float()).bfloat16() for part, matrix in by_expert])
    assert torch.equal(layers.multiply(rows, weight, groups), wide)
    with context.products.by(functional.linear):
        for backend in (choice.backend, BACKENDS["loop"]):
            narrow = GroupedLinear(backend, context).multiply(rows, weight, groups)
            assert torch.equal(narrow, torch.cat([part @ matrix for part, matrix in by_expert]))


def test_shared_experts_see_every_token() -> None:
    """Their sum with the routed ones, times a gate where there is one."""
    x = hidden_states().detach()
    for gate in (False, True):
        moe = moe_config(moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=gate)
        built = layer(model_config(), moe)
        shared = built.shared_experts
        assert shared is not None
        inner, value = (x @ shared.linear_fc1.weight.T).chunk(2, dim=-1)
        expected = (torch.nn.functional.silu(inner) * value) @ shared.linear_fc2.weight.T
        if shared.gate is not None:
            expected = expected * torch.sigmoid(x @ shared.gate.weight.T)
        out, built.shared_experts = built(x, inputs()), None
        torch.testing.assert_close(out, built(x, inputs()) + expected, rtol=0, atol=1e-12)


def test_a_recomputed_pass_chooses_what_the_first_one_chose() -> None:
    """Logits that round otherwise the second time would send gradients to experts that were not used."""
    router, x, given = layer(model_config(), moe_config()).router, hidden_states(length=32), inputs()
    first = router(x, given).ids
    with torch.no_grad():
        router.weight.neg_()
    assert torch.equal(router(x, given).ids, first)
    assert not torch.equal(router(x, inputs()).ids, first)


def test_biases_move_towards_balance() -> None:
    """Up for experts below the mean, down for those above; dropped choices count for the expert that lost them."""
    moe = moe_config(num_experts=4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router = layer(model_config(), moe).router
    assert router.expert_bias is not None
    assert not router.expert_bias.requires_grad
    with torch.no_grad():
        router.expert_bias.zero_()
    router.update_from_counts(torch.tensor([9, 1, 5, 5, 3]))
    assert router.expert_bias.tolist() == pytest.approx([-1e-3, 1e-3, 0.0, 0.0])
    router.weight.requires_grad_(False)
    router.update_from_counts(torch.tensor([9, 1, 5, 5, 3]))
    assert router.expert_bias.tolist() == pytest.approx([-1e-3, 1e-3, 0.0, 0.0])  # a frozen router stays as it is
    bf16 = layer(model_config(), moe, dtype=torch.bfloat16).router.expert_bias
    assert bf16 is not None
    assert bf16.dtype == torch.float32  # steps of 1e-3 vanish in bf16


def test_choices_are_counted_once() -> None:
    """Counts of a recomputed forward pass, or of evaluation, would move the biases twice."""
    built, x, given = layer(model_config(), moe_config()), hidden_states(), inputs()
    for _ in range(2):  # a forward pass and its recomputation
        out = recomputed(built, x, given)
    torch.autograd.backward(out, torch.ones_like(out))
    counts = given.side_losses.take()[1]["experts of layer 0"]
    assert counts.dtype == torch.int64
    assert counts.sum() == 3 * 12 * 2  # the runner drops what comes after a forward pass
    first, second = inputs(), inputs()
    assert torch.equal(built(x, first), built(x, second))


@pytest.mark.parametrize("kind", [{}, {"activation": "geglu", "add_mlp_bias": True}], ids=["plain", "biases"])
def test_experts_in_pieces_compute_the_same(kind: dict[str, Any]) -> None:
    """A rank that all tokens choose ran out of memory. Each weight has one gradient: gradient sync counts them."""
    found, counted = [], []
    for at_once in (1000, 5):
        built, x, arrivals = layer(model_config(**kind), moe_config()), hidden_states(), list[Tensor]()
        for parameter in built.experts.parameters():
            parameter.register_post_accumulate_grad_hook(arrivals.append)  # type: ignore[no-untyped-call]
        with mock.patch.object(experts, "rows_at_once", return_value=at_once):
            out = built(x, inputs())
        upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        torch.autograd.backward(out, upstream)
        found.append([out, x.grad, *(each.grad for each in built.parameters())])
        counted.append([sum(each is parameter for each in arrivals) for parameter in built.experts.parameters()])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert {*counted[0], *counted[1]} == {1}


def test_pieces_learn_from_inputs_that_do_not() -> None:
    """Behind a frozen embedding and router neither rows nor weights have gradients; the experts learn all the same."""
    found = []
    for at_once in (1000, 5):
        built = layer(model_config(), moe_config())
        built.router.requires_grad_(False)
        with mock.patch.object(experts, "rows_at_once", return_value=at_once):
            built(hidden_states().detach(), inputs()).sum().backward()
        found.append([parameter.grad for parameter in built.experts.parameters()])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "share", "pieces"), [(1024, 1, 1), (1025, 1, 2), (3000, 1500, 1), (3001, 1500, 2)])
def test_rows_beyond_twice_the_share_are_computed_in_pieces(rows: int, share: int, pieces: int) -> None:
    """Of the rows that balanced choices would bring; a few rows are computed at once whatever the share."""
    built = layer(model_config(), moe_config()).experts
    given = torch.zeros(rows, HIDDEN, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    groups = Groups(torch.tensor([rows, *[0] * (EXPERTS - 1)]))
    with mock.patch.object(built, "compute", wraps=built.compute) as computed:
        built(*given, groups, share=share)
    assert computed.call_count == pieces


def test_pieces_keep_their_rows_alone() -> None:
    """What experts compute inside isn't kept, for as many rows as may come."""
    model, moe = model_config(), moe_config()
    built, x = layer(model, moe), hidden_states(length=256)
    whole, parts = kept_by(built, x, 100_000), kept_by(built, x, 5)
    rows = 256 * 2 * 2
    assert whole - parts == rows * 3 * WIDTH * 8  # both factors of SwiGLU, and the activation


def kept_by(built: MoELayer, x: Tensor, at_once: int) -> int:
    """Bytes of the storages that a forward pass saves."""
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mock.patch.object(experts, "rows_at_once", return_value=at_once), hooks:
        out = built(x, inputs())
    assert out.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64)])
def test_the_router_computes_in_the_type_that_is_asked_for(asked: Any, dtype: torch.dtype) -> None:
    """Logits of a bf16 model: their product isn't rounded to 8 bits, where experts that score alike change places."""
    x = hidden_states(length=64).detach().bfloat16()
    routers = [
        layer(model_config(), moe_config(moe_router_dtype=each), dtype=torch.bfloat16).router for each in (None, asked)
    ]
    plain, precise = (router(x, inputs()).weights for router in routers)
    logits = x.flatten(0, 1).to(dtype) @ routers[1].weight.to(dtype).T
    ids = logits.topk(2, dim=-1).indices
    expected = logits.gather(1, ids).softmax(-1)
    assert precise.dtype == dtype
    torch.testing.assert_close(precise, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)
    assert (plain - expected).abs().max() > 1e-3
    assert routers[1].weight_bytes == dtype.itemsize


def test_forced_balance() -> None:
    """Every expert gets the same number of tokens, and the router still learns how much they weigh."""
    built, given = layer(model_config(), moe_config(moe_router_force_load_balancing=True)), inputs()
    out = built(hidden_states(batch=2, length=8), given)
    assert given.side_losses.take()[1]["experts of layer 0"].tolist() == [4] * EXPERTS + [0]
    torch.autograd.backward(out, torch.ones_like(out))
    assert built.router.weight.grad is not None
    assert built.router.weight.grad.abs().sum() > 0
    given = dataclasses.replace(inputs(), text_mask=torch.arange(16) % 3 > 0)
    built(hidden_states(batch=2, length=8), given)
    assert sum(given.side_losses.take()[1]["experts of layer 0"].tolist()) == 2 * 10


@pytest.mark.parametrize("rounding", [-1e-16, 0.0, 1e-16])
def test_rounding_does_not_decide_which_of_equal_tokens_is_dropped(rounding: float) -> None:
    """Equal tokens at one place of two documents have equal weights, but for rounding by layout: the first stays."""
    weights = torch.tensor([0.3, 0.6, 0.3, 0.3], dtype=torch.float64) + rounding * torch.tensor([0, 0, 1, 2])
    moe = moe_config(num_experts=2, moe_expert_capacity_factor=1.0)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    kept = within_capacity(ids, weights[:, None], moe, ModelContext.single(), batch=1)
    assert kept.flatten().tolist() == [True, True, False, False]


def test_capacity_of_a_sequence() -> None:
    """What is dropped is compared with a sorted list, for each sequence and expert; weights stay as they are."""
    generator = torch.Generator().manual_seed(0)
    for policy in ("probs", "position"):
        moe = moe_config(num_experts=3, moe_expert_capacity_factor=0.7, moe_token_drop_policy=policy)
        ids = torch.rand(10 * 2, 3, generator=generator).argsort(1)[:, :2]  # 10 positions of 2 sequences
        weights = torch.rand(10 * 2, 2, generator=generator, dtype=torch.float64)
        kept = within_capacity(ids, weights, moe, ModelContext.single(), batch=2)
        for sequence, expert in itertools.product(range(2), range(3)):
            choices = [
                (token, place) for token in range(sequence, 20, 2) for place in range(2) if ids[token, place] == expert
            ]
            if policy == "probs":
                choices.sort(key=lambda choice: -weights[choice].item())
            capacity = math.ceil(10 * 2 / 3 * 0.7)
            assert [bool(kept[choice]) for choice in choices] == [at < capacity for at in range(len(choices))]
    model, moe = model_config(), moe_config(moe_expert_capacity_factor=0.25)
    built, x, given = layer(model, moe), hidden_states(), inputs()
    out = built(x, given)
    ids = built.router(x, inputs()).ids
    kept_choices = sum(len(ids[sequence::2].unique()) for sequence in range(2))  # an expert has room for one
    assert given.side_losses.take()[1]["experts of layer 0"][-1] == ids.numel() - kept_choices != kept_choices
    torch.autograd.backward(out, torch.ones_like(out))
    assert not torch.equal(out, built.eval()(x, inputs()))  # evaluation drops nothing
