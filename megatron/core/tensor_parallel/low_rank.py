"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the linear layers that tensor parallelism splits.

An adapter belongs to one logical matrix: a layer that stacks several, such as queries, keys and values, has one for
each. So an adapter means the same at every layout, and as much as one of Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.matrices import LogicalMatrix, blocks, logical_matrices
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, StackedPart, sharding_of
from megatron.core.tensor_parallel.initialize import Constant, Initialization, Uniform
from megatron.core.tensor_parallel.linear import linear
from megatron.core.tensor_parallel.regions import enter
from megatron.errors import ConfigError

WHOLE = "all"
"""The name of the only matrix of a layer."""


@runtime_checkable
class Adaptable(Protocol):
    """A linear layer that may have an adapter."""

    def adapt(self, settings: LoraConfig, place: str, parts: frozenset[str]) -> None:
        """Add an adapter. ``place``: of the layer in the model. ``parts``: of its matrices, "" for all."""
        ...


MakeParameter = Callable[[Sharding, Initialization, ModelContext], nn.Parameter]


class LowRankFactor(nn.Module):
    """A factor of what an adapter adds: the ``weight`` of a product."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    @override
    def forward(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The product of ``x`` with the weight, by ``multiply``."""
        return multiply(x, self.weight)


class LowRankPair(nn.Module):
    """The two factors of what an adapter adds to a logical matrix: ``a`` [r, in] and ``b`` [out, r], which is zero at
    first.
    """

    def __init__(self, of_a: Sharding, of_b: Sharding, context: ModelContext, *, make: MakeParameter) -> None:
        super().__init__()
        bound = 1 / math.sqrt(of_a.shape[-1])  # Kaiming's for a leaky slope of √5, as in torch's linear layers
        self.a = LowRankFactor(make(of_a, Uniform(-bound, bound), context))
        self.b = LowRankFactor(make(of_b, Constant(0.0), context))


class LowRankAdapter(nn.ModuleDict):
    """What adapters add to the output of a linear layer: ``scale·b·(a·dropout(x))`` for each of its matrices.

    ``weight``: the layer's, [out, in]. ``names``: of its matrices, in order; those of ``parts`` have an adapter.
    ``place``: of the layer in the model, which names its random stream.
    """

    def __init__(
        self,
        weight: Tensor,
        settings: LoraConfig,
        context: ModelContext,
        *,
        place: str,
        parts: frozenset[str],
        make: MakeParameter,
    ) -> None:
        super().__init__()
        self._context, self._place = context, place
        self._scale, self._dropout, self.rank = settings.scale, settings.dropout, settings.rank
        layout = sharding_of(weight)
        self._is_column = layout.split.get(0) == "tp"
        self._is_row = layout.split.get(1) == "tp"
        self._inputs, self._local_inputs = layout.shape[1], weight.shape[1]
        matrices = matrices_of(layout)
        check_parts(parts, matrices, place)
        owners = _owners(layout, tuple(matrices.values()), context.mesh)
        counts = owners.bincount(minlength=len(matrices)).tolist()
        self._rows: dict[str, int] = dict(zip(matrices, counts, strict=True))
        order = _order_of_rows(owners)
        self._order: Tensor | None
        self.register_buffer("_order", None if order is None else order.to(context.device), persistent=False)
        split: dict[int, Axis] = {1: "tp"} if self._is_row else {}
        of_a = Sharding((self.rank, self._inputs), split, partial_grad=self._partial(layout))
        for name, matrix in matrices.items():
            if "" in parts or name in parts:
                of_b = _outputs_of(layout, matrix, self.rank, is_only=len(matrices) == 1)
                self[name] = LowRankPair(of_a, of_b, context, make=make)

    def _partial(self, layout: Sharding) -> tuple[Axis, ...]:
        """Axes on which a rank sees a part of the gradient of ``a``: where it multiplies its part of the sequence."""
        if self._is_column:
            return ("tp",) if self._context.sequence_parallel else ()
        return () if self._is_row else layout.partial_grad

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in]``, as the layer gets it, to what is added before it leaves its region: ``[S, b, out]``."""
        narrow = self._narrow(x)
        parts = dict(zip(self._pairs, torch.split(narrow, self.rank, dim=-1), strict=True))
        found = [
            self._pairs[name].b(parts[name], self._multiply)
            if name in parts
            else narrow.new_zeros(*narrow.shape[:-1], rows)
            for name, rows in self._rows.items()
        ]
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return whole if self._order is None else whole.index_select(-1, self._order)

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """The layer's output ``out``, before it leaves its region, with what is added to it for input ``x``.

        One product adds what all matrices have: passes over the output cost more than the zeros between their factors.
        """
        replaces = self._context.replaces_operands and self._context.operands.replaces_trained
        if self._context.products.multiply is not None or replaces:
            added: Tensor = self(x)
            return out + added
        narrow, weight = self._narrow(x), self._stacked().t()
        return torch.addmm(out.flatten(0, -2), narrow.flatten(0, -2), weight).view_as(out)

    def _narrow(self, x: Tensor) -> Tensor:
        """``scale·a·dropout(x)`` of all matrices, [S, b, r of each]."""
        x = self._dropped(x)
        narrow = torch.cat([pair.a(x, self._multiply) for pair in self._pairs.values()], dim=-1)
        return (enter(narrow, self._context) if self._is_column else narrow) * self._scale

    def _stacked(self) -> Tensor:
        """Factors ``b`` of all matrices, [out, r of each], with rows as the layer's: each is 0 in columns of others."""
        pairs, width = self._pairs, self.rank * len(self)
        own = {
            name: pad(pair.b.weight, (start, width - self.rank - start))
            for start, (name, pair) in zip(range(0, width, self.rank), pairs.items())
        }
        like = next(iter(own.values()))
        found = [own[name] if name in own else like.new_zeros(rows, width) for name, rows in self._rows.items()]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole if self._order is None else whole.index_select(0, self._order)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None, self._context)

    @property
    def _pairs(self) -> Mapping[str, LowRankPair]:
        return dict(self.items())  # type: ignore[arg-type]  # its modules are pairs

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self._dropout):
            return x
        rng = self._context.rng
        rng.enter(rng.key, f"adapter of {self._place}")
        return dropout(x, self._dropout, rng.split if self._is_row else self._context.hidden_generator)

    def costs(self, workload: Workload) -> Costs:
        """Keeps what is between its factors, and with dropout its input and a mask; else the layer keeps the input."""
        rows = workload.tokens if self._is_row else workload.rows
        narrow = self.rank * len(self) * workload.itemsize
        kept = (rows + workload.tokens) * narrow if self._is_column else rows * narrow
        kept += sum(self._rows.values()) * narrow  # the factors b in one matrix
        if self._dropout:
            kept += rows * self._local_inputs * (workload.itemsize + 1)
        outputs = sum(sharding_of(pair.b.weight).shape[0] for pair in self._pairs.values())
        flops = 2.0 * self.rank * (self._inputs * len(self) + outputs) * workload.all_tokens
        return Costs(flops, kept)


