"""Routing in a rehearsal, where tensors have no values: experts get equally many tokens, and none is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from megatron.core.moe import dispatch, sinkhorn
from megatron.core.moe.routing import times_chosen
from megatron.core.ops.grouped_matmul import Groups
from megatron.core.parallel.mesh import Mesh
from megatron.rehearsal.accelerator import Waits


@contextmanager
def balanced(mesh: Mesh, waits: Waits) -> Iterator[None]:
    """In the block, each expert gets its share of a call's choices."""
    choices = experts = 0

    def counted(ids: Tensor, size: int) -> Tensor:
        nonlocal choices, experts
        choices, experts = ids.numel(), size - 1  # the last number is that of dropped choices
        return times_chosen(ids, size)

    def shares(counts: Tensor) -> list[int]:
        waits.note()
        ranks, rank = mesh.size("ep"), mesh.rank("ep")
        is_local = len(counts) == experts  # of a rank that has all tokens, or all experts
        everywhere = experts * ranks if is_local else experts
        (least, rest), held = divmod(choices, everywhere), everywhere // ranks
        # Of what is left each rank gets one before any gets two.
        of_all = [least + (number % held * ranks + number // held < rest) for number in range(everywhere)]
        here = of_all[held * rank : held * (rank + 1)]
        return here if is_local else of_all + here * ((len(counts) - experts) // held)

    def one_round(_: Tensor) -> bool:
        waits.note()
        return True

    def parts(groups: Groups, rows: Tensor) -> tuple[Tensor, ...]:
        if groups.known is None and "sizes" not in vars(groups):
            waits.note()
            vars(groups)["sizes"] = []  # which is read once
        return torch.tensor_split(rows, len(groups.counts))

    with (
        mock.patch.object(dispatch, "times_chosen", counted),
        mock.patch.object(dispatch, "rows_on_host", shares),
        mock.patch.object(sinkhorn, "is_small", one_round),
        mock.patch.object(Groups, "parts", parts),
    ):
        yield
