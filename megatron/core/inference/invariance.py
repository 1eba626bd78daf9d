"""Products with weights in which a row's bits don't depend on its neighbours.

Libraries choose their kernels, and with them the order of additions, by the number of rows. Which numbers give the same
bits differs between processors and shapes, so it is measured once for each weight. Attention needs no rule: the queries
and keys that are computed together with a token depend on its position alone, see ``CachedStep``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 4
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MANY = 128  # rows from which on products of as many are no slower than one

_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class EqualRows:
    """Only numbers of rows, ``sizes``, in which ``product`` gives a row the same bits, the smallest first."""

    product: _Product
    sizes: tuple[int, ...]

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows ``[t, in]`` to ``[t, out]``, in parts filled up with zeros."""
        parts, first = list[Tensor](), 0
        for rows in self.passes(len(x)):
            part = x[first : first + rows]
            missing = self.padded(rows) - rows
            found = self.product(F.pad(part, (0, 0, 0, missing)) if missing else part, weight, bias)
            parts.append(found[:rows] if missing else found)
            first += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def padded(self, rows: int) -> int:
        """The next of the sizes; ``rows`` are at most the largest."""
        return next(size for size in self.sizes if size >= rows)

    def passes(self, rows: int) -> list[int]:
        """``rows`` as numbers of rows that are computed one after the other, with little padding."""
        found = []
        while rows > 0:
            fitting = max(size for size in self.sizes if size <= max(rows, self.sizes[0]))
            if rows <= self.sizes[-1] and self.padded(rows) <= 2 * rows:  # costs less than a second pass
                fitting = rows
            found.append(min(rows, fitting))
            rows -= found[-1]
        return found


class EqualProducts:
    """Multiplies rows so that their bits don't depend on how many there are. A shape is measured when first used."""

    def __init__(self) -> None:
        self._rules: dict[tuple[object, ...], EqualRows] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias``: [..., in] -> [..., out]."""
        if x.numel() == 0:
            return F.linear(x, weight, bias)
        key = (weight.shape, weight.stride(), weight.dtype, bias is None)
        if key not in self._rules:
            self._rules[key] = equal_rows(weight, has_bias=bias is not None)
        return self._rules[key].multiply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


@torch.inference_mode()
def equal_rows(weight: Tensor, *, has_bias: bool) -> EqualRows:
    """The rule for weights of this shape, memory layout and type."""
    few, like = cancelling(weight)
    bias = like.new_zeros(len(like)) if has_bias else None
    rules = list[EqualRows]()
    for product in (_transposed, F.linear):
        rule = EqualRows(product, _agreeing(product, few, like, bias))
        if rule.sizes[0] <= _FEW and rule.sizes[-1] >= _MANY:
            return rule
        rules.append(rule)
    return max(rules, key=lambda rule: len(rule.sizes))


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(weight·xᵀ)ᵀ``: libraries cut the sums of a product by its left side, which has the same shape for any rows."""
    found = weight @ x.t() if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return found.t().contiguous()


def cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Four rows, and a matrix like ``weight``, whose products are 0 but for the rounding of sums, so that another
    order of additions shows in most of them; in products of random numbers, rounding to bf16 hides nearly all.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, half = weight.shape[0], weight.shape[1] // 2
    order = torch.randperm(half, generator=generator)
    rows = torch.randn(_FEW, half, generator=generator)
    matrix = torch.randn(outputs, half, generator=generator)
    odd = (0, weight.shape[1] % 2)
    found = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    found.copy_(F.pad(torch.cat((matrix, matrix[:, order]), 1), odd))
    return F.pad(torch.cat((rows, -rows[:, order]), 1), odd).to(weight), found


def _agreeing(product: _Product, few: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The most numbers of rows that give the same bits."""
    classes = list[tuple[Tensor, list[int]]]()
    for size in reversed(_SIZES):
        if size < _FEW:  # every one of the rows, as the first alone may be equal by chance
            found = torch.cat([product(part.clone(), weight, bias) for part in few.split(size)])
        else:
            found = product(few.repeat(-(-size // _FEW), 1)[:size], weight, bias)
        if not torch.equal(found, found[:_FEW].repeat(-(-size // _FEW), 1)[: len(found)]):
            continue
        same = [sizes for first, sizes in classes if torch.equal(first, found[:_FEW])]
        if same:
            same[0].insert(0, size)
        else:
            classes.append((found[:_FEW].clone(), [size]))
    _, most = max(classes, key=lambda each: len(each[1]))
    return tuple(most)
