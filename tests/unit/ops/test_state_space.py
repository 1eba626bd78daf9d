"""The scan of state-space layers: recurrence, quadratic form and chunks agree, in values and in every gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megatron.core.ops import state_space
from megatron.core.ops.state_space import ScanInputs, chunked
from megatron.rehearsal.recorder import Memory
from tests.tiers import tiers


@dataclass(frozen=True)
class Case:
    """Sizes of a scan; ``documents``: how many, of random lengths, are in each sequence."""

    length: int
    chunk: int
    groups: int
    heads: int
    documents: int = 1

    @override
    def __str__(self) -> str:
        """The test's id."""
        return f"l{self.length}-q{self.chunk}-g{self.groups}-h{self.heads}-docs{self.documents}"


WIDTH, STATE, BATCH = 3, 5, 2
# Lengths around the borders of chunks, one token, chunks of one token, groups of one and of several heads.
FIRST = [
    Case(1, 4, 1, 2),
    Case(15, 16, 2, 4, 3),
    Case(16, 16, 1, 3, 2),
    Case(17, 16, 4, 4),
    Case(33, 8, 2, 6, 4),
    Case(7, 1, 1, 2, 2),
    Case(50, 13, 3, 3, 12),
]
CASES = FIRST + [
    Case(length, chunk, groups, 4, documents)
    for length in (2, 31, 32, 33, 70)
    for chunk in (4, 16, 64)
    for groups in (1, 2, 4)
    for documents in (1, 5)
]


def inputs(case: Case, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, a, B, C and an initial state."""
    generator = torch.Generator().manual_seed(case.length + case.chunk)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, grouped = draw(BATCH, case.length, case.heads, WIDTH), (BATCH, case.length, case.groups, STATE)
    dt, a = draw(BATCH, case.length, case.heads).abs(), -draw(case.heads).exp()
    drawn = [x, dt, a, draw(*grouped), draw(*grouped), draw(BATCH, case.heads, WIDTH, STATE)]
    return [each.to(dtype).requires_grad_() for each in drawn]


def documents(case: Case) -> Tensor | None:
    """Numbers of documents, which come back after another one."""
    if case.documents == 1:
        return None
    generator = torch.Generator().manual_seed(case.length)
    begins = torch.zeros(BATCH, case.length, dtype=torch.int64)
    for row in begins:
        row[torch.randperm(case.length, generator=generator)[: case.documents - 1]] = 1
    return begins.cumsum(1) % 2


def quadratic(
    ids: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole matrix of decays, made entry by entry of products: no sums of logarithms, no recurrence."""
    heads, length = x.shape[2], x.shape[1]
    B, C = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (B, C))
    left = torch.exp(dt * a)
    if ids is not None:
        left = torch.cat((left[:, :1], left[:, 1:] * (ids[:, 1:] == ids[:, :-1]).unsqueeze(-1)), dim=1)
    rows = []
    for i in range(length):
        kept = [torch.prod(left[:, j + 1 : i + 1], dim=1) for j in range(i + 1)]
        rows.append(torch.stack([*kept, *[torch.zeros_like(kept[0])] * (length - i - 1)], dim=1))
    decays = torch.stack(rows, dim=1)  # [b, i, j, h]
    scores = torch.einsum("bihn,bjhn->bijh", C, B) * decays
    given = dt.unsqueeze(-1) * x
    entering = torch.stack([torch.prod(left[:, : i + 1], dim=1) for i in range(length)], dim=1)
    y = torch.einsum("bijh,bjhp->bihp", scores, given)
    y = y + torch.einsum("bih,bihn,bhpn->bihp", entering, C, initial)
    last = torch.einsum("bjh,bjhp,bjhn->bhpn", decays[:, -1], given, B)
    return y, last + entering[:, -1, :, None, None] * initial


def with_gradients(
    function: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], *, uses: str = "both"
) -> list[Tensor]:
    """y, the last state, and the gradients of all inputs of a sum over one of them or both."""
    y, state = function(*given)
    weighted = torch.zeros((), dtype=y.dtype)
    for name, out in (("y", y), ("state", state)):
        if uses in (name, "both"):
            weighted = weighted + (out * torch.linspace(-1, 2, out.numel(), dtype=y.dtype).view_as(out)).sum()
    return [y, state, *torch.autograd.grad(weighted, given, allow_unused=True, materialize_grads=True)]


