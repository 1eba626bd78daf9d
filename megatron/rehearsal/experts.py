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
def balanced(mesh: Mesh, waits: Waits, *, num_experts: int) -> Iterator[None]:
    """In the block each expert gets its share of a call's choices."""
    held, choices = num_experts // mesh.size("ep"), 0

    def counted(ids: Tensor, size: int) -> Tensor:
        nonlocal choices
        choices = ids.numel()
        return times_chosen(ids, size)

    def shares(counts: Tensor) -> list[int]:
        waits.note()
        least, rest = divmod(choices, num_experts)
        all_of_them, first = [least + (number < rest) for number in range(num_experts)], held * mesh.rank("ep")
        here = all_of_them[first : first + held]
        if len(counts) == held:
            return here
        return all_of_them + here * ((len(counts) - num_experts) // held)

    def parts(groups: Groups, rows: Tensor) -> tuple[Tensor, ...]:
        if groups.known is None:
            waits.note()
        return torch.tensor_split(rows, len(groups.counts))

    with (
        mock.patch.object(dispatch, "times_chosen", counted),
        mock.patch.object(dispatch, "rows_on_host", shares),
        mock.patch.object(Groups, "parts", parts),
    ):
        yield
