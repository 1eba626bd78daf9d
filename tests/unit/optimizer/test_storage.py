"""The optimizer's numbers in fewer bits: masters without loss, and second moments that still follow their gradients."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import FlatBuffer, Span, build_buffers
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.storage import PlainStateStorage, Remainders, StochasticallyRounded
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.sharding import Sharding, sharded_parameter

SIZE = 1 << 16


def every_remainder(upper: int) -> Tensor:
    """fp32 numbers with the upper 16 bits ``upper`` and all lower ones."""
    bits = torch.arange(SIZE, dtype=torch.int64) + (upper << 16)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("upper", [0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xC2FF])
def test_masters_come_back_bit_by_bit(upper: int) -> None:
    """A run would drift from one with fp32 masters: at ties, at signs, at a carry into the exponent."""
    masters, weights = every_remainder(upper), torch.zeros(SIZE, dtype=torch.bfloat16)
    kept = Remainders.of(weights)
    whole = Span(0, SIZE)
    kept.write(whole, masters)
    assert torch.equal(weights, masters.bfloat16())
    assert torch.equal(kept.read(whole).view(torch.int32), masters.view(torch.int32))
    part = Span(SIZE // 2 - 64, SIZE // 2 + 128)  # the tie is among them
    assert torch.equal(kept.read(part), part.of(masters))
    assert 8 * (kept.low.nbytes + kept.ties.nbytes) == 17 * SIZE


def test_bf16_follows_small_changes_on_average() -> None:
    """--exp-avg-sq-dtype bf16 would keep the second moment of the first steps for good."""
    numbers, keys = torch.ones(SIZE, dtype=torch.bfloat16), iter(range(200))
    kept = StochasticallyRounded(numbers, torch.float32, lambda: next(keys), 0)
    for _ in range(200):
        kept.write(Span(0, SIZE), kept.read(Span(0, SIZE)) * 0.999)
    assert numbers.double().mean().item() == pytest.approx(0.999**200, rel=1e-3)
    assert torch.ones((), dtype=torch.bfloat16) * 0.999 == 1.0


def test_rounding_depends_on_the_place_alone() -> None:
    """A sharded optimizer would step otherwise than a replicated one, and a resumed run than an unbroken one."""
    values = torch.rand(SIZE, generator=torch.Generator().manual_seed(1))

    def rounded(cuts: list[int], key: int) -> Tensor:
        numbers = torch.zeros(SIZE, dtype=torch.bfloat16)
        for start, stop in zip([0, *cuts], [*cuts, SIZE]):
            kept = StochasticallyRounded(numbers[start:stop], torch.float32, lambda: key, start)
            kept.write(Span(0, stop - start), values[start:stop].clone())
        return numbers

    assert torch.equal(rounded([], 5), rounded([64, 4096], 5))
    assert not torch.equal(rounded([], 5), rounded([], 6))
    between = rounded([], 5).float() - values
    assert between.abs().max() < 2**-8
    assert abs(between.double().mean().item()) < 1e-5


def buffers_of(dtype: torch.dtype, *, grad_dtype: torch.dtype = torch.float32) -> list[FlatBuffer]:
    """Two parameters, one with a size that is no multiple of eight."""
    context, generator = ParallelContext.single(dtype=dtype), torch.Generator().manual_seed(1)
    made = {}
    for name, shape in {"matrix": (333, 77), "bias": (4099,)}.items():
        made[name] = sharded_parameter(Sharding(shape), context.mesh, dtype=dtype, device=context.device)
        made[name].data.copy_(torch.randn(shape, generator=generator))
    return build_buffers(made.items(), context, grad_dtype=grad_dtype)


def optimizer_of(buffers: list[FlatBuffer], **settings: Any) -> Optimizer:
    """Over bf16 weights, with the settings' formats."""
    config = OptimizerConfig(clip_grad=0.0, **settings)
    return Optimizer(
        buffers,
        config,
        PrecisionConfig(bf16=True),
        ParallelContext.single(),
        low_precision=LowPrecision(),
        sharded=False,
    )


