"""Steps that repeat recorded calls must give the bits of steps that the model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from megatron.config.moe import MoEConfig
from megatron.core.inference.cache import CachedStep, KeyValueCache
from megatron.core.inference.recording import RecordedSteps
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.step_plan import PlanRow, StepPlan
from megatron.core.models.gpt.layer_kinds import decoder_stack
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.ops.attention import AttentionOptions
from megatron.core.ops.compiled import compile_bodies
from megatron.core.ops.text_cache import TextCache
from megatron.core.parallel.model_context import ModelContext
from tests.unit.inference.test_runner import LIMITS, VARIANTS, VOCABULARY, gpt

MATRIX = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Counted:
    """Counts the calls of a step."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self.calls, self._step = 0, step

    def __call__(self, cache: TextCache, tensors: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        return self._step(tensors[0])


def cache() -> Any:
    plan = StepPlan((PlanRow(slot=0, start=0, tokens=(0,), blocks=(1,), logits_from=0),))
    keys_and_values = KeyValueCache({}, LIMITS, dtype=torch.float64, device=torch.device("cpu"))
    return CachedStep(keys_and_values, plan, "auto", in_tiles=False)


def kinds_of_calls(x: Tensor) -> Tensor:
    """Views, several results, lists, names, numbers, assignment and changes in place."""
    wide = torch.nn.functional.linear(x, weight=MATRIX.t(), bias=MATRIX[0].new_ones(6)).to(torch.float64)
    first, second = torch.split(wide, [2, 4], dim=-1)
    joined = torch.cat([second, first.mul_(2.0)], dim=-1)
    joined[:, 1:3] += x[:, :2]
    joined[0] = 1.0
    best = joined.topk(3, dim=-1)
    torch.add(best.values, 1.0, out=(found := torch.empty_like(best.values)))
    return found.expand(len(x), 3) * best.indices + x.shape[0]


def test_a_recorded_step_makes_the_same_calls_with_new_tensors() -> None:
    step = Counted(kinds_of_calls)
    steps = RecordedSteps(step)
    for rows in (2, 3, 2, 2, 3, 3, 2, 3, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        assert torch.equal(steps(cache(), [x]), kinds_of_calls(x))
    assert step.calls == 6, "the first three of each number of rows"


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def listing(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist()) + 1


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def through_numbers(x: Tensor) -> Tensor:
    """Numbers leave torch by a way that the recorder doesn't see."""
    with torch._C.DisableTorchFunction():
        doubled = torch.tensor(x.tolist()) * 2
    return doubled + 1


@pytest.mark.parametrize("step", [branching, listing, by_numpy, through_numbers])
def test_steps_whose_calls_depend_on_numbers_are_never_repeated(step: Callable[[Tensor], Tensor]) -> None:
    counted = Counted(step)
    steps = RecordedSteps(counted)
    for number in range(6):
        x = torch.rand(2, 4) if number < 4 else -torch.rand(2, 4)
        assert torch.equal(steps(cache(), [x]), step(x))
    assert counted.calls == 6


def test_a_cache_keeps_what_the_model_computes() -> None:
    """The third step is computed both ways, and what is repeated may be wrong."""
    written: list[Tensor] = []

    class Keeping:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            written.append(k)
            return q

        def rehearsal(self) -> Keeping:
            return self

        def has_kept(self, rehearsal: Keeping) -> bool:
            return True

    def step(cache: TextCache, tensors: Sequence[Tensor]) -> Tensor:
        found = through_numbers(tensors[0])
        return cache.attend(0, found, found, found, AttentionOptions(causal=True, scale=1.0))

    steps = RecordedSteps(step)
    for _ in range(6):
        x = torch.rand(2, 4)
        steps(cast(CachedStep, Keeping()), [x])
        assert torch.equal(written[-1], through_numbers(x))
    assert len(written) == 7


def texts_of(steps: CachedRunner, *, encoder: bool = False) -> list[Tensor]:
    """Logits of three texts, which go on token by token; in the end the last one alone."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (12, 3), generator=generator).tolist()
    rows = [
        PlanRow(
            slot=slot,
            start=0,
            tokens=(1, 2, 3)[: slot + 1],
            blocks=tuple(range(6 * slot + 1, 6 * slot + 7)),
            logits_from=0,
        )
        for slot in range(3)
    ]
    if encoder:
        steps.start(
            StepPlan(tuple(replace(row, blocks=(), tokens=(5, 6, 7), logits_from=3, encoder=True) for row in rows))
        )
    found = [steps.start(StepPlan(tuple(rows))).logits()]
    for number, each in enumerate(tokens):
        rows = [
            replace(row, start=row.start + len(row.tokens), tokens=(token,), logits_from=0)
            for row, token in zip(rows, each)
        ]
        found.append(steps.start(StepPlan(tuple(rows[2:] if number > 6 else rows))).logits())
    return found


def check_bits(make: Callable[[], CachedRunner], *, is_recorded: bool = True, encoder: bool = False) -> None:
    recording, plain = make(), make()
    assert recording._records
    plain._records = False
    for one, other in zip(texts_of(recording, encoder=encoder), texts_of(plain, encoder=encoder), strict=True):
        assert torch.equal(one, other)
    programs = recording._recorded._programs
    assert len(programs) == 2
    assert all((program is not None) == is_recorded for program in programs.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_have_the_bits_of_steps_that_are_not_recorded(name: str) -> None:
    model = gpt(VARIANTS[name])
    check_bits(lambda: CachedRunner(model, model._config, model._context, LIMITS))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_bf16_is_recorded(is_batch_invariant: bool) -> None:
    model = gpt(VARIANTS["two groups"], dtype=torch.bfloat16)
    given = (model, model._config, model._context, LIMITS)
    check_bits(lambda: CachedRunner(*given, is_batch_invariant=is_batch_invariant))


def test_experts_that_count_their_tokens_are_not_recorded() -> None:
    config = replace(gpt(VARIANTS["rotary"])._config, num_layers=1)
    context = ModelContext.single(dtype=torch.float64)
    stack = decoder_stack(config, (MoEConfig(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16),))
    model = GPTModel(config, context, stack=stack, seed=5).eval().requires_grad_(False)
    check_bits(lambda: CachedRunner(model, config, context, LIMITS), is_recorded=False)


@pytest.mark.parametrize("positions", ["relative", "learned_absolute"])
def test_a_t5_is_recorded(positions: Literal["relative", "learned_absolute"]) -> None:
    config = replace(gpt(VARIANTS["learned positions"])._config, position_embedding_type=positions)
    context = ModelContext.single(dtype=torch.float64)
    model = T5Model(config, T5Config(decoder_num_layers=3), context, seed=5).eval().requires_grad_(False)
    limits = replace(LIMITS, max_encoder_length=24)
    check_bits(lambda: CachedRunner(model, config, context, limits), encoder=True)


def test_compiled_functions_are_not_recorded() -> None:
    model = gpt(VARIANTS["rotary"])
    compile_bodies(True, model._context.device)
    try:
        assert not CachedRunner(model, model._config, model._context, LIMITS)._records
    finally:
        compile_bodies(False, model._context.device)
