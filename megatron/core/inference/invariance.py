"""Batch-invariant matrix products: the bits of a row don't depend on the other rows.

Libraries choose their kernels, and with them the order of additions, by the number of rows. Which numbers give the same
bits differs between processors and shapes, so it is measured once for each weight. Attention needs no rule: the queries
and keys that are computed together with a token depend on its position alone, see ``CachedStep``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention.cached_calls import CachedBackend, CachedCall
from megatron.core.ops.attention.request import AttentionOptions

_FEW = 4
_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512)
_MANY = 128  # rows from which on products of as many are no slower than one

TILE = 16  # positions that are attended from together where results may not depend on the step
_KEYS = (*range(16, 161, 16), 272, 528, 1040)  # of calls on which attention is measured
_LOUD = 2.0**20  # makes scores of what rounding leaves

_Product = Callable[[Tensor, Any, Tensor | None], Tensor]


@dataclass(frozen=True)
class EqualRows:
    """A product with the numbers of rows at which its bits agree. ``sizes``: numbers of rows for which ``product``
    gives a row the same bits, in ascending order.
    """

    product: _Product
    sizes: tuple[int, ...]

    @property
    def serves_all(self) -> bool:
        """Whether any number of rows needs little padding and few calls."""
        return self.sizes[0] <= _FEW and self.sizes[-1] >= _MANY

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Rows ``[t, in]`` to ``[t, out]``, in calls of the allowed sizes, padded with zeros."""
        if x.shape[0] in self.sizes:  # len(x) takes microseconds
            return self.product(x, weight, bias)
        parts, first = list[Tensor](), 0
        for rows in self.passes(x.shape[0]):
            part = x[first : first + rows]
            missing = self.padded(rows) - rows
            found = self.product(F.pad(part, (0, 0, 0, missing)) if missing else part, weight, bias)
            parts.append(found[:rows] if missing else found)
            first += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def padded(self, rows: int) -> int:
        """The smallest size that holds ``rows``, which are at most the largest size."""
        return next(size for size in self.sizes if size >= rows)

    def passes(self, rows: int) -> list[int]:
        """How many of ``rows`` each call computes, so that padding is small."""
        found = []
        while rows > 0:
            fitting = max(size for size in self.sizes if size <= max(rows, self.sizes[0]))
            if rows <= self.sizes[-1] and self.padded(rows) <= 2 * rows:  # costs less than a second pass
                fitting = rows
            found.append(min(rows, fitting))
            rows -= found[-1]
        return found


