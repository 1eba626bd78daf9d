"""Two ways in which layers with a state see a sequence that context-parallel ranks divide (see ``slicing``).

Heads for sequences: an all-to-all gives each rank all tokens, in order, of a part of the heads. States are handed on: a
rank computes its runs of tokens from zero states, all ranks learn what each run does to a state, and add what the state
before their runs would have added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.context_parallel.head_exchange import exchange
from megatron.core.context_parallel.slicing import by_rank, in_order, sequence_slices
from megatron.core.parallel.collectives import all_gather, reduce_scatter
from megatron.core.parallel.exchange import RankGroup
from megatron.core.parallel.mesh import Mesh


def to_heads(x: Tensor, channels: Tensor, mesh: Mesh) -> Tensor:
    """All tokens in order of this rank's channels, [S, b, c], from its tokens [s, b, w] with all channels.

    ``channels`` [cp, c]: those of each rank; several ranks may have the same one, whose gradients are summed.
    """
    parts = x.index_select(-1, channels.flatten()).unflatten(-1, channels.shape)  # type: ignore[no-untyped-call]
    return in_order(exchange(parts.permute(2, 0, 1, 3).contiguous(), RankGroup.of(mesh, "cp")))


def to_sequence(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's tokens of all channels, [s, b, cp·c], from all tokens of its channels [S, b, c]: the way back."""
    size = mesh.size("cp")
    return exchange(by_rank(x, size), RankGroup.of(mesh, "cp")).permute(1, 2, 0, 3).flatten(2)


def groups_by_rank(channels: Tensor, width: int, ranks: int) -> Tensor:
    """The ``channels`` [g·width] of g groups that each of ``ranks`` needs for its heads, [ranks, c].

    With fewer groups than ranks, a group goes to all ranks that have heads of it.
    """
    groups = channels.view(-1, width)
    return groups.repeat_interleave(max(1, ranks // len(groups)), dim=0).view(ranks, -1)


def runs_of(x: Tensor) -> Tensor:
    """A rank's tokens [s, b, …] as its two runs of tokens in order, [2·b, s/2, …]: first the early one."""
    return x.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-untyped-call, no-any-return]


def joined(runs: Tensor) -> Tensor:
    """The inverse of ``runs_of``."""
    return runs.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-untyped-call, no-any-return]


def gather_runs(x: Tensor, mesh: Mesh) -> Tensor:
    """What every rank has of its two runs, ``x`` [2·b, …], in the order of the sequence, [2·cp, b, …]; differentiable.

    Gradients are summed over the ranks on the way back.
    """
    return _AllRuns.apply(x.unflatten(0, (2, -1)), mesh)  # type: ignore[no-untyped-call, no-any-return]


class _AllRuns(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return in_order(all_gather(x, mesh, "cp").unflatten(0, (-1, 2)))  # type: ignore[no-untyped-call]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mesh: Mesh = ctx.mesh
        return reduce_scatter(by_rank(grad, mesh.size("cp")).flatten(0, 1), mesh, "cp"), None


def rows_before(x: Tensor, count: int, mesh: Mesh) -> Tensor:
    """The ``count`` tokens before each of this rank's runs ``x`` [2·b, l, c], zeros before the first: [2·b, count, c].

    They may reach over several short runs.
    """
    kept = min(count, x.shape[1])
    tails = gather_runs(x[:, x.shape[1] - kept :], mesh)  # [2·cp, b, kept, c]
    in_front = x.new_zeros(tails.shape[1], count, x.shape[2])
    whole = torch.cat((in_front, tails.transpose(0, 1).flatten(1, 2)), dim=1)
    return torch.cat([whole[:, number * kept : number * kept + count] for number in own_runs(mesh)])


def states_before(decay: Tensor, added: Tensor, mesh: Mesh) -> Tensor:
    """The state before each of this rank's runs, [2·b, h, …], where a run makes ``decay·S + added`` of a state S.

    ``decay`` [2·b, h], ``added`` [2·b, h, …]. One message: ranks send what their runs do, not tokens.
    """
    together = torch.cat((decay.unsqueeze(-1), added.flatten(2)), dim=-1)
    every = gather_runs(together, mesh)  # [2·cp, b, h, 1 + …]
    state, found = torch.zeros_like(every[0, ..., 1:]), dict[int, Tensor]()
    for number, run in enumerate(every):
        found[number] = state
        state = run[..., :1] * state + run[..., 1:]
    return torch.cat([found[number] for number in own_runs(mesh)]).view(added.shape)


def own_runs(mesh: Mesh) -> tuple[int, int]:
    """The numbers of this rank's runs among all 2·cp, early and late."""
    return mesh.rank("cp"), 2 * mesh.size("cp") - 1 - mesh.rank("cp")


def documents_of_runs(document_ids: Tensor, before: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The documents of this rank's runs [2·b, l] and those of the ``before`` tokens before each, [2·b, before].

    ``document_ids`` [b, S]. Before the sequence's first token is its own document.
    """
    longer = torch.cat((document_ids[:, :1].expand(-1, before), document_ids), dim=1)
    slices = sequence_slices(document_ids.shape[1], mesh.rank("cp"), mesh.size("cp"))
    own = torch.cat([document_ids[:, each] for each in slices])
    return own, torch.cat([longer[:, each.start : each.start + before] for each in slices])
