"""Products in 8 bits: emulation, and calls of device kernels as those kernels want them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.ops import fp8_matmul
from megatron.core.ops.fp8_matmul import implementation_on, multiply, refusal, swizzled
from megatron.core.ops.quantize import E4M3, E5M2, Quantized, blockwise, mxfp8, tensorwise
from tests.harness.sentences import check_sentence
from tests.unit.ops.scaled_mm_stub import HAS_SCALED_MM, ScaledProducts

SHAPES = [(48, 64, 256), (40, 24, 80), (7, 16, 48), (256, 384, 512)]


def operands(kind: str, shape: tuple[int, int, int]) -> tuple[Quantized, Quantized]:
    rows, outputs, inner = shape
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(each, inner, generator=generator) for each in (rows, outputs))
    if kind == "tensorwise":
        return tensorwise(x, E4M3), tensorwise(w, E4M3)
    if kind == "gradient":
        return tensorwise(x, E5M2), tensorwise(w, E4M3)
    if kind == "mxfp8":
        return mxfp8(x), mxfp8(w)
    return blockwise(x, E4M3), blockwise(w, E4M3, rows=128 if kind == "squares" else 1)


KINDS = ["tensorwise", "gradient", "blockwise", "squares", "mxfp8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_emulation_multiplies_the_numbers_that_the_codes_stand_for(kind: str, dtype: torch.dtype) -> None:
    a, b = operands(kind, (40, 24, 300))
    found = multiply(a, b, dtype, by="emulation")
    expected = a.dequantized(torch.float64) @ b.dequantized(torch.float64).t()
    assert found.dtype == dtype
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 30)


@pytest.mark.parametrize("kind", ["tensorwise", "gradient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_s_call_gives_what_emulation_gives(kind: str, shape: tuple[int, int, int]) -> None:
    """torch's own kernel exists on CPUs, too; it takes one scale for a tensor."""
    a, b = operands(kind, shape)
    expected = multiply(a, b, torch.float32, by="emulation")
    torch.testing.assert_close(multiply(a, b, torch.float32, by="device"), expected, rtol=1e-6, atol=1e-4)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ScaledProducts:
    """Those of a GPU, by their documentation."""
    if not HAS_SCALED_MM:
        pytest.skip("this torch has no scaled_mm")
    stub = ScaledProducts()
    monkeypatch.setattr(torch, "_scaled_mm", stub._scaled_mm)
    monkeypatch.setattr(fp8_matmul, "_scaled_mm", stub.scaled_mm)
    return stub


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (130, 136, 1056)])
def test_kernels_find_each_number_s_scale(kind: str, shape: tuple[int, int, int], kernels: ScaledProducts) -> None:
    """A scale of another number, or padding that counts, would be wrong and no error."""
    a, b = operands(kind, shape)
    b = Quantized(b.data, b.scales * 3 if b.scales.dtype == torch.float32 else b.scales + 1, b.block)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = multiply(a, b, dtype, by="device")
        assert found.dtype == dtype
        wanted = multiply(a, b, torch.float64, by="emulation").to(dtype)
        torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-5)
    assert kernels.fast == [False] * 3


@pytest.mark.parametrize("shape", [(64, 512, 512), (64, 512, 1024), (64, 1024, 512), (64, 384, 256), (64, 512, 128)])
def test_kernels_find_the_scales_of_a_transposed_weight(shape: tuple[int, int, int], kernels: ScaledProducts) -> None:
    """For the input's gradient: its squares lie in memory otherwise than those of the weight."""
    rows, outputs, inner = shape
    grad = blockwise(torch.randn(rows, outputs), E4M3)
    weight = blockwise(torch.randn(outputs, inner), E4M3, rows=128).transposed()
    wanted = multiply(grad, weight, torch.float32, by="emulation")
    for each in (weight, weight.contiguous()):
        torch.testing.assert_close(multiply(grad, each, torch.float32, by="device"), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32), (16, 16, 0)])
def test_products_of_nothing_ask_no_kernel(kind: str, shape: tuple[int, int, int], kernels: ScaledProducts) -> None:
    """An expert that no token has chosen; kernels differ in what they do then."""
    found = multiply(*operands(kind, shape), torch.bfloat16, by="device")
    assert found.shape == shape[:2] and found.dtype == torch.bfloat16 and not found.any() and not kernels.fast


@pytest.mark.parametrize("kind", ["tensorwise", "blockwise", "mxfp8"])
def test_kernels_may_be_fast_where_they_are_told_so(kind: str, kernels: ScaledProducts) -> None:
    """Those with scales of blocks have but one way to add up."""
    a, b = operands(kind, SHAPES[0])
    multiply(a, b, torch.bfloat16, by="device", is_fast=True)
    assert kernels.fast == [kind == "tensorwise"]


