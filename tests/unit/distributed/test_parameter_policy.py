"""What training does to a parameter: by its name, and by what it is."""

from __future__ import annotations

import dataclasses
import math

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parameter_names import matches
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import build_buffers, frozen_parts
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding, sharded_parameter
from megatron.core.parallel.weight_gradients import WeightGradients
from tests.unit.distributed.test_buffers import forward, parameters

CPU = torch.device("cpu")


def made(sharding: Sharding, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter of ones."""
    parameter = sharded_parameter(sharding, Mesh.single(), dtype=dtype, device=CPU)
    torch.nn.init.ones_(parameter)
    return parameter


def test_matrices_and_tables_decay_and_biases_do_not() -> None:
    """An expert's biases are stacked to [experts, h]: they would decay, as one expert's alone doesn't."""
    shardings = {
        "embedding": Sharding((50, 8), {0: "tp"}, pad_multiple=4),
        "norm": Sharding((8,)),
        "experts.fc1": Sharding((4, 16, 8), {0: "ep", 1: "etp"}),
        "experts.fc1_bias": Sharding((4, 16), {0: "ep", 1: "etp"}),
        "experts.fc2_bias": Sharding((4, 8), {0: "ep"}),
        "router": Sharding((4, 8)),
    }
    policies = parameter_policies((name, made(sharding)) for name, sharding in shardings.items())
    assert {name for name, policy in policies.items() if policy.decays} == {"embedding", "experts.fc1", "router"}


def test_what_flags_add() -> None:
    """--decoupled-lr is for tables of the vocabulary, not for other matrices, nor for their biases; with a condition of
    Qwen3-Next's the norms of queries and keys decay, and no others.
    """
    shardings = {
        "embedding.word_embeddings.weight": Sharding((50, 8), {0: "tp"}, pad_multiple=4),
        "embedding.position_embeddings.weight": Sharding((16, 8)),
        "output_layer.weight": Sharding((50, 8), {0: "tp"}, pad_multiple=4),
        "output_layer.bias": Sharding((50,), {0: "tp"}, pad_multiple=4),
        "decoder.layers.0.self_attention.q_layernorm.weight": Sharding((8,)),
        "decoder.layers.0.input_layernorm.weight": Sharding((8,)),
    }
    named = [(name, made(sharding)) for name, sharding in shardings.items()]
    config = OptimizerConfig(decoupled_lr=0.1, no_weight_decay_cond_type="apply_wd_to_qk_layernorm")
    plain, special = parameter_policies(named), parameter_policies(named, config)
    assert not any(policy.is_decoupled for policy in plain.values())
    assert {name for name, policy in special.items() if policy.is_decoupled} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    assert {name for name in plain if special[name].decays and not plain[name].decays} == {
        "decoder.layers.0.self_attention.q_layernorm.weight"
    }


def test_tables_move_at_their_own_rate() -> None:
    """The rate of --decoupled-lr that is printed must be the one that is used."""
    context = ParallelContext.single()
    named = {"words": made(Sharding((4, 4), pad_multiple=4, split={0: "tp"})), "matrix": made(Sharding((4, 4)))}
    policies = parameter_policies(named.items(), OptimizerConfig(decoupled_lr=0.5))
    buffers = build_buffers(named.items(), context, grad_dtype=torch.float32, policies=policies)
    optimizer = Optimizer(
        buffers, OptimizerConfig(clip_grad=0), PrecisionConfig(), context, low_precision=LowPrecision(), sharded=False
    )
    for parameter in named.values():
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.update(count=1, lr=0.125, weight_decay=0.0, decoupled_lr=0.5)
    assert {name: round(parameter.mean().item(), 4) for name, parameter in named.items()} == {
        "words": 0.5,
        "matrix": 0.875,
    }


def test_multipliers_of_the_learning_rate_are_found_by_name() -> None:
    """A layer that is to learn slower moved as fast as the others, or its weight decay did: both follow the rate. The
    first pair that matches counts, and a table has its own rate times the factor.
    """
    shardings = {
        "embedding.words": Sharding((4, 4), pad_multiple=4, split={0: "tp"}),
        "layers.0.weight": Sharding((4, 4)),
        "layers.1.weight": Sharding((4, 4)),
        "norm": Sharding((4,)),
    }
    config = OptimizerConfig(
        decoupled_lr=0.5, clip_grad=0, lr_multipliers=("layers.0.*=0.25", "layers.*=2", "embed*=0.5")
    )
    named = {name: made(sharding, torch.float64) for name, sharding in shardings.items()}
    context = ParallelContext.single(dtype=torch.float64)
    policies = parameter_policies(named.items(), config)
    buffers = build_buffers(named.items(), context, grad_dtype=torch.float64, policies=policies)
    optimizer = Optimizer(buffers, config, PrecisionConfig(), context, low_precision=LowPrecision(), sharded=False)
    for parameter in named.values():
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.update(count=1, lr=0.1, weight_decay=0.1, decoupled_lr=0.5)
    rates = {"embedding.words": 0.25, "layers.0.weight": 0.025, "layers.1.weight": 0.2, "norm": 0.1}
    for name, rate in rates.items():
        decayed = 1 - rate * 0.1 * (name != "norm")
        assert math.isclose(named[name].mean().item(), decayed - rate, rel_tol=1e-6), name


def test_patterns_are_of_global_names() -> None:
    """A tied copy on the last stage has the name under which both are saved; case counts, as on a command line."""
    parameter = made(Sharding((4, 4), tied="embedding.word_embeddings.weight"))
    (policy,) = parameter_policies(
        [("output_layer.weight", parameter)], OptimizerConfig(freeze=("embedding.*",))
    ).values()
    assert not policy.is_trained
    for pattern, frozen in {
        "decoder.layers.1.*": False,
        "decoder.layers.*": True,
        "*.BIAS": False,
        "*.layers.[1-3][0-9].*": True,
        "*.layers.??.*.bias": True,
        "decoder.layers.12": False,
    }.items():
        assert matches("decoder.layers.12.mlp.linear_fc1.bias", [pattern]) == frozen, pattern


def test_frozen_parameters_have_no_buffer_and_count_in_the_norm_of_weights() -> None:
    """A gradient or a master copy would cost what freezing saves; a norm of fewer weights would fall at a resume."""
    p, context = parameters(), ParallelContext.single()
    policies = parameter_policies(p.items(), OptimizerConfig(freeze=("embedding", "fc1*")))
    buffers = build_buffers(p.items(), context, grad_dtype=torch.float32, policies=policies)
    assert {entry.name for buffer in buffers for entry in buffer.entries} == {"norm", "fc2"}
    GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=False, overlap=False)
    optimizer = Optimizer(
        buffers,
        OptimizerConfig(),
        PrecisionConfig(),
        context,
        low_precision=LowPrecision(),
        sharded=False,
        count_zeros=True,
        frozen=frozen_parts(p.items(), policies, context),
    )
    before = {name: parameter.detach().clone() for name, parameter in p.items()}
    torch.autograd.backward(forward(p, torch.tensor([1, 2, 3])))
    update = optimizer.update(count=1, lr=0.1, weight_decay=0.1)
    assert update.num_zeros is not None and update.num_zeros <= p["norm"].numel() + p["fc2"].numel()
    changed = {name for name, parameter in p.items() if not torch.equal(parameter, before[name])}
    assert changed == {"norm", "fc2"}
    assert all(p[name].grad is None for name in ("embedding", "fc1", "fc1_bias"))
    assert {entry.name.split(".")[-1] for entry in optimizer.entries()} == {"norm", "fc2"}
    squares = sum(parameter.detach().double().square().sum().item() for parameter in p.values())
    assert math.isclose(optimizer.parameter_norm(), math.sqrt(squares), rel_tol=1e-6)


