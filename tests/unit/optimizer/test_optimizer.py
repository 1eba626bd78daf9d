"""One step of the optimizer on one rank: the weights that torch's own optimizers give, and nothing on an overflow."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.optimizer import element_rules
from megatron.core.optimizer.grad_norm import nonfinite_gradients
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding, sharded_parameter
from megatron.core.parallel.weight_gradients import WeightGradients

SHAPES = {"matrix": (33, 8), "bias": (33,), "other": (8, 33)}
COUNT = 12.0


class Setup:
    """A few parameters, their buffers, gradient sync and optimizer, on one rank."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        precision: PrecisionConfig | None = None,
        grad_dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        context = ParallelContext.single(dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, shape in SHAPES.items():
            made = sharded_parameter(Sharding(shape), context.mesh, dtype=dtype, device=context.device)
            made.data.copy_(torch.randn(shape, generator=generator))
            self.parameters[name] = made
        wide, config = torch.float64 if dtype == torch.float64 else torch.float32, OptimizerConfig(**settings)
        self.buffers: list[FlatBuffer] = build_buffers(
            self.parameters.items(),
            context,
            grad_dtype=grad_dtype or wide,
            bucket_size=300,
            policies=parameter_policies(self.parameters.items(), config),
        )
        self.sync = GradSync(self.buffers, context, weight_gradients=WeightGradients(), sharded=False, overlap=False)
        self.optimizer = Optimizer(
            self.buffers,
            config,
            precision or PrecisionConfig(bf16=dtype == torch.bfloat16),
            context,
            low_precision=LowPrecision(),
            sharded=False,
            count_zeros=True,
        )

    def set_grads(self, seed: int, *, factor: float = 1.0) -> dict[str, Tensor]:
        """Put mean gradients times ``COUNT`` times ``factor`` into the buffers; returns the means."""
        generator = torch.Generator().manual_seed(seed)
        self.sync.zero()
        means = {}
        for name, parameter in self.parameters.items():
            means[name] = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            main_grad.copy_(means[name] * COUNT * factor)
        return means


def torch_twin(setup: Setup, kind: type[torch.optim.Optimizer], **settings: Any) -> dict[str, nn.Parameter]:
    """Copies of the parameters, and a torch optimizer over them in ``setup.twin``."""
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in setup.parameters.items()}
    matrices = [copy for name, copy in copies.items() if name != "bias"]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": [copies["bias"]], "weight_decay": 0.0}]
    setup.twin = kind(groups, **settings)  # type: ignore[attr-defined]
    return copies


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("name", ["adam", "sgd", "plain"])
def test_steps_equal_torch(name: str, clip: float, dtype: torch.dtype, tolerance: float) -> None:
    """Weights would take other steps than AdamW or SGD say: decay on biases, a wrong mean, a wrong clip."""
    if name == "adam":
        setup = Setup(dtype, clip_grad=clip, adam_beta2=0.95)
        copies = torch_twin(setup, torch.optim.AdamW, lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), foreach=False)
    else:
        momentum = 0.9 if name == "sgd" else 0.0
        setup = Setup(dtype, clip_grad=clip, optimizer="sgd", sgd_momentum=momentum)
        copies = torch_twin(setup, torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=momentum, foreach=False)
    for seed in range(3):
        means = setup.set_grads(seed)
        result = setup.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1)
        norm = math.sqrt(sum(mean.square().sum().item() for mean in means.values()))
        for each, copy in copies.items():
            copy.grad = (means[each] * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0)).to(dtype)
        setup.twin.step()  # type: ignore[attr-defined]
        assert result.grad_norm == pytest.approx(norm, rel=1e-6 if dtype == torch.float32 else 1e-13)
        assert not result.skipped
    for each, parameter in setup.parameters.items():
        torch.testing.assert_close(parameter, copies[each], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_follow_fp32_masters(grad_dtype: torch.dtype) -> None:
    """Updates smaller than bf16's resolution would be lost instead of adding up in the main_params."""
    setup = Setup(torch.bfloat16, clip_grad=0.0, grad_dtype=grad_dtype)
    start = {name: parameter.detach().float() for name, parameter in setup.parameters.items()}
    for _ in range(20):
        for buffer in setup.buffers:
            buffer.grads.fill_(COUNT)
        setup.optimizer.update(count=COUNT, lr=1e-4, weight_decay=0.0)
    main_params = {entry.name: entry.tensor for entry in setup.optimizer.entries() if "fp32_param" in entry.name}
    for name, parameter in setup.parameters.items():
        master = main_params[f"optimizer.fp32_param.{name}"]
        torch.testing.assert_close(master, start[name] - 20e-4, rtol=0, atol=1e-5)
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_changes_nothing(bad: float) -> None:
    """One bad step would poison weights or moments for good, or count as a step of Adam."""
    setup, clean = Setup(), Setup()
    setup.set_grads(0)
    setup.parameters["bias"].main_grad[5] = bad  # type: ignore[attr-defined]
    before = [buffer.params.clone() for buffer in setup.buffers]
    result = setup.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert all(torch.equal(buffer.params, params) for buffer, params in zip(setup.buffers, before))
    assert nonfinite_gradients(setup.buffers, Mesh.single()) == ["bias"]
    for each in (setup, clean):
        each.set_grads(1)
        assert not each.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1).skipped
    assert all(torch.equal(a.params, b.params) for a, b in zip(setup.buffers, clean.buffers))


