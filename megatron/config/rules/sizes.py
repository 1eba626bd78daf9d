"""Arithmetic of rules: which sizes would fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

from megatron.config.flags import one_of
from megatron.config.run import RunConfig

# lengths of the schedule that are given in iterations or in samples
LENGTHS = ("lr_decay", "lr_warmup", "lr_wsd_decay")


def divisors(number: int) -> list[int]:
    """Every divisor, ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def some(sizes: Iterable[int], *, near: int, most: int = 8) -> str:
    """``1, 2 or 4``: up to ``most`` of the sizes, those nearest to ``near``."""
    return one_of(sorted(sorted(sizes, key=lambda size: (abs(size - near), size))[:most]))


def indivisible(flag: str, size: int, over: str, parts: int, *, fits: Sequence[int] | None = None) -> str | None:
    """What is wrong with ``flag size`` if it is not divisible by ``over parts``. ``fits``: parts that it would be
    divisible by; default: its divisors.
    """
    if size % parts == 0:
        return None
    sizes = some(divisors(size) if fits is None else fits, near=parts)
    return f"{flag} {size} is not divisible by {over} {parts}; sizes that fit: {sizes}"


def divisors_near(number: int, size: int) -> str:
    """``8 or 16``: the divisors of ``number`` around ``size``."""
    found = divisors(number)
    around = [max((each for each in found if each < size), default=0), min((e for e in found if e > size), default=0)]
    return one_of(each for each in around if each)


def multiples_near(number: int, unit: int) -> str:
    """``96 or 104``: the multiples of ``unit`` around ``number``."""
    below = number // unit * unit
    return one_of(each for each in (below, below + unit) if each > 0)


def tensor_parallel_sizes(run: RunConfig) -> list[int]:
    """Tensor-parallel sizes that divide every split dimension and the number of ranks."""
    parallel, model = run.parallel, run.model
    ranks = run.world_size // gcd(
        run.world_size, parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    common = gcd(model.num_attention_heads, gcd(model.ffn_hidden_size, ranks))
    if parallel.sequence_parallel:
        common = gcd(common, run.data.seq_length // parallel.context_parallel_size)
    if model.mtp_num_layers:
        common = gcd(common, 2 * model.hidden_size)
    return [size for size in divisors(common) if divide(model.num_query_groups, size)]


def divide(one: int, other: int) -> bool:
    """Whether one of the two numbers divides the other."""
    return one % other == 0 or other % one == 0


def length_in(run: RunConfig, unit: str, name: str) -> int:
    """A length of the schedule in iterations or samples of full batches, 0 if it is not given."""
    iters, samples = (getattr(run.optimizer, f"{name}_{each}") or 0 for each in ("iters", "samples"))
    size = max(run.training.global_batch_size, 1)
    return iters or -(-samples // size) if unit == "iters" else samples or iters * size
