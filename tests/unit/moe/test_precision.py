"""Training with experts in 16 bits, whose gradients have buffers in fp32 of their own."""

from __future__ import annotations

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
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
        run = tiny_run(ParallelContext.single(dtype=dtype), f"{FLAGS} {more} {flags}")
        batches = run.data.training_batches(0)
        losses[dtype] = [train_step(run, next(batches)).losses["lm loss"] for _ in range(3)]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)


def test_hooks_of_weights_run_once_a_backward_pass() -> None:
    """The overlapped reduction of gradients counts them."""
    run = tiny_run(ParallelContext.single(), FLAGS)
    calls: dict[str, int] = {}
    for name, parameter in run.models[0].named_parameters():

        def count(_: torch.Tensor, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    microbatches = next(run.data.training_batches(0))
    run.runner.step(run.plans.training(len(microbatches)), microbatches)
    assert {calls[name] for name in calls if ".mlp." in name} == {len(microbatches)}
