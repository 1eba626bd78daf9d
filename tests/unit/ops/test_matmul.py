"""Matrix products: every library gives the same, and the choice of library is one of speed alone."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megatron.core.ops import matmul
from megatron.core.ops.matmul import add_transposed_times, multiplied, times_transposed, transposed_times

BIG = (96, 128, 160)  # enough work for oneDNN
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}


@pytest.fixture(autouse=True, params=["oneDNN", "torch", "bf16 by fp32"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way, whatever the processor."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(matmul, "_has_onednn", lambda: bool(built and request.param == "oneDNN"))
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: request.param == "bf16 by fp32")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Random operands, small enough that sums of products are about 1."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).mul_(0.3).requires_grad_() for shape in shapes]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.0, atol=TOLERANCE[dtype])


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return x.t().contiguous().t()
    return torch.cat((x, x), dim=1)[:, : x.shape[1]] if layout == "sliced" else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_times_transposed_of_any_layout(dtype: torch.dtype, layout: str) -> None:
    """Operands come as transposed views and as slices of fused tensors."""
    m, k, n = BIG
    a, b = (laid_out(x.detach(), layout) for x in tensors((m, k), (n, k), dtype=dtype))
    assert_near(times_transposed(a, b), a.double() @ b.double().t(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("sizes", [(96, 160), (160, 96)])
def test_transposed_times_adds_up(
    dtype: torch.dtype, layout: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight gradients add up over chunks, in place, whichever operand is the larger, block by block."""
    monkeypatch.setattr(matmul, "_BLOCK_ELEMENTS", 1000)
    m, n = sizes
    a, b = (laid_out(x.detach(), layout) for x in tensors((128, m), (128, n), dtype=dtype))
    product = a.double().t() @ b.double()
    total = transposed_times(a, b)
    assert_near(total, product, dtype)
    storage = total.data_ptr()
    again = transposed_times(a, b, add_to=total)
    assert_near(again, 2 * product, dtype)
    assert again.data_ptr() == storage and again.shape == (m, n)


def test_fp64_and_small_products_stay_with_torch() -> None:
    """oneDNN has no fp64, and tiny products would pay more for the call than for the work."""
    big, small = torch.randn(128, 128), torch.randn(4, 4)
    assert not matmul._onednn_serves(big.double(), big.double())
    assert not matmul._onednn_serves(small, small)
    assert matmul._onednn_serves(big, big) == matmul._has_onednn()


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_product_is_added_to_a_sum_of_a_wider_type(wide: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum keeps what a sum of bf16 numbers would round away; block by block."""
    monkeypatch.setattr(matmul, "_BLOCK_ELEMENTS", 1000)
    a, b = (x.detach() for x in tensors((128, 200), (128, 96), dtype=torch.bfloat16))
    total = torch.full((200, 96), 1000.0, dtype=wide)
    add_transposed_times(total, a, b)
    add_transposed_times(total, a, b)
    assert_near(total - 1000.0, 2 * (a.double().t() @ b.double()), torch.bfloat16)


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the types of what products multiply."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    @override
    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.seen |= {each.dtype for each in args if isinstance(each, Tensor)}
        return function(*args, **(kwargs or {}))


def test_bf16_products_are_computed_in_fp32_where_that_is_faster() -> None:
    """Forward, of inputs and of weights; rounded once, to the nearest bf16. Other types stay as they are."""
    a, b = (x.detach() for x in tensors((128, 512), (96, 512), dtype=torch.bfloat16))
    wanted = torch.float32 if matmul._is_slow_in_bf16() else torch.bfloat16
    with _Types() as types:
        found = times_transposed(a, b)
        transposed_times(a.t(), b.t(), add_to=transposed_times(a.t(), b.t()))
        multiplied(F.linear, a, b, None)
    assert types.seen == {wanted}
    if wanted == torch.float32:
        assert torch.equal(found, (a.float() @ b.float().t()).bfloat16())
    with _Types() as types:
        times_transposed(a.double(), b.double())
    assert types.seen == {torch.float64}


@pytest.mark.parametrize("lacks_bf16", [False, True])
def test_few_rows_are_not_worth_a_copy_of_the_weight(monkeypatch: pytest.MonkeyPatch, lacks_bf16: bool) -> None:
    """Copies cost more than what a product of a few rows saves. Fewer rows are few where bf16 has no instructions."""
    monkeypatch.setattr(matmul, "lacks_bf16", lambda: lacks_bf16)
    few, more = (3, 4) if lacks_bf16 else (63, 64)
    for rows, wanted in ((few, torch.bfloat16), (more, torch.float32 if matmul._is_slow_in_bf16() else torch.bfloat16)):
        a, b = (x.detach() for x in tensors((rows, 512), (96, 512), dtype=torch.bfloat16))
        with _Types() as types:
            times_transposed(a, b)
        assert types.seen == {wanted}


@pytest.mark.parametrize(
    ("machine", "has_bf16", "intel", "slow"),
    [
        ("x86_64", False, False, True),
        ("AMD64", False, True, True),
        ("x86_64", True, False, False),
        ("x86_64", True, True, True),
        ("aarch64", False, False, False),
    ],
)
def test_which_processors_are_slow_in_bf16(
    monkeypatch: pytest.MonkeyPatch, machine: str, has_bf16: bool, intel: bool, slow: bool
) -> None:
    """A laptop without bf16 instructions took 200 seconds for a step in bf16, and 5 in fp32."""
    monkeypatch.undo()  # the fixture's choice
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(matmul, "is_intel", lambda: intel)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(matmul, "lacks_bf16", matmul.lacks_bf16.__wrapped__)
    assert matmul._is_slow_in_bf16.__wrapped__() == slow


def test_an_fp32_sum_gets_products_of_bf16_numbers_that_were_never_rounded() -> None:
    """Where they are computed in fp32 anyway."""
    if not matmul._is_slow_in_bf16():
        pytest.skip("other products are rounded to bf16 before they are added")
    a, b = (x.detach() for x in tensors((128, 200), (128, 96), dtype=torch.bfloat16))
    total = torch.zeros(200, 96)
    add_transposed_times(total, a, b)
    assert_near(total, a.double().t() @ b.double(), torch.float32)