def test_fp16_unscales_and_backs_off() -> None:
    """The loss scale would reach the weights, or stay too high after overflows."""
    fp16 = PrecisionConfig(fp16=True, initial_loss_scale=256.0, hysteresis=1)
    scaled = Setup(torch.float16, precision=fp16, clip_grad=0.5)
    scaled.optimizer.expect(500)
    plain = Setup(torch.float16, precision=PrecisionConfig(fp16=True, loss_scale=1.0), clip_grad=0.5)
    assert (scaled.optimizer.loss_scale, scaled.optimizer.backward_scale) == (256.0, 0.5)
    assert (plain.optimizer.loss_scale, plain.optimizer.backward_scale) == (1.0, 1.0)
    for setup in (scaled, plain):
        setup.set_grads(0, factor=setup.optimizer.backward_scale)
    results = [setup.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1) for setup in (scaled, plain)]
    assert results[0] == results[1]
    assert all(torch.equal(a.params, b.params) for a, b in zip(scaled.buffers, plain.buffers))
    scaled.parameters["matrix"].main_grad[0, 0] = math.inf  # type: ignore[attr-defined]
    assert scaled.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1).skipped
    assert scaled.optimizer.loss_scale == 128.0


def test_a_fully_masked_batch_is_a_step_with_zero_gradients() -> None:
    """A global batch without a single counted token would turn every weight into NaN."""
    setup = Setup()
    setup.sync.zero()
    result = setup.optimizer.update(count=0.0, lr=0.1, weight_decay=0.0)
    assert (result.grad_norm, result.skipped) == (0.0, False)
    assert result.num_zeros == sum(parameter.numel() for parameter in setup.parameters.values())
    assert all(torch.isfinite(parameter).all() for parameter in setup.parameters.values())


def test_zeros_are_counted_without_padding() -> None:
    """--log-num-zeros-in-grad would count the padding of the buffers."""
    setup = Setup()
    setup.set_grads(0)
    setup.parameters["matrix"].main_grad[2] = 0.0  # type: ignore[attr-defined]
    assert setup.optimizer.update(count=COUNT, lr=0.0, weight_decay=0.0).num_zeros == 8


