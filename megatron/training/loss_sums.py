"""Losses of a global batch as sums and counts over ranks, and what makes each of several a mean of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.parallel.collectives import all_reduce, on_host
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.pipeline_parallel.chunk import LossSum
from megatron.errors import ConfigError


@dataclass(frozen=True)
class GlobalLoss:
    """The loss of a global batch, the same on every rank.

    ``totals``: sum and count of each named loss. ``count``: what gradients are divided by. ``layer_metrics``: sums of
    what layers report, by name.
    """

    totals: dict[str, tuple[float, float]]
    count: float
    layer_metrics: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, sums: Sequence[float], names: Sequence[str], *, layer_metrics: Mapping[str, list[float]] | None = None
    ) -> GlobalLoss:
        """The losses from the numbers of ``loss_sums``, row by row."""
        (_, count), *named = zip(sums[::2], sums[1::2])
        return cls(dict(zip(names, named)), max(count, 1.0), dict(layer_metrics or {}))

    @property
    def means(self) -> dict[str, float]:
        """Each loss's sum over its count; 0 where the count is 0, never NaN."""
        return {name: total / max(count, 1.0) for name, (total, count) in self.totals.items()}


def global_loss(loss: LossSum | None, names: Sequence[str], context: ParallelContext) -> GlobalLoss:
    """Sum a loss over all ranks, for all ranks, and wait for it. A collective. Arguments as of ``loss_sums``."""
    sums = loss_sums(loss, names, context, axes=("dc", "pp", "dp", "cp"))
    with waiting_for_device(context):
        return GlobalLoss.of(on_host(sums)[0], names)


def waiting_for_device(context: ParallelContext) -> AbstractContextManager[None]:
    """A context for code in which a GPU's host waits for everything queued so far, collectives included."""
    return context.mesh.activity.waiting("the device's work", range(context.mesh.world_size))


def loss_sums(
    loss: LossSum | None,
    names: Sequence[str],
    context: ParallelContext,
    *,
    axes: tuple[Axis, ...] = ("pp", "dp", "cp"),
) -> Tensor:
    """Sums and counts over the ranks of ``axes``, by default of a worker, ``[1 + losses, 2]``, on the device of each:
    those of the whole loss, and of each named one. A collective, which does not wait.

    ``loss``: on ranks without the last stage the losses that layers reported, or None. ``names``: of all losses.
    Raises ConfigError for a loss with another name.
    """
    unknown = sorted(set(loss.parts) - set(names)) if loss is not None else []
    if unknown:
        raise ConfigError(
            f"the model reports {', '.join(unknown)}, which loss_names() of its train spec doesn't list: "
            "add it there, and its count to counts()"
        )
    dtype = torch.promote_types(context.dtype, torch.float32)
    pairs = torch.zeros(1 + len(names), 2, dtype=dtype, device=context.device)
    if loss is not None:
        pairs[0] = torch.stack((loss.sum, loss.count.to(loss.sum.dtype)))
        for row, name in zip(pairs[1:], names):
            if name in loss.parts:
                row.copy_(loss.parts[name])
    return all_reduce(pairs, context.mesh, *axes)


def global_layer_metrics(
    loss: LossSum | None, widths: Mapping[str, int], context: ParallelContext
) -> dict[str, Tensor]:
    """Sums of what layers reported in the global batch, by name, on every rank: fp64, in which whole numbers are exact
    up to 2^53. A collective where there are any.

    ``widths``: how many numbers each has, those of other stages included.
    """
    if not widths:
        return {}
    here = {} if loss is None else loss.layer_metrics
    device = context.device
    flat = [here.get(name, torch.zeros(width, device=device)).double() for name, width in widths.items()]
    totals = all_reduce(torch.cat(flat), context.mesh, "pp", "dp", "cp", "tp")
    return dict(zip(widths, torch.split(totals, [*widths.values()])))


def total_counts(
    counts: Sequence[Mapping[str, Tensor]], names: Sequence[str], context: ParallelContext
) -> dict[str, Tensor]:
    """The count of each named loss in a global batch, at least 1, known before its first forward pass. A collective.

    ``counts``: of this rank's microbatches.
    """
    dtype = torch.promote_types(context.dtype, torch.float32)
    here = torch.zeros(len(names), dtype=dtype, device=context.device)
    for each in counts:
        if each:
            here += torch.stack([each[name].to(dtype) for name in names])
    totals = all_reduce(here, context.mesh, "pp", "dp", "cp").clamp(min=1.0)
    return dict(zip(names, totals))


def loss_weights(totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors that make each of several losses a mean over its own count when all are divided by the first's count."""
    first, *_ = totals.values()
    return {name: first / total for name, total in totals.items()}
