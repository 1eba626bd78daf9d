"""A quantized weight of published files: codes and scales, whatever the layout, and the numbers they stand for."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.portable import LazyScales, LazyTensor, Quantization
from megatron.core.conversion.tables import Match
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.scheme import SCHEMES, Scheme, scheme_named

Codes = Callable[[], Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """A weight ``[out, in]`` on a grid. ``codes``: reads ``[out, in]``. ``scales``: a row for each output; their type
    is the one in which codes are multiplied. ``through``: a type in which readers have the products first.
    """

    shape: tuple[int, int]
    grid: Grid
    codes: Codes
    scales: LazyScales
    through: torch.dtype | None = None

    def values(self, dtype: torch.dtype) -> LazyTensor:
        """The numbers that the codes stand for, as ``dtype``."""
        return LazyTensor(self.shape, dtype, partial(self._make, dtype))

    def _make(self, dtype: torch.dtype) -> Tensor:
        factors = self.scales.factors.make()
        places = self.places()
        codes = self.codes().to(factors.dtype)
        if self.scales.zeros is not None:
            codes = codes - _spread(self.scales.zeros.make().to(factors.dtype), places)
        return (codes * _spread(factors, places)).to(self.through or dtype).to(dtype)

    def places(self) -> Tensor | None:
        """The group of each input, ``[in]``; None where an output has one scale."""
        if self.scales.groups is not None:
            return self.scales.groups.make().long()
        group = self.grid.block[1]
        return torch.arange(self.shape[1]) // group if group else None


def _spread(found: Tensor, places: Tensor | None) -> Tensor:
    return found if places is None or found.shape[1] == 1 else found[:, places]


def inputs_of(scale: LazyTensor | None) -> LazyTensor | None:
    """The scale of a product's inputs, ``[1]``; None without one, or with one for each of something."""
    if scale is None or math.prod(scale.shape) != 1:
        return None
    return LazyTensor((1,), torch.float32, lambda: scale.make().float().view(1))


def rows_of(factors: LazyTensor, rows: int, sharing: int) -> LazyTensor:
    """Factors ``[rows, groups]`` of ``[⌈rows/sharing⌉, groups]``; of one number, or ``[rows]``, a column."""
    count = factors.shape[-1] if len(factors.shape) == 2 else 1

    def make() -> Tensor:
        found = factors.make()
        found = found.reshape(-1, count)
        return found.repeat_interleave(sharing, 0)[:rows] if sharing > 1 else found.expand(rows, count)

    return LazyTensor((rows, count), factors.dtype, make)


def quantization_of(
    stored: Mapping[str, StoredWeight],
    found: Sequence[Match],
    model: ModelConfig,
    *,
    method: str,
    rounds_inputs: bool,
    cache: Mapping[str, LazyTensor],
) -> Quantization | None:
    """The scales of weights that are quantized in one of our schemes, by our names; None for no such weight.

    ``stored``: by their names today. ``method``: what the folder says. ``rounds_inputs``: whether activations are
    rounded, too. ``cache``: scales of keys and values, by our names. Weights that are of another scheme than most, or
    joined with others of another grid, have no scales.
    """
    schemes = {name: _scheme_of(weight.grid, rounds_inputs=rounds_inputs) for name, weight in stored.items()}
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    if not counts:
        return None
    (most, _), *_ = counts.most_common()
    scales = dict[str, LazyScales]()
    for match in found:
        held = [stored[name] for name in match.theirs if schemes.get(name) == most]
        if len(held) == len(match.theirs) and all(each.scales.groups is None for each in held):
            joined = _joined(match, held, model)
            if joined is not None:
                scales[match.ours] = joined
    return Quantization(most, scales, method, cache=cache) if scales else None


def _scheme_of(grid: Grid, *, rounds_inputs: bool) -> Scheme | None:
    """Our name of a grid; None for one without."""
    for scheme in SCHEMES.values():
        of_groups = scheme.weights.block == (1, 128) and grid.block[0] == 1 and grid.block[1] > 0
        block = grid.block if of_groups else scheme.weights.block
        is_same = dataclasses.replace(scheme.weights, block=block) == grid
        is_whole = grid.kind == "float" or rounds_inputs == (scheme.activations is not None)
        if is_same and is_whole:
            return scheme_named(scheme.name, group_size=grid.block[1] if of_groups else None)
    return None


def _joined(match: Match, held: Sequence[StoredWeight], model: ModelConfig) -> LazyScales | None:
    """The scales of a weight of ours, whose rows are those of several; None where a transform moves columns."""
    wanted = (*match.shape[:-1], held[0].scales.factors.shape[-1])

    def join(parts: Sequence[LazyTensor]) -> LazyTensor | None:
        shapes = {each.shape[-1] for each in parts}
        if len(shapes) > 1:
            return None
        sketch = match.transform.join([torch.empty(each.shape, device="meta") for each in parts], model)
        make = partial(_join, match, parts, model)
        return LazyTensor(wanted, parts[0].dtype, make) if tuple(sketch.shape) == wanted else None

    factors = join([each.scales.factors for each in held])
    zeros = [each.scales.zeros for each in held if each.scales.zeros is not None]
    inputs = [each.scales.inputs for each in held if each.scales.inputs is not None]
    largest = LazyTensor((1,), torch.float32, partial(_largest, inputs)) if len(inputs) == len(held) else None
    return None if factors is None else LazyScales(factors, join(zeros) if zeros else None, inputs=largest)


def _largest(scales: Sequence[LazyTensor]) -> Tensor:
    """The scale with which the inputs of each of several weights fit."""
    return torch.cat([each.make() for each in scales]).amax().view(1)


def _join(match: Match, parts: Sequence[LazyTensor], model: ModelConfig) -> Tensor:
    return match.transform.join([each.make() for each in parts], model)