def on_fake_gpu(x: Any) -> Any:
    """A tensor of a GPU without values, with the same layout in memory."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return x


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels' own checks run on tensors without values; shapes of what each call gives."""
    if not HAS_SCALED_MM:
        pytest.skip("this torch has no scaled_mm")
    calls: list[Any] = []

    def checked(kernel: Any) -> Any:
        def call(*given: Any, **named: Any) -> Tensor:
            with FakeTensorMode():
                found = kernel(*(on_fake_gpu(each) for each in given), **named)
            calls.append(found.shape)
            return torch.zeros(found.shape, dtype=found.dtype)

        return call

    monkeypatch.setattr(torch, "_scaled_mm", checked(torch._scaled_mm))
    monkeypatch.setattr(fp8_matmul, "_scaled_mm", checked(F.scaled_mm))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_are_those_that_cuda_accepts(kind: str, shape: tuple[int, int, int], fake_kernels: list[Any]) -> None:
    """Of layouts, alignments and shapes of scales."""
    a, b = operands(kind, shape)
    found = multiply(a, b, torch.bfloat16, by="device")
    assert found.shape == shape[:2] and found.dtype == torch.bfloat16 and len(fake_kernels) == 1
    a, b = (each.transposed().transposed() if kind == "tensorwise" else each for each in (b, a))
    if kind not in ("squares", "gradient"):
        assert multiply(a, b, torch.bfloat16, by="device").shape == (shape[1], shape[0])


@pytest.mark.parametrize("shape", [(64, 512, 512), (64, 512, 1024), (64, 1024, 512), (64, 384, 256), (64, 512, 128)])
def test_cuda_accepts_the_product_of_an_input_s_gradient(shape: tuple[int, int, int], fake_kernels: list[Any]) -> None:
    """With squares of a weight transposed, whose scales lie in memory otherwise than those of the weight."""
    rows, outputs, inner = shape
    grad, weight = blockwise(torch.randn(rows, outputs), E4M3), blockwise(torch.randn(outputs, inner), E4M3, rows=128)
    found = multiply(grad, weight.transposed().contiguous(), torch.bfloat16, by="device")
    assert found.shape == (rows, inner) and len(fake_kernels) == 1


def test_the_fake_gpu_refuses_what_cuda_refuses() -> None:
    """Else the test above would show nothing."""
    with FakeTensorMode():
        a, b = (torch.empty(32, 64, dtype=E4M3, device="cuda") for _ in range(2))
        scale = torch.ones((), device="cuda")
        with pytest.raises(RuntimeError, match="col_major"):
            torch._scaled_mm(a, b.view(64, 32), scale, scale, out_dtype=torch.bfloat16)


def test_no_kernel_multiplies_two_gradients() -> None:
    a, _ = operands("gradient", (16, 16, 32))
    with pytest.raises(AssertionError, match="E5M2 by E5M2"):
        multiply(a, a, torch.bfloat16, by="device")


def test_scales_are_swizzled_into_tiles() -> None:
    """Of [m, k/32] the scale of row r and block c lies at 16 (r mod 32) + 4 (r div 32) + c of its tile of 128 x 4."""
    exponents = torch.arange(130 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).view(130, 6)
    found = swizzled(exponents).view(torch.uint8)
    assert found.numel() == 256 * 8
    for row, column in ((0, 0), (1, 0), (33, 2), (127, 3), (5, 5), (129, 4)):
        tile = (row // 128) * 2 + column // 4
        within = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert found[512 * tile + within] == exponents[row, column]


def test_which_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(fp8_matmul, "_scaled_mm", print)  # which torch has from 2.10 on
    assert implementation_on(cpu) == "emulation" and implementation_on(gpu) == "device"
    assert refusal("mxfp8", cpu) is None

    def capability(*found: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)

    capability(8, 0)
    check_sentence(refusal("tensorwise", gpu), "GPU", "8.9", "8.0")
    capability(9, 0)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert refusal("blockwise", gpu) is None
    check_sentence(refusal("mxfp8", gpu), "GPU", "10.0", "12.0", "9.0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    check_sentence(refusal("blockwise", gpu), "CUDA", "12.9", "12.8")
    assert refusal("tensorwise", gpu) is None
    capability(10, 0)
    check_sentence(refusal("blockwise", gpu), "GPU", "9.0", "10.0")
    assert refusal("mxfp8", gpu) is None
    capability(12, 0)
    check_sentence(refusal("mxfp8", gpu) or "", "12.0")
    capability(9, 0)
    monkeypatch.setattr(fp8_matmul, "_scaled_mm", None)
    check_sentence(refusal("blockwise", gpu) or "", "2.10", hide=[r"this is \S+"])