def take_steps(buffers: list[FlatBuffer], optimizer: Optimizer, steps: range) -> None:
    """Steps from gradients that the number of the step names."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for entry in (entry for buffer in buffers for entry in buffer.entries):
            entry.main_grad.copy_(torch.randn(entry.main_grad.shape, generator=generator))
        optimizer.update(count=4.0, lr=3e-3, weight_decay=0.1)


AWARE = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def masters_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """By parameter."""
    return {entry.name: entry.tensor.clone() for entry in optimizer.master_entries()}


@pytest.mark.parametrize(("first", "second"), [(AWARE, {}), ({}, AWARE), (NARROW, NARROW)], ids=["out", "into", "same"])
def test_runs_with_remainders_and_with_masters_continue_each_other(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Turning --use-precision-aware-optimizer on or off between two parts of a run would change its weights."""
    unbroken = buffers_of(torch.bfloat16)
    whole = optimizer_of(unbroken, **(first if first is second else {}))
    take_steps(unbroken, whole, range(4))

    start = buffers_of(torch.bfloat16)
    before = optimizer_of(start, **first)
    take_steps(start, before, range(2))
    saved = {entry.name: entry.tensor.clone() for entry in before.entries()}
    numbers = json.loads(json.dumps(before.state_dict()))
    rest = buffers_of(torch.bfloat16)
    after = optimizer_of(rest, **second)
    for mine, theirs in zip(rest, start):
        mine.params.copy_(theirs.params)
    for entry in after.entries():
        entry.tensor.copy_(saved[entry.name])
        if entry.after_load is not None:
            entry.after_load()
    after.load_state_dict(numbers)
    take_steps(rest, after, range(2, 4))
    assert all(torch.equal(mine.params, theirs.params) for mine, theirs in zip(rest, unbroken))
    continued, expected = masters_of(after), masters_of(whole)
    assert all(torch.equal(continued[name], expected[name]) for name in expected)
    assert expected.keys() == {"optimizer.fp32_param.matrix", "optimizer.fp32_param.bias"}


def test_fp16_weights_keep_whole_masters() -> None:
    """Remainders are of bf16 weights: bits of fp16 are not the upper half of fp32's, and a run would train noise."""
    here, there = buffers_of(torch.float16), buffers_of(torch.float16)
    plain, aware = optimizer_of(here), optimizer_of(there, **AWARE)
    for buffers, optimizer in ((here, plain), (there, aware)):
        take_steps(buffers, optimizer, range(2))
    expected, found = masters_of(plain), masters_of(aware)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_narrow_moments_take_nearly_the_same_steps() -> None:
    """Moments in bf16 would be computed in bf16, or be written to the wrong places."""
    wide, narrow = buffers_of(torch.bfloat16), buffers_of(torch.bfloat16)
    optimizers = optimizer_of(wide), optimizer_of(narrow, **NARROW)
    for buffers, optimizer in zip((wide, narrow), optimizers):
        take_steps(buffers, optimizer, range(5))
    first, second = map(masters_of, optimizers)
    for name, masters in first.items():
        torch.testing.assert_close(second[name], masters, rtol=0, atol=0.02 * 5 * 3e-3)
    formats = {entry.name.split(".")[1]: entry.tensor.dtype for entry in optimizers[1].entries()}
    assert formats == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "fp32_param": torch.float32}


def test_narrow_numbers_in_fp64_runs() -> None:
    """Moments of fp64 weights are rounded from fp64."""
    kept = PlainStateStorage(torch.zeros(64, dtype=torch.bfloat16), torch.float64)
    kept.write(Span(0, 64), torch.full((64,), 1 / 3, dtype=torch.float64))
    assert kept.read(Span(0, 64)).dtype == torch.float64
    assert kept.numbers[0].item() == pytest.approx(1 / 3, rel=1e-2)
