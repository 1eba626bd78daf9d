"""Tests of every rank's device, memory and links before training: results, and speeds beside those of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from megatron.core.device import is_gpu
from megatron.core.parallel.collectives import barrier, gather_objects, swap
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ParallelError
from megatron.training.guards.results import place_of

_GPU_WIDTH, _GPU_BYTES = 4096, 1 << 28
_CPU_WIDTH, _CPU_BYTES = 384, 1 << 24
_SECONDS = 1.0
"""Length of each measurement; there are up to four, with all ranks at the same time."""


@dataclass(frozen=True)
class RankHealth:
    """What a rank has measured. ``is_right``: whether products of whole numbers are exact. ``rates``: by name, products
    in TFLOP/s and bytes moved in GB/s; more is better.
    """

    place: str
    is_right: bool
    rates: dict[str, float]


def measure(context: ParallelContext) -> RankHealth:
    """Test this rank's device: its products, its memory, and what all ranks together send. A collective; seconds."""
    device, on_gpu = context.device, is_gpu(context.device)
    width, size = (_GPU_WIDTH, _GPU_BYTES) if on_gpu else (_CPU_WIDTH, _CPU_BYTES)
    a = _numbers(width).to(device, torch.float32)
    is_right = all(_is_product(a @ a.T, a) for _ in range(3))  # a device may be wrong now and then
    fast = a.to(torch.bfloat16) if on_gpu else a
    flops = 2.0 * width**3
    block = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    rates = {"products": flops / 1e12 / _repeated(lambda: fast @ fast, device)}
    rates["memory"] = 2 * size / 1e9 / _repeated(lambda: other.copy_(block), device)
    if on_gpu:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        rates["copies from the host"] = size / 1e9 / _repeated(lambda: block.copy_(host), device)
    if context.mesh.world_size > 1:
        rates["link"] = _link(context, block[: size // 16])
    return RankHealth(place_of(context), is_right, rates)


def _is_product(product: Tensor, a: Tensor) -> bool:
    """Whether ``product`` is ``a @ a.T`` [n, n] of small whole numbers: both times a vector, exactly, on the CPU."""
    whole = a.cpu().double()
    vector = torch.arange(whole.shape[0], dtype=torch.float64) % 5 + 1
    return torch.equal(product.cpu().double() @ vector, whole @ (whole.T @ vector))


def _numbers(width: int) -> Tensor:
    """Whole numbers from -7 to 7, ``[width, width]``, in no simple order: fp32 holds sums of their products exactly."""
    return (torch.arange(width * width, dtype=torch.int64) * 2654435761 % 15 - 7).view(width, width)


def _repeated(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs of ``work``, which takes up to a second altogether."""

    def synchronize() -> None:
        if is_gpu(device):
            torch.accelerator.synchronize()

    best, end = float("inf"), time.perf_counter() + _SECONDS
    for _ in range(50):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best


def _link(context: ParallelContext, block: Tensor) -> float:
    """GB/s between this rank and its neighbours: pairs (0, 1), (2, 3), …, then (1, 2), (3, 4), … exchange a block, so
    that a slow link is that of one pair. The slower of both.
    """
    mesh, slowest = context.mesh, float("inf")
    for shift in (0, 1):
        other = mesh.world_rank + (1 if mesh.world_rank % 2 == shift else -1)
        barrier(mesh)
        if not 0 <= other < mesh.world_size:
            continue
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            swap(block, mesh, other)
            if is_gpu(block.device):
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - start)
        slowest = min(slowest, 2 * block.numel() / 1e9 / best)
    return slowest


@dataclass(frozen=True)
class Verdict:
    """What the measurements of all ranks say. ``wrong``: places whose products are. ``slow``: by place, what is slow
    there, in words. ``medians``: of all ranks, by name.
    """

    wrong: list[str]
    slow: dict[str, str]
    medians: dict[str, float]


def judge(ranks: Sequence[RankHealth], *, threshold: float) -> Verdict:
    """Compare the ranks: a rate is slow below ``threshold`` of the median."""
    names = [*dict.fromkeys(name for each in ranks for name in each.rates)]
    medians = {name: median(each.rates[name] for each in ranks if name in each.rates) for name in names}
    slow = dict[str, list[str]]()
    for rank, each in enumerate(ranks):
        for name, rate in each.rates.items():
            if rate < threshold * medians[name]:
                share = f"{name} {100 * rate / medians[name]:.0f} % of the median"
                slow.setdefault(each.place, []).append(f"rank {rank}: {share}")
    wrong = [each.place for each in ranks if not each.is_right]
    return Verdict([*dict.fromkeys(wrong)], {place: ", ".join(said) for place, said in slow.items()}, medians)


def preflight(
    context: ParallelContext,
    *,
    threshold: float,
    stops: bool,
    say: Callable[[str], None],
    fault: Callable[[Sequence[str], str], None],
) -> None:
    """Test every rank, and name those that compute wrongly or slowly. A collective of a few seconds.

    ``fault``: called on every rank with the places of faults. Raises ParallelError for a wrong result, and with
    ``stops`` for a slow rank.
    """
    start = time.perf_counter()
    with context.mesh.activity.during("preflight"):
        ranks = gather_objects(measure(context), context.mesh)
    found = judge(ranks, threshold=threshold)
    if found.wrong:
        fault(found.wrong, "a wrong product before training")
        raise ParallelError(f"preflight: {', '.join(found.wrong)} computed wrong products: start without it")
    units = ", ".join(
        f"{name} {rate:.3g} {'TFLOP/s' if name == 'products' else 'GB/s'}" for name, rate in found.medians.items()
    )
    say(f"preflight of {len(ranks)} ranks in {time.perf_counter() - start:.1f} s; medians: {units}")
    for place, words in found.slow.items():
        say(f"preflight: {place} is slow: {words}")
    if found.slow:
        fault([*found.slow], "slow before training")
    if found.slow and stops:
        raise ParallelError(
            f"preflight: {'; '.join(f'{place} is slow ({words})' for place, words in found.slow.items())}: start "
            "without it, or give --preflight warn"
        )
