"""A model's tensors come to rank 0 whole from any layout, and long work there keeps no rank from being called alive."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from megatron.core.checkpointing import first_rank, gathering
from megatron.core.checkpointing.first_rank import Help, work_on_first
from megatron.core.checkpointing.gathering import Gathering
from megatron.core.parallel.collectives import broadcast
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from tests.harness import run_ranks
from tests.harness.sentences import check_refusals, expect_error, refusal
from tests.tiers import tiers
from tests.unit.checkpointing.simulated import Layout, logical_values, state_of


def gathered(context: ParallelContext, layout: Layout) -> dict[str, torch.Tensor]:
    """On rank 0 what work there asked for, in an order of its own."""
    values = {name: tensor.where(tensor > -0.5, -0.0) for name, tensor in logical_values(3).items()}
    with mock.patch.object(gathering, "_CHUNK", 200):  # tensors travel in pieces of a few rows
        whole = Gathering(state_of(layout, context.mesh, values), context)

        def work(ask: Help) -> dict[str, torch.Tensor]:
            return {whole.names[number]: ask(number) for number in reversed(range(len(whole.names)))}

        found = work_on_first(work, context, help=whole.gather)
    for number, name in enumerate(whole.names):
        assert (whole.shapes[number], whole.dtypes[number]) == (values[name].shape, values[name].dtype)
    return found


LAYOUTS = (Layout(), Layout(tp=2, pp=2), Layout(tp=4), Layout(tp=1, pp=2, dp=2), Layout(tp=2, cp=2))


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=LAYOUTS[:2]), ids=str)
def test_any_layout_gives_the_same_bytes(layout: Layout) -> None:
    """A box that is lost, doubled by a replica or a tied copy, or a negative zero that turns, would be published."""
    expected = {name: tensor.where(tensor > -0.5, -0.0) for name, tensor in logical_values(3).items()}
    for found in run_ranks(gathered, layout, tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name


def slow(context: ParallelContext) -> tuple[int, int]:
    """The result of work that lasts until the ranks have met four times, and how often they have."""

    def long_work(ask: Help) -> int:
        end = time.monotonic() + 60
        while met.call_count < 4 and time.monotonic() < end:
            time.sleep(0.01)
        return 5

    with (
        mock.patch.object(first_rank, "_BEAT", 0.05),
        mock.patch.object(first_rank, "broadcast", wraps=broadcast) as met,
    ):
        result = work_on_first(long_work, context)
    return result, met.call_count


def failing(context: ParallelContext) -> None:
    def work(ask: Help) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    work_on_first(work, context)


def test_work_of_one_rank() -> None:
    """Its result and its failure are those of all ranks. One meeting for all of it would be a stall after minutes."""
    for result, meetings in run_ranks(slow, dp=2):
        assert result == 5
        assert meetings > 3
    check_refusals(run_ranks(refusal, failing, dp=2), "CheckpointError", "somewhere", "No space left on device")
    with expect_error(CheckpointError, "somewhere", "No space left on device", exit_code=1):
        failing(ParallelContext.single())