def test_parameters_of_two_types_have_buffers_of_two_types() -> None:
    """An fp32 parameter of a bf16 model would be given gradients, or updates, that are rounded to bf16."""
    context = ParallelContext.single(dtype=torch.bfloat16)
    narrow, wide = made(Sharding((4, 4)), torch.bfloat16), made(Sharding((4, 4)))
    buffers = build_buffers([("narrow", narrow), ("wide", wide)], context, grad_dtype=torch.bfloat16)
    optimizer = Optimizer(
        buffers,
        OptimizerConfig(clip_grad=0),
        PrecisionConfig(bf16=True),
        context,
        low_precision=LowPrecision(),
        sharded=False,
    )
    for parameter in (narrow, wide):
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.update(count=1, lr=1e-4, weight_decay=0.0)
    assert {entry.name: entry.main_grad.dtype for buffer in buffers for entry in buffer.entries} == {
        "narrow": torch.bfloat16,
        "wide": torch.float32,
    }
    assert {entry.name for entry in optimizer.master_entries()} == {"optimizer.fp32_param.narrow"}
    torch.testing.assert_close(wide.detach(), torch.full((4, 4), 1 - 1e-4), rtol=0, atol=1e-7)


def test_matrices_and_the_rest_may_have_two_update_rules() -> None:
    """A rule for matrices alone, such as Muon, would need another optimizer: here each buffer has the rule of its
    parameters' policy, and a checkpoint the state of that rule.
    """
    p, context, config = parameters(), ParallelContext.single(), OptimizerConfig(clip_grad=0.0, sgd_momentum=0.5)
    policies = {
        name: dataclasses.replace(policy, update_rule="sgd" if policy.decays else "adam")
        for name, policy in parameter_policies(p.items(), config).items()
    }
    buffers = build_buffers(p.items(), context, grad_dtype=torch.float32, policies=policies)
    GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=False, overlap=False)
    optimizer = Optimizer(buffers, config, PrecisionConfig(), context, low_precision=LowPrecision(), sharded=False)
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in p.items()}
    matrices = [name for name in p if policies[name].decays]
    others = [name for name in p if not policies[name].decays]
    twins = (
        torch.optim.SGD([copies[name] for name in matrices], lr=0.1, momentum=0.5, weight_decay=0.1),
        torch.optim.AdamW([copies[name] for name in others], lr=0.1, weight_decay=0.0),
    )
    for _ in range(3):
        for name, parameter in p.items():
            parameter.main_grad.copy_(parameter.detach() * 2 + 1)  # type: ignore[attr-defined]
            copies[name].grad = parameter.main_grad.clone()  # type: ignore[attr-defined]
        optimizer.update(count=1, lr=0.1, weight_decay=0.1)
        for twin in twins:
            twin.step()
    for name, parameter in p.items():
        torch.testing.assert_close(parameter, copies[name], rtol=1e-6, atol=1e-6)
    kept = {"momentum": matrices, "exp_avg": others, "exp_avg_sq": others}
    wanted = {f"optimizer.{state}.{name}" for state, names in kept.items() for name in names}
    assert matrices and others and {entry.name for entry in optimizer.entries()} == wanted
