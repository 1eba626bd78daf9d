"""Training with experts in 16 bits, whose gradients have buffers in fp32 of their own, and their products in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megatron.config.fp8 import Fp8Config
from megatron.core.moe.fp8_grouped_linear import Fp8GroupedLinear
from megatron.core.ops.grouped_matmul import BACKENDS, Groups
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer
from megatron.rehearsal import recorder
from megatron.training.step import train_step
from tests.harness.runs import tiny_run

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 8 --hidden-dropout 0 --attention-dropout 0"
)


@pytest.mark.parametrize("more", ["", "--recompute-granularity selective --recompute-modules moe"])
def test_steps_in_bf16_are_those_of_fp32_but_for_rounding(more: str) -> None:
    """Autograd called the hooks of experts' weights a second time, without a gradient: a run in bf16 ended there."""
    losses = {}
    for flags, dtype in (("", torch.float32), ("--bf16", torch.bfloat16)):
        run = tiny_run(ModelContext.single(dtype=dtype), f"{FLAGS} {more} {flags}")
        batches = run.data.training_batches(0)
        losses[dtype] = [train_step(run, next(batches)).losses["lm loss"] for _ in range(3)]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)


def test_hooks_of_weights_run_once_a_backward_pass() -> None:
    """The overlapped reduction of gradients counts them."""
    run = tiny_run(ModelContext.single(), FLAGS)
    calls: dict[str, int] = {}
    for name, parameter in run.models[0].named_parameters():

        def count(_: torch.Tensor, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    microbatches = next(run.data.training_batches(0))
    run.runner.step(run.plans.training(len(microbatches)), microbatches)
    assert {calls[name] for name in calls if ".mlp." in name} == {len(microbatches)}


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = recorder.Memory()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            self.memory.see(func, args, kwargs or {}, result)
        return result


def test_products_in_8_bits_are_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all experts were held twice, in a list and joined: a rank's largest tensors, at its peak."""
    monkeypatch.setattr(recorder, "DEVICE_TYPE", "cpu")
    experts, width, rows = 32, 64, torch.randn(32 * 64, 64, dtype=torch.bfloat16)
    context = ModelContext.single(dtype=torch.bfloat16)
    context = dataclasses.replace(
        context, low_precision=LowPrecision(Fp8Config(fp8_format="e4m3", fp8_recipe="tensorwise"), 2)
    )
    weight = torch.randn(experts, width, width, dtype=torch.bfloat16)
    quantizer = Fp8Quantizer(context.in_layer(0), inputs=(), weights=(), grads=())
    linear = Fp8GroupedLinear(BACKENDS["loop"], context, quantizers={weight: quantizer})
    groups = Groups(torch.full((experts,), 64), [64] * experts)
    total = torch.zeros(weight.shape)
    calls: dict[str, Callable[[], Any]] = {
        "results": lambda: linear.multiply(rows, weight, groups),
        "gradients of rows": lambda: linear.multiply_back(rows, weight, groups),
        "gradients of weights": lambda: linear.outer(weight, rows, rows, groups),
        "added gradients": lambda: linear.add_outer(total, weight, rows, rows, groups),
    }
    with context.low_precision.step(trains=True):
        quantizer.quantize_weights(weight)
        for what, call in calls.items():
            with _Made() as made:
                result = call()
            kept = total.nbytes if result is None else result.nbytes
            assert made.memory.highest <= kept + rows.nbytes // 2, what
