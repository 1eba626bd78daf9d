"""Update rules against torch's own, against the singular value decomposition, and against references written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.parameter_policy import is_layer_matrix, parameter_policies
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.element_rules import AdEMAMix, Lion
from megatron.core.optimizer.matrix_updates import dealt, matrix_cost
from megatron.core.optimizer.muon import Muon, coefficients_of, orthogonalized, update_scale
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.soap import Soap
from megatron.core.optimizer.update_rule import MatrixRule, Step
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.sharding import Sharding

SHAPES = ((12, 20), (20, 12), (16, 16))
LR, DECAY = 0.02, 0.1


def gradients(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]


def take_steps(rule: MatrixRule, weights: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Weights after the rule's steps, as the optimizer takes them on one rank."""
    weights = [weight.clone() for weight in weights]
    flat = [[torch.zeros(weight.numel(), dtype=weight.dtype) for _ in rule.state_names] for weight in weights]
    shapes = [rule.matrix_state(tuple(weight.shape)) for weight in weights]
    kept = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in each.items()} for each in shapes]
    for number, each in enumerate(grads, 1):
        step = Step(number, LR, DECAY, None)
        directions = [
            rule.direction(grad.clone().view(-1), state, step).clone().view(grad.shape)
            for grad, state in zip(each, flat)
        ]
        updates = rule.transform(directions, weights if rule.reads_weights else (), kept, [number] * len(weights))
        for weight, update in zip(weights, updates):
            weight.mul_(1 - LR * DECAY).sub_(update, alpha=LR)
    return weights


def torch_steps(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    weights: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    made = optimizer([*parameters])
    for each in grads:
        for parameter, grad in zip(parameters, each):
            parameter.grad = grad.to(parameter.dtype)
        made.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("is_nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        ("original", {"muon_scale_mode": "shape_scaling"}),
        ("match_rms_adamw", {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2}),
    ],
)
def test_muon_takes_torchs_steps(scale: str, settings: dict[str, str | float], is_nesterov: bool) -> None:
    """Another momentum, scale or decay than torch's would need other learning rates than people have found for it.

    torch multiplies in bf16, so the two agree to about a hundredth of an update.
    """
    weights, grads = gradients(1)[0], gradients(4)
    config = OptimizerConfig(
        optimizer="muon",
        muon_coefficient_type="simple",
        muon_momentum=0.95,
        muon_nesterov=is_nesterov,
        **settings,  # type: ignore[arg-type]
    )
    ours = take_steps(Muon(config), weights, grads)
    theirs = torch_steps(
        lambda parameters: torch.optim.Muon(
            parameters, lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=is_nesterov, adjust_lr_fn=scale
        ),
        [weight.float() for weight in weights],
        grads,
    )
    for one, other, start in zip(ours, theirs, weights):
        assert (one - other).norm() < 0.02 * (one - start).norm()


def optimizer_of(
    parameters: dict[str, torch.nn.Parameter], config: OptimizerConfig
) -> tuple[Optimizer, list[FlatBuffer]]:
    context = ParallelContext.single(dtype=torch.float64)
    named = parameters.items()
    policies = parameter_policies(named, config)
    buffers = build_buffers(named, context, grad_dtype=torch.float64, bucket_size=300, policies=policies)
    low = LowPrecision()
    return Optimizer(buffers, config, PrecisionConfig(), context, low_precision=low, sharded=False), buffers


def test_matrices_of_layers_and_the_rest_take_the_steps_of_two_rules() -> None:
    """The mean of the gradients, decay that is no part of the update, and AdamW for tables, norms and biases."""
    config = OptimizerConfig(optimizer="muon", muon_nesterov=True, clip_grad=0.0)
    start = dict(zip(("layers.0.weight", "layers.1.weight", "embedding.weight"), gradients(1)[0]))
    start["layers.1.bias"] = torch.ones(12, dtype=torch.float64)
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    for parameter in parameters.values():
        parameter.sharding = Sharding(tuple(parameter.shape))  # type: ignore[attr-defined]
    optimizer, _ = optimizer_of(parameters, config)
    grads = gradients(3)
    for each in grads:
        for name, grad in zip(parameters, [*each, torch.ones(12).double()]):
            parameters[name].main_grad.copy_(8.0 * grad)  # type: ignore[attr-defined]
        optimizer.update(count=8.0, lr=LR, weight_decay=DECAY)
    moved = take_steps(Muon(config), [*start.values()][:2], [each[:2] for each in grads])
    both = [[each[2], torch.ones(12).double()] for each in grads]

    def adam(given: list[Tensor]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": given[:1]}, {"params": given[1:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)

    rest = torch_steps(adam, [start["embedding.weight"], start["layers.1.bias"]], both)
    for parameter, expected in zip(parameters.values(), [*moved, *rest]):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9)
    kept = {entry.name for entry in optimizer.entries()}
    assert "optimizer.momentum_buffer.layers.0.weight" in kept and "optimizer.exp_avg.embedding.weight" in kept
    assert not any("exp_avg" in name for name in kept if name.endswith("layers.0.weight"))


