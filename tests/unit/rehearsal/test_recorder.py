"""What NCCL refuses of a single rank's operations, and gloo takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.rehearsal import recorder
from megatron.rehearsal.recorder import Communicator, Operation, refusals
from tests.harness.sentences import check_sentence

RANKS = Communicator("four", (2, 3, 6, 7))


def refused(name: str, *tensors: Tensor, reduction: str | None = None) -> list[str]:
    """Of an operation of rank 6, the third of its group."""
    given = tensors[-1]
    asked = Operation(name, RANKS, given.dtype, given.numel(), "file.py:1", 0, 0, reduction=reduction)
    return [each.partition(" at file.py:1: ")[2] for each in refusals(asked, tensors, rank=6)]


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of main memory count as the device's."""
    monkeypatch.setattr(recorder, "DEVICE_TYPE", "cpu")


def test_tensors_lie_on_the_device_in_one_piece() -> None:
    """gloo copies what lies elsewhere, or apart."""
    assert refused("all-reduce", torch.zeros(4, 6), reduction="SUM") == []
    assert refused("all-reduce", torch.zeros(4, 6).t(), reduction="SUM") == [
        "its tensor of shape (6, 4) is not contiguous"
    ]
    assert refused("broadcast", torch.zeros(4, device="meta")) == ["its tensor is on the meta"]


@pytest.mark.parametrize(
    ("dtype", "reduction", "said"),
    [
        (torch.bfloat16, "AVG", None),
        (torch.bool, None, None),
        (torch.float8_e5m2, None, None),
        (torch.int16, None, "NCCL does not have this type"),
        (torch.int16, "SUM", "NCCL does not have this type"),
        (torch.bool, "SUM", "NCCL does not reduce this type"),
        (torch.float8_e4m3fn, "MAX", "NCCL does not reduce this type"),
        (torch.int32, "BOR", "NCCL does not have this reduction"),
    ],
)
def test_types_and_reductions_are_those_of_nccl(dtype: torch.dtype, reduction: str | None, said: str | None) -> None:
    """gloo sums 16-bit integers, and combines bits."""
    assert refused("all-reduce", torch.zeros(4, dtype=dtype), reduction=reduction) == ([said] if said else [])


OVERLAPS = "its result overlaps what it is given, other than as this rank's part"
PLACES: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, Tensor]], str | None]] = {
    "apart": ("all-gather", lambda x: (x, torch.zeros(4)), None),
    "own part, gathered": ("all-gather", lambda x: (x, x[8:12]), None),
    "another's part, gathered": ("all-gather", lambda x: (x, x[:4]), OVERLAPS),
    "between parts, gathered": ("all-gather", lambda x: (x, x[9:13]), OVERLAPS),
    "own part, scattered": ("reduce-scatter", lambda x: (x[8:12], x), None),
    "another's part, scattered": ("reduce-scatter", lambda x: (x[12:], x), OVERLAPS),
    "the same, exchanged": ("all-to-all", lambda x: (x, x), OVERLAPS),
    "halves, exchanged": ("all-to-all", lambda x: (x[:8], x[8:]), None),
}


@pytest.mark.parametrize("place", PLACES)
def test_results_overlap_with_what_is_given_as_nccl_allows(place: str) -> None:
    """Ranks would read what others have already written."""
    name, tensors, said = PLACES[place]
    assert refused(name, *tensors(torch.zeros(16))) == ([said] if said else [])


def test_what_is_under_way_is_neither_changed_nor_read() -> None:
    """Another rank would get numbers of the next step, or this one read what has not arrived; gloo hides it."""
    sent, arriving, other = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    asked = Operation("all-reduce", RANKS, torch.float32, 8, "file.py:1", 0, 0)
    parts = [recorder._Bytes.of(each) for each in (sent, arriving)]
    under_way = recorder._InFlight(asked, (parts[0],), (parts[1],), (sent, arriving))
    seen = recorder.Recorder(6, _in_flight={part.storage: [under_way] for part in parts})
    for function, arguments in (
        (torch.ops.aten.sum.default, [sent]),
        (torch.ops.aten.add_.Tensor, [other, sent]),
        (torch.ops.aten.view.default, [arriving, [8]]),
    ):
        seen.see(function, arguments, {}, None)
    assert seen.refused == []
    seen.see(torch.ops.aten.add_.Tensor, [sent, other], {}, None)
    seen.see(torch.ops.aten.sum.default, [arriving], {}, None)
    changed, read = seen.refused
    assert "add_ at " in changed and changed.endswith("changes what it uses before it is waited for")
    assert read.endswith("reads its result before it is waited for")
    check_sentence(read)