class AdaptersOfTokens:
    """Which tokens of a step have which adapter: all layers of a stage share one of these.

    ``tokens``: [n], places in the step of those that have an adapter, by its number.
    """

    def __init__(self) -> None:
        self.tokens: Mapping[int, Tensor] = {}


class SeveralAdapters(nn.ModuleDict):
    """Adapters of a linear layer by their numbers, each for its own tokens; for generation."""

    def __init__(self, adapters: Mapping[int, LowRankAdapter], choice: AdaptersOfTokens) -> None:
        super().__init__({str(number): adapter for number, adapter in adapters.items()})
        self._adapters, self._choice = dict(adapters), choice

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """The layer's output ``[t, 1, out]``, to which each token's adapter adds what it has for input [t, 1, in]."""
        for number, places in self._choice.tokens.items():
            if (adapter := self._adapters.get(number)) is not None:
                out = out.index_add(0, places, adapter(x.index_select(0, places)))
        return out


def check_parts(parts: Collection[str], matrices: Collection[str], place: str) -> None:
    """Raise ConfigError for parts that a layer hasn't got. ``place``: of the layer."""
    if missing := sorted({*parts} - {"", *matrices}):
        has = "is one matrix" if [*matrices] == [WHOLE] else f"has {' and '.join(matrices)}"
        raise ConfigError(f"--lora-targets names the part {missing[0]} of {place}, which {has}: name the layer itself")


def matrices_of(layout: Sharding) -> dict[str, LogicalMatrix]:
    """The logical matrices that have an adapter each, by name: queries, keys and values, or gate and up."""
    equal = len({part.rows for part in layout.parts}) == 1 and all(part.groups is None for part in layout.parts)
    if layout.parts and not (equal and len(layout.parts) == 2):
        return {WHOLE: LogicalMatrix(((0, layout.shape[0]),), layout.shape[1])}  # of a mixer, whose inputs are one
    found = logical_matrices(layout)
    two = ("gate", "up") if layout.parts else ("k", "v")
    names = {1: (WHOLE,), 2: two, 3: ("q", "k", "v"), 4: ("q", "gate", "k", "v")}[len(found)]
    return dict(zip(names, found, strict=True))


def _outputs_of(layout: Sharding, matrix: LogicalMatrix, rank: int, *, is_only: bool) -> Sharding:
    """The layout of ``b`` [out, r]: that of the matrix's rows."""
    if is_only or 0 not in layout.split:
        partial: tuple[Axis, ...] = ("tp",) if layout.split.get(1) == "tp" else layout.partial_grad
        split = {0: layout.split[0]} if 0 in layout.split else {}
        return Sharding((matrix.rows, rank), split, parts=layout.parts, shared=layout.shared, partial_grad=partial)
    shared = layout.shared
    if shared is None or not _is_shared(layout, matrix):
        return Sharding((matrix.rows, rank), {0: "tp"})
    return Sharding((matrix.rows, rank), {0: "tp"}, parts=(StackedPart(matrix.rows, groups=shared.groups),))


def _is_shared(layout: Sharding, matrix: LogicalMatrix) -> bool:
    """Whether ranks of a group of rows each hold all of the matrix's: those of a key/value head."""
    assert layout.shared is not None
    height = layout.shape[0] // layout.shared.groups
    return matrix.runs[0][0] >= height - layout.shared.rows


def _owners(layout: Sharding, matrices: Sequence[LogicalMatrix], mesh: Mesh) -> Tensor:
    """Which of the matrices each row of this rank's weight belongs to, [rows]; rows of each are in their order."""
    found = blocks(layout, matrices, mesh, start=0, stop=math.prod(layout.local_shape(mesh)))
    runs = sorted((block.start, block.matrix, block.rows) for block in found)
    return torch.tensor([matrix for _, matrix, _ in runs]).repeat_interleave(torch.tensor([rows for *_, rows in runs]))


def _order_of_rows(owners: Tensor) -> Tensor | None:
    """Where each row is among the rows of all matrices, one matrix after the other; None where this is their order."""
    by_matrix = owners.argsort(stable=True)
    return None if bool((by_matrix.diff() > 0).all()) else by_matrix.argsort()