def assert_close(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    """Relative to the largest number of each."""
    names = ("y", "state", "x", "dt", "a", "B", "C", "initial")
    for name, one, other in zip(names, found, wanted, strict=True):
        largest = other.detach().abs().max().clamp(min=1e-3)
        assert (one.detach() - other.detach()).abs().max() <= bound * largest, name


def scan_of(case: Case, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The scan of a case, as a function of its inputs."""

    def run(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        given = ScanInputs(x, dt, a, B, C, documents(case))
        return state_space.scan(given, initial, chunk_size=case.chunk, backend=backend)

    return run


@pytest.mark.parametrize("case", tiers(CASES, first=FIRST), ids=str)
def test_three_forms_agree(case: Case) -> None:
    """A model trained with one of them would differ from what generation, by the recurrence, makes of it."""
    given = inputs(case)
    wanted = with_gradients(functools.partial(quadratic, documents(case)), given)
    for backend in ("recurrent", "chunked"):
        assert_close(with_gradients(scan_of(case, backend), given), wanted, 1e-12)


@pytest.mark.parametrize("uses", ["y", "state"])
def test_gradient_of_one_result(uses: str) -> None:
    """A loss that leaves the last state alone, as in training, or y, has the gradients of the recurrence."""
    case = Case(33, 8, 2, 6, 4)
    wanted = with_gradients(scan_of(case, "recurrent"), inputs(case), uses=uses)
    assert_close(with_gradients(scan_of(case, "chunked"), inputs(case), uses=uses), wanted, 1e-12)


def test_blocks_of_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are computed a few chunks at a time: states and gradients cross the borders."""
    case = Case(70, 4, 2, 4, 3)
    whole = with_gradients(scan_of(case, "chunked"), inputs(case))
    monkeypatch.setitem(chunked._SCORES, "cpu", 3 * BATCH * case.heads * case.chunk**2)
    assert_close(with_gradients(scan_of(case, "chunked"), inputs(case)), whole, 1e-13)


def test_packed_is_separate() -> None:
    """Documents of a packed sequence see nothing of each other, and no gradient leaks between them."""
    case, lengths = Case(40, 8, 2, 4), (3, 8, 17, 12)
    x, dt, a, B, C, _ = inputs(case)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(BATCH, -1)
    y, state = state_space.scan(ScanInputs(x, dt, a, B, C, ids), chunk_size=8)
    upstream = torch.randn(y.shape, dtype=y.dtype)
    packed = torch.autograd.grad(y, (x, dt, a, B, C), upstream)
    pieces, grad_a = [], torch.zeros_like(a)
    for each in zip(*(torch.split(part, [*lengths], dim=1) for part in (x, dt, B, C, upstream)), strict=True):
        x_, dt_, B_, C_ = (part.detach().requires_grad_() for part in each[:4])
        alone, last = state_space.scan(ScanInputs(x_, dt_, a, B_, C_), chunk_size=8)
        *others, from_a = torch.autograd.grad(alone, (x_, dt_, B_, C_, a), each[4])
        pieces.append((alone, *others))
        grad_a += from_a
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    y_, x_, dt_, B_, C_ = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    for found, wanted in zip((y, *packed), (y_, x_, dt_, grad_a, B_, C_), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_steps_continue_a_scan() -> None:
    """Generation: a prompt by the scan, then a batch of tokens at a time, equals the scan of the whole text."""
    case = Case(20, 8, 2, 4)
    x, dt, a, B, C, initial = (each.detach() for each in inputs(case))
    text, prompt = ScanInputs(x, dt, a, B, C), ScanInputs(x[:, :13], dt[:, :13], a, B[:, :13], C[:, :13])
    whole, last = state_space.scan(text, initial, chunk_size=8)
    y, state = state_space.scan(prompt, initial, chunk_size=8)
    rows = [y]
    for t in range(13, 20):
        y, state = state_space.step(text.token(t), state)
        rows.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_slices_hand_states_on(packed: bool) -> None:
    """Slices scanned from zero, and what enters them added afterwards, are the scan of the whole, with its gradients;
    a document that begins with a slice sees nothing of the one before.
    """
    case, borders = Case(30, 4, 2, 4), (0, 9, 18, 30)
    given = inputs(case)
    ids = (torch.arange(30) >= 18).long().expand(BATCH, -1).clone() if packed else None
    if ids is not None:
        ids[0, 21:] = 2  # and one in the middle of a slice

    def sliced(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for start, stop in itertools.pairwise(borders):
            part = slice(start, stop)
            own = None if ids is None else ids[:, part]
            piece = ScanInputs(x[:, part], dt[:, part], a, B[:, part], C[:, part], own)
            y, added = state_space.scan(piece, chunk_size=4)
            before = None if ids is None or not start else ids[:, start - 1]
            rows.append(y + state_space.output_of_initial_state(piece, state, previous=before))
            decay = state_space.total_decay(piece, previous=before)
            state = decay[..., None, None] * state + added
        return torch.cat(rows, dim=1), state

    def whole(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state_space.scan(ScanInputs(x, dt, a, B, C, ids), state, backend="recurrent")

    assert_close(with_gradients(sliced, given), with_gradients(whole, given), 1e-12)


def test_strong_decays_stay_finite() -> None:
    """Steps of up to 20 with a = -16: above the diagonal an exponential would be infinite, and its gradient NaN.

    Sums of 16,000 have four digits after them in fp32; and the diagonal, a decay of 1, leaves no rounding behind.
    """
    case = Case(64, 64, 1, 2)
    x, dt, a, B, C, initial = inputs(case, dtype=torch.float32)
    with torch.no_grad():
        dt.mul_(20.0)
        a.fill_(-16.0)
    given = [x, dt, a, B, C, initial]
    wanted = with_gradients(scan_of(case, "recurrent"), [each.detach().double().requires_grad_() for each in given])
    found = with_gradients(scan_of(case, "chunked"), given)
    assert_close([each.double() for each in found], wanted, 1e-3)


@pytest.mark.parametrize(("chunk", "bound"), [(16, 1e-6), (64, 2e-6), (256, 6e-6)])
def test_fp32_error(chunk: int, bound: float) -> None:
    """Sums inside a chunk round more as it grows; a default of 64 is right to six digits."""
    case = Case(300, chunk, 1, 2)
    wide, narrow = inputs(case), inputs(case, dtype=torch.float32)
    y, _ = scan_of(case, "chunked")(*narrow)
    wanted, _ = scan_of(case, "chunked")(*wide)
    assert (y.double() - wanted).norm() <= bound * wanted.norm()


def test_bf16_keeps_sums_and_states_in_fp32() -> None:
    """A sum of steps in bf16 has two digits: after 256 tokens nothing of the decays would be right."""
    case = Case(256, 64, 2, 4)
    x, dt, a, B, C, initial = inputs(case)
    with torch.no_grad():
        dt.mul_(0.1)
    wide = [
        each.detach().bfloat16() if each is not dt and each is not a else each.detach() for each in (x, dt, a, B, C)
    ]
    exact = [each.double().requires_grad_() for each in (*wide, initial)]
    narrow = [
        each.detach().to(torch.float32 if place in (1, 2, 5) else torch.bfloat16).requires_grad_()
        for place, each in enumerate(exact)
    ]
    y, state, *found = with_gradients(
        lambda *each: tuple(out.float() for out in scan_of(case, "chunked")(*each)), narrow
    )
    wanted = with_gradients(scan_of(case, "recurrent"), exact)
    for one, other in zip((y, state, *found), wanted, strict=True):
        assert (one.double() - other).norm() <= 0.015 * other.norm()
    assert [each.dtype for each in found] == [each.dtype for each in narrow]


def test_scan_of_transformers() -> None:
    """Loaded Mamba-2 models answer, and learn, as in transformers, whose scan in plain torch is in fp32."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    case = Case(45, 16, 2, 4)
    given = inputs(case, dtype=torch.float32)

    def theirs(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = mamba2_chunk_scan(
            x, dt, a, B, C, chunk_size=16, initial_states=initial, return_final_states=True
        )
        return found

    assert_close(with_gradients(scan_of(case, "chunked"), given), with_gradients(theirs, given), 1e-5)


def test_keeps_its_inputs_and_states_alone() -> None:
    """Memory of long sequences: no scores, and nothing else of every token, may be left for the backward pass."""
    case, kept = Case(70, 16, 2, 4), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = inputs(case, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = scan_of(case, "chunked")(*given)
    states = BATCH * 5 * case.heads * WIDTH * STATE * 4  # before each of five chunks
    assert sum(kept.values()) == sum(each.numel() * 4 for each in given[:5]) + states
    del out


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the tensors that live while it is on, besides ``given``."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = Memory(device_type="cpu")
        self._memory.see(None, (), {}, given)
        self._before = self._memory.held

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._memory.see(func, args, kwargs or {}, result)
        return result

    @property
    def most(self) -> int:
        """The most bytes at a time."""
        return self._memory.highest - self._before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "length", "groups"), [(2, 512, 2), (1, 1000, 1)])
def test_working_memory_of_the_backward_pass(batch: int, length: int, groups: int, dtype: torch.dtype) -> None:
    """Scores of a block and what is made of them were missing in the estimate: 3.3 % of a small hybrid's peak."""
    heads, width, states, chunk = 4, 64, 64, 64
    wide = torch.float32
    shapes = {
        "x": ((batch, length, heads, width), dtype),
        "dt": ((batch, length, heads), wide),
        "a": ((heads,), wide),
        "B": ((batch, length, groups, states), dtype),
        "C": ((batch, length, groups, states), dtype),
    }
    given = [torch.ones(shape, dtype=kind, requires_grad=True) for shape, kind in shapes.values()]
    y, _ = chunked.scan(ScanInputs(*given), None, chunk_size=chunk)
    upstream = torch.ones_like(y)
    counting = _Counting([*given, upstream, *(each for each in y.grad_fn.saved_tensors if each is not None)])  # type: ignore[union-attr]
    with counting:
        found = torch.autograd.grad(y, given, upstream)
    estimated = chunked.working_bytes(
        y.device, (batch, length, heads, width), groups=groups, states=states, chunk_size=chunk, itemsize=dtype.itemsize
    )
    assert counting.most - sum(each.nbytes for each in found) == pytest.approx(estimated, rel=0.05)