def test_ranks_share_the_work_by_its_cost() -> None:
    """The work of all matrices on one rank would take as long as if no rank had helped."""
    loads = [0.0] * 4
    owners = dealt([[(64, 64)] * 5, [(16, 64)] * 8, [(64, 256)]], loads)
    assert max(loads) == matrix_cost((64, 256))  # nobody has more than the costliest matrix
    assert owners[2] == [0] and {owner for stack in owners for owner in stack} == {0, 1, 2, 3}
    before = min(loads)
    dealt([[(8, 8)]], loads)
    assert min(loads) >= before


@pytest.mark.parametrize(
    ("name", "sharding", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", Sharding((8, 4), {0: "tp"}), True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", Sharding((4, 2, 8, 4), {0: "ep", 2: "etp"}), True),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", Sharding((4, 8), {0: "ep"}), False),
        ("decoder.layers.0.mixer.conv1d.weight", Sharding((8, 1, 4), {0: "tp"}), False),
        ("decoder.layers.0.norm.weight", Sharding((8,)), False),
        ("embedding.word_embeddings.weight", Sharding((64, 8), {0: "tp"}, pad_multiple=128), False),
        ("embedding.position_embeddings.weight", Sharding((16, 8)), False),
        ("mtp.layers.0.embedding.weight", Sharding((64, 8), {0: "tp"}, tied="embedding"), False),
    ],
)
def test_which_parameters_are_matrices_of_layers(name: str, sharding: Sharding, expected: bool) -> None:
    assert is_layer_matrix(name, sharding) == expected


@pytest.mark.parametrize(
    ("kind", "steps", "furthest"),
    [("simple", 5, 0.35), ("simple", 9, 0.35), ("quintic", 5, 0.35), ("polar_express", 8, 1e-3), ("aol", 4, 0.4)],
)
def test_singular_values_come_near_one(kind: str, steps: int, furthest: float) -> None:
    """The orthogonal factor is that of the singular value decomposition, with the singular vectors of the matrix."""
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, _, v = torch.linalg.svd(noise, full_matrices=False)
        values = torch.linspace(0.3, 1.0, min(shape), dtype=torch.float64)
        (found,) = orthogonalized(((u * values) @ v)[None], kind=kind, steps=steps)
        in_their_basis = u.mT @ found @ v.mT
        assert (in_their_basis.diagonal() - 1).abs().max() < furthest
        assert (in_their_basis - in_their_basis.diagonal().diag()).abs().max() < 1e-9
        assert torch.nn.functional.cosine_similarity(found.reshape(-1), (u @ v).reshape(-1), dim=0) > 0.97


def test_coefficients_take_turns_and_the_last_of_polar_express_repeats() -> None:
    """A step with the first coefficients after the last ones of polar_express would undo what those converged."""
    assert coefficients_of("simple", 3) == [(3.4445, -4.775, 2.0315)] * 3
    assert coefficients_of("quintic", 10)[5:] == coefficients_of("quintic", 5)
    assert coefficients_of("polar_express", 10)[7:] == [(1.875, -1.25, 0.375)] * 3


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("spectral", (8.0, 8.0)), ("unit_rms_norm", (2.0, 0.5)), ("shape_scaling", (2.0, 1.0))],
)
def test_sizes_of_updates(mode: str, expected: tuple[float, float]) -> None:
    """The shape is [out, in]: taken the other way round, up and down projections swap their learning rates."""
    assert (update_scale(mode, 64, 16), update_scale(mode, 16, 64)) == expected


def test_matrices_are_transformed_each_alone() -> None:
    """Matrices of one shape are multiplied together; a norm over both would tie their updates."""
    matrices = [torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2)]
    rule = Muon(OptimizerConfig(optimizer="muon"))
    together = rule.transform([matrices[0], 1e3 * matrices[1]], (), ({}, {}), (1, 1))
    for one, matrix in zip(together, matrices):
        torch.testing.assert_close(one, *rule.transform([matrix], (), ({},), (1,)), rtol=1e-9, atol=1e-9)


