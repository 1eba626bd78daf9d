"""Norms and counts over a model that many ranks hold in parts: each logical element once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.buffers import FlatBuffer, Span, parts_of
from megatron.core.parallel.collectives import all_reduce, gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh

# Squares are added in fp32 within a chunk and in fp64 between chunks: on CPU, whose sums are not trees, a million
# elements in fp32 would be off by 1e-5, these by 2e-7.
_CPU_CHUNK = 1 << 16
_CHUNK = 1 << 24


@dataclass(frozen=True)
class GradientStatistics:
    """L2 norm of the whole model's gradients, and, when asked for, how many of their elements are zero."""

    norm: float
    num_zeros: int | None = None

    @classmethod
    def of(cls, sums: Sequence[float]) -> GradientStatistics:
        """The statistics from the numbers of ``ModelStatistics.gradient_sums``."""
        squares, *zeros = sums
        return cls(math.sqrt(squares), int(zeros[0]) if zeros else None)


class ModelStatistics:
    """Norms and counts of the model, the same on every rank.

    Each rank looks only at its own portions, even where it holds more: replicated and sharded optimizers then add the
    same numbers in the same order and get the same norm to the last bit, and ranks share the work.

    ``frozen``: the parts of frozen parameters that this rank counts (``frozen_parts``).
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], context: ParallelContext, *, frozen: Sequence[Tensor] = ()
    ) -> None:
        self._context, self._frozen = context, frozen
        self._counted: list[tuple[FlatBuffer, list[Span]]] = [(buffer, []) for buffer in buffers]
        self._replicas: list[tuple[FlatBuffer, list[Span]]] = [(buffer, []) for buffer in buffers]
        for (buffer, counted), (_, replicas) in zip(self._counted, self._replicas):
            for _, entry, part in parts_of([buffer], FlatBuffer.portion):
                here = [span for each in entry.norm_spans if (span := each.overlap(part)) is not None]
                for span in here:
                    if counted and counted[-1].stop == span.start:  # one span for neighbours
                        span = Span(counted.pop().start, span.stop)
                    counted.append(span)
                if not entry.norm_spans:
                    replicas.append(part)

    def gradient_sums(self, *, count_zeros: bool = False) -> Tensor:
        """Sum of squares over the gradient buffers, fp64 on the device; with ``count_zeros`` the number of zeros after
        it. The sum is infinite or NaN exactly when some rank's gradient is. A collective, which does not wait.
        """
        parts = [[buffer.own_grads(span) for span in spans] for buffer, spans in self._counted]
        replicas = [[buffer.own_grads(span) for span in spans] for buffer, spans in self._replicas]
        # Replicas add nothing unless one isn't finite: 0 · inf is NaN, on every rank after the sum.
        sums = [self._sum_of_squares(parts) + 0.0 * self._sum_of_squares(replicas)]
        if count_zeros:
            sums.append(self._sum(part.numel() - torch.count_nonzero(part) for each in parts for part in each))
        return self._over_all_ranks(sums)

    def parameter_norm(self) -> float:
        """L2 norm of the weights that the forward pass uses, the frozen ones included."""
        parts = [[buffer.own(span) for span in spans] for buffer, spans in self._counted]
        parts += [[part] for part in self._frozen]
        return math.sqrt(self._over_all_ranks([self._sum_of_squares(parts)]).item())

    def _sum_of_squares(self, parts: list[list[Tensor]]) -> Tensor:
        """fp64 scalar; ``parts`` lists tensors of one dtype each."""
        return self._sum(_norms(each).double().square().sum() for each in parts if each)

    def _sum(self, terms: Iterable[Tensor]) -> Tensor:
        return sum(terms, torch.zeros((), dtype=torch.float64, device=self._context.device))

    def _over_all_ranks(self, sums: list[Tensor]) -> Tensor:
        return all_reduce(torch.stack(sums), self._context.mesh, "pp", "dp", "cp", "tp")


def _norms(parts: list[Tensor]) -> Tensor:
    """L2 norms of chunks of the parts, without a temporary of their size."""
    size = _CPU_CHUNK if parts[0].device.type == "cpu" else _CHUNK
    chunks = [chunk for part in parts for chunk in torch.split(part, size)]
    if parts[0].dtype in (torch.float32, torch.float64):
        return torch.stack(torch._foreach_norm(chunks))
    return torch.stack([torch.linalg.vector_norm(chunk.float()) for chunk in chunks])


def nonfinite_gradients(buffers: Sequence[FlatBuffer], mesh: Mesh, *, limit: int = 5) -> list[str]:
    """Names of parameters whose gradient is infinite or NaN on some rank, in the order of the backward pass.

    For an error message, after ``GradSync.finish``; all ranks call it together.
    """
    whole = {entry.name: entry.main_grad for buffer in buffers if not buffer.divides_grads for entry in buffer.entries}
    in_shards = parts_of([buffer for buffer in buffers if buffer.divides_grads], FlatBuffer.owned)
    found = whole | {entry.name: buffer.own_grads(part) for buffer, entry, part in in_shards}
    extremes = {name: torch.aminmax(grads) for name, grads in found.items()}
    here = [name for name, each in extremes.items() if not all(math.isfinite(end.item()) for end in each)]
    last_stages_first = reversed(gather_objects(here, mesh))
    return list(dict.fromkeys(name for names in last_stages_first for name in names))[:limit]