def test_parameter_norm() -> None:
    """--log-params-norm would report the norm of something else."""
    setup = Setup()
    squares = sum(parameter.double().square().sum().item() for parameter in setup.parameters.values())
    assert setup.optimizer.parameter_norm() == pytest.approx(math.sqrt(squares), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_resume_from_entries_is_bitwise(optimizer: str, dtype: torch.dtype) -> None:
    """A run resumed from its checkpoint would drift from the uninterrupted one."""
    whole, resumed = Setup(dtype, optimizer=optimizer), Setup(dtype, optimizer=optimizer)
    for seed in range(2):
        whole.set_grads(seed)
        whole.optimizer.update(count=COUNT, lr=0.01, weight_decay=0.1)
    numbers = json.loads(json.dumps(whole.optimizer.state_dict()))
    saved = {entry.name: entry.tensor.clone() for entry in whole.optimizer.entries()}
    for a, b in zip(resumed.buffers, whole.buffers):
        a.params.copy_(b.params)
    for entry in resumed.optimizer.entries():
        entry.tensor.copy_(saved[entry.name])
    resumed.optimizer.load_state_dict(numbers)
    for setup in (whole, resumed):
        setup.set_grads(9)
        setup.optimizer.update(count=COUNT, lr=0.01, weight_decay=0.1)
    assert all(torch.equal(a.params, b.params) for a, b in zip(whole.buffers, resumed.buffers))


def test_entries_name_every_weight_once() -> None:
    """A weight's moments would be missing from checkpoints, or stored under a name that no other layout knows."""
    setup = Setup(torch.bfloat16)
    entries = {entry.name: entry for entry in setup.optimizer.entries()}
    states = ("exp_avg", "exp_avg_sq", "fp32_param")
    assert set(entries) == {f"optimizer.{state}.{name}" for state in states for name in SHAPES}
    assert all(tuple(entry.tensor.shape) == entry.sharding.shape for entry in entries.values())
    assert {entry.name.split(".")[1] for entry in Setup().optimizer.entries()} == {"exp_avg", "exp_avg_sq"}
    assert list(Setup(optimizer="sgd", sgd_momentum=0.0).optimizer.entries()) == []


def test_master_entries_are_what_a_load_without_optimizer_fills() -> None:
    """With --finetune or --no-load-optim the first update would restore the weights of before the load."""
    setup = Setup(torch.bfloat16)
    nn.init.constant_(setup.parameters["matrix"], 3.0)
    main_params = {entry.name: entry.tensor for entry in setup.optimizer.master_entries()}
    assert set(main_params) == {f"optimizer.fp32_param.{name}" for name in SHAPES}
    main_params["optimizer.fp32_param.matrix"].fill_(3.0)
    setup.set_grads(0)
    setup.optimizer.update(count=COUNT, lr=0.0, weight_decay=0.0)
    assert torch.equal(setup.parameters["matrix"], torch.full((33, 8), 3.0, dtype=torch.bfloat16))
    assert list(Setup().optimizer.master_entries()) == []


def test_bf16_backward_accumulates_in_fp32() -> None:
    """Over many microbatches, small gradients would vanish beside the sum, as they do in bf16."""
    setup = Setup(torch.bfloat16)
    matrix = setup.parameters["matrix"]
    setup.sync.zero()
    for _ in range(300):
        matrix.sum().backward()  # type: ignore[no-untyped-call]
    assert matrix.grad is None
    assert torch.equal(matrix.main_grad, torch.full((33, 8), 300.0))  # type: ignore[attr-defined]


def test_a_replaced_grad_is_brought_home() -> None:
    """A caller's ``zero_grad(set_to_none=True)`` would cut a parameter off from its buffer."""
    setup = Setup()
    matrix = setup.parameters["matrix"]
    matrix.grad = None
    for _ in range(2):
        matrix.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(matrix.main_grad, torch.full((33, 8), 2.0))  # type: ignore[attr-defined]
    assert matrix.grad is matrix.main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fused_kernels_of_gpus_get_what_they_need(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they want their counts and scales as fp32 on the weights' device, which neither a CPU nor fake tensors
    check, and they write scaled gradients back, so that nobody may read gradients after an update.
    """
    name, steps = {"adam": "adamw", "sgd": "sgd"}[optimizer], []
    kernel = getattr(element_rules, name)

    def on_a_gpu(weights: list[Tensor], grads: list[Tensor], *others: Any, **settings: Any) -> None:
        kernel(weights, grads, *others, **settings)
        scalars = [x for x in (settings["grad_scale"], *(others[-1] if name == "adamw" else ())) if x is not None]
        assert all(x.dtype == torch.float32 and x.device == weights[0].device and x.dim() == 0 for x in scalars)
        for grad in grads:
            grad.fill_(math.nan)
        steps.append(len(weights))

    expected, setup = Setup(optimizer=optimizer), Setup(optimizer=optimizer)
    for seed in (1, 2):
        for each in (expected, setup):
            with monkeypatch.context() as patched:
                if each is setup:
                    patched.setattr(element_rules, name, on_a_gpu)
                each.set_grads(seed)
                each.optimizer.update(count=COUNT, lr=0.1, weight_decay=0.1)
    assert steps
    for one, other in zip(expected.parameters.values(), setup.parameters.values()):
        assert torch.equal(one, other)
