"""Choices of experts in a rehearsal, where no number is known: every expert is chosen equally often, none dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from megatron.core.moe import dispatch
from megatron.core.moe.routing import times_chosen
from megatron.core.ops.grouped_matmul import Groups
from megatron.core.parallel.mesh import Mesh
from megatron.rehearsal.accelerator import Waits


@contextmanager
def balanced(mesh: Mesh, waits: Waits) -> Iterator[None]:
    """In the block each of the ranks that divide the experts gets its share of a call's choices."""
    ranks, choices = mesh.size("ep"), 0

    def counted(ids: Tensor, size: int) -> Tensor:
        nonlocal choices
        choices = ids.numel()
        return times_chosen(ids, size)

    def shares(counts: Tensor) -> list[int]:
        waits.note()
        least, rest = divmod(choices, ranks)
        return [least + (number < rest) for number in range(len(counts))]

    def parts(groups: Groups, rows: Tensor) -> tuple[Tensor, ...]:
        waits.note()
        return torch.tensor_split(rows, len(groups.counts))

    with (
        mock.patch.object(dispatch, "times_chosen", counted),
        mock.patch.object(dispatch, "rows_on_host", shares),
        mock.patch.object(Groups, "parts", parts),
    ):
        yield
