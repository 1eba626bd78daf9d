"""Products of generation: weights in other forms multiply as linear layers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.inference import products
from megatron.core.inference.products import BLOCKED, INT8, Form, GenerationProducts, Upcast
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext

LIMITS = RunnerLimits(num_blocks=5, block_size=16, max_requests=2, max_length=64, vocabulary=200)


def weight_of(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


def needs(form: Form, dtype: torch.dtype = torch.bfloat16) -> None:
    """Skip a test of products that this processor lacks: 22 tests failed on one without AVX-512."""
    if (reason := form.refusal(torch.empty(0, 0, dtype=dtype))) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("inputs", [64, 1376])
def test_int8_weights_are_off_by_half_a_step(inputs: int) -> None:
    """A step is the largest of an output's weights over 127, and a row of zeros stays zeros."""
    weight = weight_of(70, inputs)
    weight[3] = 0
    packed = INT8.pack(weight)
    assert isinstance(packed, tuple)
    numbers, scales = packed
    assert numbers.dtype == torch.int8 and len(scales) == 70
    error = (numbers.float() * scales.float()[:, None] - weight.float()).abs()
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    # Scales are rounded to bf16, by up to 1/256 of themselves, which cuts off the largest.
    assert torch.all(error <= largest * (0.5 / 127 + 1 / 256))
    assert not numbers[3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [33, 64])
def test_large_int8_weights_have_errors_of_weights_alone(dtype: torch.dtype, inputs: int, monkeypatch: Any) -> None:
    """Rows are rounded to 16 bits, and have the same bits in any number of rows; a row of zeros stays zeros."""
    needs(INT8, dtype)
    monkeypatch.setattr(products, "_LARGE", 0)
    weight, x, bias = weight_of(70, inputs).to(dtype), weight_of(40, inputs).to(dtype), weight_of(70, 1)[:, 0].to(dtype)
    x[3], x[4] = 0, x[4] * 1e4
    wide = weight.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / 127).to(dtype).float()
    rounded = (wide / scales).round().clamp(-127, 127) * scales
    expected = x.double() @ rounded.double().t() + bias.double()
    packed = INT8.pack(weight)
    found = INT8.multiply(x, packed, bias)
    bound = 1e-4 if dtype == torch.float32 else 0.004
    assert found.dtype == dtype
    assert torch.all((found.double() - expected).norm(dim=1) <= bound * expected.norm(dim=1))
    for rows in (1, 3, 7):
        assert torch.equal(torch.cat([INT8.multiply(x[n : n + rows], packed, bias) for n in range(0, 40, rows)]), found)


@pytest.mark.parametrize("inputs", [1, 7, 33, 80, 1366])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_int8_weights_of_any_width(inputs: int, is_batch_invariant: bool) -> None:
    """torch's kernel for small weights reads behind rows that are no multiple of its steps long: NaN, or a crash."""
    needs(INT8)
    weight, x = nn.Parameter(weight_of(5, inputs), requires_grad=False), weight_of(9, inputs)
    found = GenerationProducts(is_batch_invariant=is_batch_invariant, form=INT8)(x, weight, None)
    expected = x.double() @ weight.double().t()
    assert (found.double() - expected).norm() <= 0.02 * expected.norm()