def cancelling(weight: Tensor, *, rows: int = _FEW) -> tuple[Tensor, Tensor]:
    """A few rows, and a matrix like ``weight``, whose products are 0 but for the rounding of sums, so that another
    order of additions shows in most of them; in products of random numbers, rounding to bf16 hides nearly all.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, half = weight.shape[0], weight.shape[1] // 2
    order = torch.randperm(half, generator=generator)
    few = torch.randn(rows, half, generator=generator)
    matrix = torch.randn(outputs, half, generator=generator)
    odd = (0, weight.shape[1] % 2)
    found = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    found.copy_(F.pad(torch.cat((matrix, matrix[:, order]), 1), odd))
    return F.pad(torch.cat((few, -few[:, order]), 1), odd).to(weight), found


def agreeing(product: _Product, few: Tensor, weight: Any, bias: Tensor | None) -> tuple[int, ...]:
    """The largest set of numbers of rows whose products of ``few`` with ``weight`` have the same bits; see
    ``cancelling``.
    """
    classes = list[tuple[Tensor, list[int]]]()
    for size in reversed(_SIZES):
        starts = range(max(1, _FEW - size + 1))  # fewer rows than four are taken from everywhere
        rows = few.repeat(-(-size // _FEW), 1)
        found = torch.cat([product(rows[start : start + size], weight, bias) for start in starts])
        order = torch.tensor([row for start in starts for row in range(start, start + size)]) % _FEW
        each = torch.stack([found[(order == row).nonzero()[0, 0]] for row in range(_FEW)])
        if not torch.equal(found, each[order]):
            continue
        same = [sizes for first, sizes in classes if torch.equal(first, each)]
        if same:
            same[0].insert(0, size)
        else:
            classes.append((each, [size]))
    _, most = max(classes, key=lambda each: len(each[1]))
    return tuple(most)


_FEWEST: dict[tuple[object, ...], int] = {}


def fewest_queries(backend: CachedBackend, k: Tensor, v: Tensor, options: AttentionOptions, *, heads: int) -> int:
    """The smallest number of queries whose results have the bits of the whole tile's; so have its multiples.

    ``k`` [g, …, d] and ``v`` [g, …, e]: like those of the calls. ``heads``: of queries, for each of the groups.
    Measured once for each kind of call.
    """
    layout = (len(k), k.shape[2], k.stride(1), v.shape[2], v.stride(1), k.dtype, k.device, torch.get_num_threads())
    kind = (backend, heads, options.soft_cap, options.sinks is None, *layout)
    if kind not in _FEWEST:
        _FEWEST[kind] = _fewest_queries(backend, k, v, replace(options, window=None, slopes=None), heads=heads)
    return _FEWEST[kind]


def _fewest_queries(backend: CachedBackend, k: Tensor, v: Tensor, options: AttentionOptions, *, heads: int) -> int:
    calls = [call for keys in _KEYS for call in _tiles(keys, k, v, options, heads=heads)]

    def attend(call: _Tile, start: int, stop: int) -> Tensor:
        bias = call.bias.expand(heads, -1, -1)[:, start:stop].reshape(1, -1, call.bias.shape[2])
        asking = call.queries[:, :, start:stop].flatten(1, 2)
        found = backend.attend(asking, call.keys, call.values, call.options, bias, causal=False)
        return found.view(len(found), heads, stop - start, -1)

    whole = [(call, attend(call, 0, TILE)) for call in calls]
    for fewest in (2, 4, 8):
        cuts = [(start, stop) for start in range(0, TILE, fewest) for stop in range(start + fewest, TILE + 1, fewest)]
        if all(
            torch.equal(attend(call, start, stop), each[:, :, start:stop])
            for call, each in whole
            for start, stop in cuts
        ):
            return fewest
    return TILE


@dataclass(frozen=True)
class _Tile:
    """A call of attention: ``queries`` [g, heads, TILE, d], ``keys`` [g, t, d], ``values`` [g, t, e]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor
    options: AttentionOptions


def _tiles(keys: int, k: Tensor, v: Tensor, options: AttentionOptions, *, heads: int) -> Iterator[_Tile]:
    """Two calls of so many keys: of random numbers, and one in which scores and results are 0 but for rounding. The
    keys of its second half are those of the first, with opposite values, but for those that some query doesn't see.
    """
    generator, half = torch.Generator().manual_seed(0), keys // 2
    asked, seen = cancelling(k.new_empty(keys, k.shape[2]), rows=heads * TILE)
    _, worth = cancelling(v.new_empty(keys, v.shape[2]))
    bias = CachedCall(keys - TILE, TILE, 0, keys).bias(options, None, seen)
    assert bias is not None, "the queries of a tile don't see all of its keys"
    signs = worth.new_ones(2, half, 1)
    signs[1], signs[:, max(0, half - TILE) :] = -1, 0
    opposite, again = (worth[:half] * signs).flatten(0, 1), seen[:half].repeat(2, 1)
    loud = replace(options, scale=_LOUD)
    drawn = [torch.randn(each.shape, generator=generator).to(k) for each in (asked, seen, worth)]
    for (rows, matrix, values), how in ((drawn, options), ((asked, again, opposite), loud)):
        queries = rows.view(1, heads, TILE, -1).expand(len(k), -1, -1, -1)
        yield _Tile(queries, _laid_out(matrix, k), _laid_out(values, v), bias, how)


def _laid_out(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` ``[t, w]`` repeated for each group of ``like`` ``[g, …, w]``, with its strides."""
    shape = (len(like), *rows.shape)
    found = rows.new_empty(len(like), len(rows), like.stride(1))[..., : rows.shape[1]]
    return found.copy_(rows.expand(shape))
