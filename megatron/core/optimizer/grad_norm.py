"""Norms and counts over a model that many ranks hold in parts: each logical element once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.buffers import FlatBuffer, Span
from megatron.core.parallel.collectives import all_reduce, gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh

# Squares are added in fp32 within a chunk and in fp64 between chunks: on CPU, whose sums are not trees, a million
# elements in fp32 would be off by 1e-5, these by 2e-7.
_CPU_CHUNK = 1 << 16
_CHUNK = 1 << 24


@dataclass(frozen=True)
class GradientStatistics:
    """Of the whole model: L2 norm of the gradients, and, when asked for, how many of their elements are zero."""

    norm: float
    num_zeros: int | None = None


class ModelStatistics:
    """Norms and counts of the model, the same on every rank.

    Each rank looks only at its own shards, even where it holds more: replicated and sharded optimizers then add the
    same numbers in the same order and get the same norm to the last bit, and ranks share the work.

    ``frozen``: the parts of frozen parameters that this rank counts (``frozen_parts``).
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], context: ParallelContext, *, frozen: Sequence[Tensor] = ()
    ) -> None:
        self._context, self._frozen = context, frozen
        shards = [(buffer, context.mesh.rank(*buffer.reduce)) for buffer in buffers]
        self._counted = [(buffer, _counted_spans(buffer, shard)) for buffer, shard in shards]
        self._replicas = [(buffer, _replica_spans(buffer, shard)) for buffer, shard in shards]

    def gradients(self, *, count_zeros: bool = False) -> GradientStatistics:
        """Statistics of the gradient buffers. The norm is infinite or NaN exactly when some rank's gradient is."""
        parts = [[span.of(buffer.grads) for span in spans] for buffer, spans in self._counted]
        replicas = [[span.of(buffer.grads) for span in spans] for buffer, spans in self._replicas]
        # Replicas add nothing, unless one isn't finite: 0 · inf is NaN, and every rank will know.
        sums = [self._sum_of_squares(parts) + 0.0 * self._sum_of_squares(replicas)]
        if count_zeros:
            sums.append(self._sum(part.numel() - torch.count_nonzero(part) for each in parts for part in each))
        squares, *zeros = self._over_all_ranks(sums)
        return GradientStatistics(math.sqrt(squares), int(zeros[0]) if zeros else None)

    def parameter_norm(self) -> float:
        """L2 norm of the weights that the forward pass uses, the frozen ones included."""
        parts = [[span.of(buffer.params) for span in spans] for buffer, spans in self._counted]
        parts += [[part] for part in self._frozen]
        (squares,) = self._over_all_ranks([self._sum_of_squares(parts)])
        return math.sqrt(squares)

    def _sum_of_squares(self, parts: list[list[Tensor]]) -> Tensor:
        """fp64 scalar; ``parts`` lists tensors of one dtype each."""
        return self._sum(_norms(each).double().square().sum() for each in parts if each)

    def _sum(self, terms: Iterable[Tensor]) -> Tensor:
        return sum(terms, torch.zeros((), dtype=torch.float64, device=self._context.device))

    def _over_all_ranks(self, sums: list[Tensor]) -> list[float]:
        totals: list[float] = all_reduce(torch.stack(sums), self._context.mesh, "pp", "dp", "cp", "tp").tolist()
        return totals


def _norms(parts: list[Tensor]) -> Tensor:
    """L2 norms of chunks of the parts, without a temporary of their size."""
    size = _CPU_CHUNK if parts[0].device.type == "cpu" else _CHUNK
    chunks = [chunk for part in parts for chunk in torch.split(part, size)]
    if parts[0].dtype in (torch.float32, torch.float64):
        return torch.stack(torch._foreach_norm(chunks))
    return torch.stack([torch.linalg.vector_norm(chunk.float()) for chunk in chunks])


def _counted_spans(buffer: FlatBuffer, shard: int) -> list[Span]:
    """What a shard counts, neighbours joined where nothing lies between them."""
    spans: list[Span] = []
    for bucket in buffer.buckets:
        owned = buffer.shard(bucket, shard)
        for entry in bucket.entries:
            for counted in entry.counted:
                span = counted.overlap(owned)
                if span is None:
                    continue
                if spans and spans[-1].stop == span.start:
                    spans[-1] = Span(spans[-1].start, span.stop)
                else:
                    spans.append(span)
    return spans


def _replica_spans(buffer: FlatBuffer, shard: int) -> list[Span]:
    """Parameters in a shard that another model-parallel rank counts."""
    pairs = [
        (entry.span, buffer.shard(bucket, shard))
        for bucket in buffer.buckets
        for entry in bucket.entries
        if not entry.counted
    ]
    return [part for span, owned in pairs if (part := span.overlap(owned)) is not None]


def nonfinite_gradients(buffers: Sequence[FlatBuffer], mesh: Mesh, *, limit: int = 5) -> list[str]:
    """Names of parameters whose gradient is infinite or NaN on some rank, those first that backward reaches first.

    For an error message, after ``GradSync.finish``; all ranks call it together.
    """
    here = [entry.name for buffer in buffers for entry in buffer.entries if not _is_finite(entry.main_grad)]
    last_stages_first = reversed(gather_objects(here, mesh))
    return list(dict.fromkeys(name for names in last_stages_first for name in names))[:limit]


def _is_finite(x: Tensor) -> bool:
    smallest, largest = torch.aminmax(x)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())