def test_large_weights_need_products_of_whole_numbers() -> None:
    """A bf16 model has weights for both kernels, and is refused where one of them doesn't work."""

    class Wrong(type(INT8)):  # type: ignore[misc]
        def multiply(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
            found: Tensor = super().multiply(x, packed, bias)
            return found if isinstance(packed, tuple) else found * 2

    assert Wrong().refusal(weight_of(4, 64)) == "this torch or processor computes it wrongly"


def test_one_row_in_fp32() -> None:
    """One and two rows are multiplied by another copy."""
    multiply, weight, bias = GenerationProducts(is_batch_invariant=False), *_given()
    weight, bias = nn.Parameter(weight.float(), requires_grad=False), bias.float()
    x = weight_of(4, 256).float()
    for rows in (1, 2, 4):
        torch.testing.assert_close(multiply(x[:rows], weight, bias), torch.nn.functional.linear(x[:rows], weight, bias))
        torch.testing.assert_close(multiply(x[:rows], weight, None), torch.nn.functional.linear(x[:rows], weight))


@pytest.mark.parametrize(("form", "bound"), [(BLOCKED, 0.005), (INT8, 0.02)])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_products_are_near_those_in_fp64(form: Form, bound: float, is_batch_invariant: bool) -> None:
    """Of the weights of a model; others are multiplied as they are."""
    needs(form)
    multiply, weight, bias = GenerationProducts(is_batch_invariant=is_batch_invariant, form=form), *_given()
    for rows in (1, 2, 9, 40):
        x = weight_of(rows, 256)
        expected = x.double() @ weight.double().t() + bias.double()
        found = multiply(x, weight, bias)
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() <= bound * expected.norm()
        plain = GenerationProducts(is_batch_invariant=is_batch_invariant)
        assert torch.equal(multiply(x, weight.data[:64], None), plain(x, weight.data[:64], None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_16_bits_without_instructions_for_them(dtype: torch.dtype, is_batch_invariant: bool, monkeypatch: Any) -> None:
    """A prompt took six times as long as in fp32, and measuring which rows have the same bits 30 times as long. Weights
    are multiplied in fp32 a part at a time, and keep their memory.
    """
    monkeypatch.setattr(products, "lacks_bf16", lambda: True)
    monkeypatch.setattr(products, "_PART", 256 * 7)
    multiply, (weight, bias) = GenerationProducts(is_batch_invariant=is_batch_invariant), _given()
    weight, bias = nn.Parameter(weight.to(dtype), requires_grad=False), bias.to(dtype)
    assert [len(part) for part in Upcast().pack(weight)] == [7] * 13 + [5]
    for each in (weight, weight.data[:64]):
        for rows in (1, 2, 9, 40):
            x = weight_of(rows, 256).to(dtype)
            expected = x.double() @ each.double().t() + bias.double()[: len(each)]
            found = multiply(x, each, bias[: len(each)])
            assert found.dtype == dtype
            assert torch.all((found.double() - expected).abs() <= expected.abs() / 128 + 1e-3)
            if is_batch_invariant:
                assert torch.equal(multiply(x[:1], each, bias[: len(each)]), found[:1])
    multiply.release([weight])
    assert weight.isfinite().all(), "it has no copy"
    if not is_batch_invariant:  # else another form may have the same bits for more numbers of rows
        for is_own in (False, True):
            assert isinstance(multiply._prepare(weight, has_bias=True, is_own=is_own).packed, tuple)


def _given() -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(weight_of(96, 256), requires_grad=False), weight_of(96, 1)[:, 0]


def test_a_kernel_that_is_missing_is_refused() -> None:
    """Both are private functions of torch, which another version may lack."""

    class Missing(type(INT8)):  # type: ignore[misc]
        def multiply(self, x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
            raise AttributeError("no attribute _weight_int8pack_mm")

    reason = "this torch or processor has no such product (no attribute _weight_int8pack_mm)"
    assert Missing().refusal(weight_of(4, 4)) == reason


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_with_int8_weights(is_tied: bool) -> None:
    """Logits are near those of bf16, with an output matrix of its own and with that of the embeddings, which stay."""
    needs(INT8)
    config = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=200,
        untie_embeddings_and_output_weights=not is_tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    model = GPTModel(config, ModelContext.single(dtype=torch.bfloat16), seed=5).eval().requires_grad_(False)
    row = PlanRow(slot=0, start=0, tokens=tuple(range(40)), blocks=(1, 2, 3), logits_from=0)
    found = [
        CachedRunner(model, config, model._context, LIMITS, form=form).start(StepPlan((row,))).logits()
        for form in (None, INT8)
    ]
    error = ((found[1] - found[0]).norm() / found[0].norm()).item()
    assert 0.001 < error < 0.03, "int8 everywhere, and near"
    alone = CachedRunner(model, config, model._context, LIMITS, form=INT8)
    parts = [alone.start(StepPlan((replace(row, start=n, tokens=row.tokens[n : n + 1]),))).logits() for n in range(40)]
    assert torch.equal(torch.cat(parts), found[1]), "the same bits one by one"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_with_copies_give_up_their_memory(dtype: torch.dtype, is_tied: bool) -> None:
    """Texts are the same, and embeddings, which are looked up, stay; everything is measured and copied before the first
    request, and the step that does it leaves nothing in the cache.
    """
    needs(BLOCKED, dtype)
    config = ModelConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=200,
        untie_embeddings_and_output_weights=not is_tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, ModelContext.single(dtype=dtype), seed=5).eval().requires_grad_(False)
    row = PlanRow(slot=0, start=0, tokens=tuple(range(10)), blocks=(2, 3), logits_from=0)
    before = CachedRunner(model, config, model._context, LIMITS).start(StepPlan((row,))).logits()
    runner = CachedRunner(model, config, model._context, LIMITS)
    runner.warm_up(releases=True)
    prepared = list(runner._multiply._prepared)
    assert not any(table.any() for table in (*runner._cache.keys.values(), *runner._cache.values.values()))
    assert torch.equal(runner.start(StepPlan((row,))).logits(), before)
    assert list(runner._multiply._prepared) == prepared, "the first request has nothing to prepare"
    bytes_of = {
        name: weight.untyped_storage().nbytes() for name, weight in model.named_parameters() if weight.dim() > 1
    }
    kept = {name for name, size in bytes_of.items() if size > dtype.itemsize}
    assert kept == {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == (256, 64)