def test_a_zero_matrix_has_no_update() -> None:
    """A matrix that no token reached, such as an unused expert's, must not become NaN."""
    rule = Muon(OptimizerConfig(optimizer="muon"))
    (update,) = rule.transform([torch.zeros(4, 6)], (), ({},), (1,))
    assert torch.equal(update, torch.zeros(4, 6))


def test_adafactor_takes_torchs_steps() -> None:
    """torch's relative steps are at most 1/sqrt(t), so they are compared below that."""
    weights, grads = gradients(1)[0], gradients(4)
    config = OptimizerConfig(optimizer="adafactor", adafactor_scale_parameter=True)
    theirs = torch_steps(
        lambda parameters: torch.optim.Adafactor(parameters, lr=LR, weight_decay=DECAY, foreach=False),
        weights,
        grads,
    )
    for one, other in zip(take_steps(Adafactor(config), weights, grads), theirs):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_lion_takes_the_papers_steps() -> None:
    config, weight = OptimizerConfig(lion_beta1=0.9, lion_beta2=0.95), torch.linspace(-1, 1, 7).double()
    ours, average, expected = weight.clone(), [torch.zeros(7).double()], weight.clone()
    mean = torch.zeros(7).double()
    for number in range(1, 4):
        grad = torch.randn(7, generator=torch.Generator().manual_seed(number)).double()
        Lion(config).apply(ours, grad * 4, average, Step(number, LR, DECAY, torch.tensor(4.0)))
        expected = expected - LR * (torch.sign(0.9 * mean + 0.1 * grad) + DECAY * expected)
        mean = 0.95 * mean + 0.05 * grad
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("warmup", [0, 3])
def test_ademamix_takes_the_papers_steps(warmup: int) -> None:
    config = OptimizerConfig(optimizer="ademamix", ademamix_warmup_iters=warmup, adam_beta2=0.99)
    ours, weight = torch.linspace(-1, 1, 7).double(), torch.linspace(-1, 1, 7).double()
    state = [torch.zeros(7).double() for _ in range(3)]
    fast, slow, squares = (torch.zeros(7).double() for _ in range(3))
    for t in range(1, 6):
        grad = torch.randn(7, generator=torch.Generator().manual_seed(t)).double()
        AdEMAMix(config).apply(ours, grad.clone(), state, Step(t, LR, DECAY, None))
        share = min(t / warmup, 1.0) if warmup else 1.0
        alpha, beta3 = 8.0 * share, 0.9999
        if share < 1.0:
            one, three = math.log(0.9), math.log(0.9999)
            beta3 = min(math.exp(one * three / ((1 - share) * three + share * one)), 0.9999)
        fast, slow = 0.9 * fast + 0.1 * grad, beta3 * slow + (1 - beta3) * grad
        squares = 0.99 * squares + 0.01 * grad**2
        update = (fast / (1 - 0.9**t) + alpha * slow) / ((squares / (1 - 0.99**t)).sqrt() + 1e-8)
        weight = weight - LR * (update + DECAY * weight)
    torch.testing.assert_close(ours, weight, rtol=1e-12, atol=1e-12)


def test_soap_is_adam_where_the_basis_is_the_weights_own() -> None:
    """Gradients that are diagonal have the unit matrix as eigenvectors, where SOAP's step is Adam's."""
    generator = torch.Generator().manual_seed(3)
    diagonal = [[torch.diag(torch.randn(6, generator=generator).double())] for _ in range(5)]
    weight, config = torch.zeros(6, 6).double(), OptimizerConfig(optimizer="soap", soap_precondition_frequency=2)
    (ours,) = take_steps(Soap(config), [weight], diagonal)
    (theirs,) = torch_steps(lambda given: torch.optim.AdamW(given, lr=LR, weight_decay=DECAY), [weight], diagonal)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_soap_turns_with_the_gradients() -> None:
    """The step of gradients in another basis is the step turned into it, once refreshes have found the eigenvectors."""
    rule = Soap(OptimizerConfig(optimizer="soap", soap_precondition_frequency=1))
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(6, 6, generator=generator).double()).Q for _ in range(2))
    sizes = torch.diag(2.0 ** torch.arange(6).double())
    plain = [[sizes * (1 + 0.1 * torch.rand(6, generator=generator).double())] for _ in range(60)]
    (straight,) = take_steps(rule, [torch.zeros(6, 6).double()], plain)
    turned = [[left @ each @ right.mT] for (each,) in plain]
    (found,) = take_steps(rule, [torch.zeros(6, 6).double()], turned)
    assert (left.mT @ found @ right - straight).norm() < 0.2 * straight.norm()
