"""Weights and gradients that are whole for a while only (ZeRO 2 and 3): how many a rank holds at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import ALIGNMENT
from megatron.core.distributed.grad_sync import IN_FLIGHT
from megatron.core.distributed.units import Unit, units_of
from megatron.core.parallel.costs import Costs
from megatron.core.parallel.sharding import sharding_of


@dataclass(frozen=True)
class UnitSize:
    """Bytes of a unit on one rank: ``gathered`` weights, ``weights`` of those that are there for a while, and whole
    gradients of each of its ``buckets``, in the order in which they are summed; nothing where ranks divide none of it.
    ``copies``: of weights in 8 bits, those of ``gathered`` that layers make when they need them. ``sums``: this rank's
    part of gradients.
    """

    weights: int
    gathered: int
    copies: int
    buckets: tuple[int, ...]
    sums: int

    @property
    def arriving(self) -> int:
        """Bytes of weights that ranks gather ahead, where these are there for a while."""
        return self.weights - self.copies if self.weights else 0

    @property
    def gradients(self) -> int:
        """Bytes of the whole gradients."""
        return sum(self.buckets)


class UnitCosts:
    """Adds units to the costs of one stage's modules, as ``Workload.with_unit``.

    ``shards``: ranks over which a parameter is divided. ``policies``: of parameters, whose buckets differ with them.
    ``gathered``: bytes of an element of a weight that ranks gather, and of copies that a layer makes of it.
    ``of_gradient``: bytes of an element of gradients. ``is_last``: whether the stage has the loss. ``accumulates``:
    sums of earlier microbatches are there, so that none are left by this one.
    """

    def __init__(
        self,
        run: RunConfig,
        model: nn.Module,
        shards: Callable[[nn.Parameter], int],
        *,
        policies: Mapping[nn.Parameter, Hashable],
        gathered: Callable[[nn.Parameter], tuple[int, int]],
        of_gradient: int,
        is_last: bool,
        accumulates: bool,
    ) -> None:
        parallel = run.parallel
        self._units, self._is_last, self._accumulates = units_of(model), is_last, accumulates
        stays = parallel.keeps_gathered_weights
        self._sizes = {
            unit: _size(unit, shards, policies, gathered, of_gradient=of_gradient, stays=stays) for unit in self._units
        }
        self._stays = sum(size.gathered - size.weights for size in self._sizes.values())
        self._prefetches = parallel.overlap_param_gather
        self._in_flight = IN_FLIGHT if parallel.overlap_grad_reduce else 0
        # Gradients of 16 bits that are summed in fp32 arrive beside those that leave.
        self._copies = 2 if parallel.ddp_reduce_scatter_with_fp32_accumulation and of_gradient < 4 else 1
        self._numbers: dict[nn.Module | Tensor, int] = {}
        for number, unit in enumerate(self._units):
            for of in (unit.layer, unit.module) if unit.layer or unit.module else unit.parameters:
                if of is not None:
                    self._numbers[of] = number
        self._loss_reads: dict[nn.Module | Tensor, int] = {
            each: number for number, unit in enumerate(self._units) if unit.layer is None for each in unit.parameters
        }

    @property
    def always(self) -> int:
        """Bytes that are whole all the time while the stage computes: of units that no module has for itself, and of
        weights that stay until a step ends, as pipelines need them.
        """
        sizes = (self._sizes[unit] for unit in self._units if unit.layer is None and unit.module is None)
        return self._stays + sum(size.weights + size.gradients for size in sizes)

    @property
    def sums(self) -> int:
        """Bytes of this rank's sums of gradients."""
        return sum(size.sums for size in self._sizes.values())

    @property
    def largest(self) -> tuple[int, str]:
        """The most bytes that one unit takes at once, whole weights and gradients, and the unit's name."""
        whole = ((size.gathered + size.gradients, unit.name) for unit, size in self._sizes.items())
        return max(whole, default=(0, ""))

    def __call__(self, of: nn.Module | Tensor, costs: Costs) -> Costs:
        """The costs of a layer, of a module outside of layers, or of the loss that reads the weight ``of``."""
        number = (self._loss_reads if isinstance(of, Tensor) else self._numbers).get(of)
        if number is None:
            return costs
        unit, size = self._units[number], self._sizes[self._units[number]]
        if isinstance(of, Tensor):
            return self._of_loss(of, unit, size, costs)
        before_it = self._leaving(number)
        in_flight = sum(before_it[-self._in_flight :]) if self._in_flight else 0
        still = sum(before_it[-self._in_flight + 1 :]) if self._in_flight > 1 else 0
        if unit.looks_up and size.gradients:
            # Of its gradient, autograd makes a tensor of its own first; all activations are freed by then.
            made = sum(each.nbytes for each in unit.parameters)
            sums = self._sent(size.gradients, size.sums) + still
            has_gradients = self._is_last and sharding_of(unit.parameters[0]).tied is not None  # the loss's
            working = max(size.gradients + made + in_flight, sums) - size.gradients * has_gradients
            return replace(costs, working=max(costs.working, working))
        before = self._units[number - 1] if number and self._prefetches else None
        ahead = 0 if before is None or before.looks_up else self._sizes[before].arriving
        ends = self._sent(size.gradients, size.sums) + still - costs.kept
        working = max(costs.working + size.weights + ahead + size.gradients + in_flight, ends)
        left = 0 if self._accumulates else size.sums
        return replace(costs, working=working, left=costs.left + left, gathered=size.weights, ahead=ahead)

    def _leaving(self, number: int) -> list[int]:
        """Bytes of the buckets that are summed before those of a unit, in their order."""
        units = [each for each in self._units[number + 1 :] if (each.layer or each.module) and not each.looks_up]
        found = []
        for size in (self._sizes[each] for each in reversed(units)):
            arrive = size.sums / max(size.gradients, 1) * self._accumulates
            found += [self._sent(bucket, int(bucket * arrive)) for bucket in size.buckets]
        return found

    def _sent(self, gradients: int, sums: int) -> int:
        """Bytes of gradients on their way, of which ``sums`` arrive."""
        return gradients * self._copies + sums

    def _of_loss(self, weight: Tensor, unit: Unit, size: UnitSize, costs: Costs) -> Costs:
        """Weights are whole while the loss makes gradients, and these then become the unit's: until the backward pass
        reaches the last layer, or, where an embedding has the same weights, its end.
        """
        made = weight.nbytes * bool(size.gradients)
        working = max(costs.working + size.weights, made + size.gradients)
        is_tied = unit.looks_up or unit.module is None
        left = size.gradients if is_tied else 0 if self._accumulates else size.sums
        return replace(costs, working=working, left=costs.left + left)


def _size(
    unit: Unit,
    shards: Callable[[nn.Parameter], int],
    policies: Mapping[nn.Parameter, Hashable],
    gathered_of: Callable[[nn.Parameter], tuple[int, int]],
    *,
    of_gradient: int,
    stays: bool,
) -> UnitSize:
    gathered = copies = sums = 0
    buckets = defaultdict[Hashable, int](int)
    for each in unit.parameters:
        if (parts := shards(each)) > 1:
            elements = -(-each.numel() // ALIGNMENT) * ALIGNMENT
            of_gathered, of_copies = gathered_of(each)
            gathered += elements * of_gathered + each.numel() * of_copies
            copies += each.numel() * of_copies
            if each.requires_grad:
                buckets[sharding_of(each).reduce, policies[each]] += elements * of_gradient
                sums += elements * of_gradient // parts
    return UnitSize(0 if stays else gathered, gathered, copies, tuple(buckets.values()), sums)
