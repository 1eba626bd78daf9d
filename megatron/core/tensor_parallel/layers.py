"""The layers that tensor parallelism splits: matrices by columns or by rows, and embeddings by vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, SharedRows, StackedPart, sharded_parameter, sharding_of
from megatron.core.tensor_parallel.fp8_linear import Fp8Linear, fp8_linear
from megatron.core.tensor_parallel.initialize import Constant, Initialization
from megatron.core.tensor_parallel.linear import is_in_8_bits, linear
from megatron.core.tensor_parallel.low_rank import AdaptersOfTokens, LowRankAdapter, SeveralAdapters
from megatron.core.tensor_parallel.regions import enter, leave


def partial_under_sequence_parallel(context: ParallelContext) -> tuple[Axis, ...]:
    """Axes on which a parameter applied to a part of the sequence sees only part of its gradient."""
    return ("tp",) if context.sequence_parallel else ()


def make_parameter(sharding: Sharding, initialization: Initialization, context: ParallelContext) -> nn.Parameter:
    """An uninitialized parameter of the rank's type on its device, with its layout and what ``initialize`` fills in."""
    made = sharded_parameter(sharding, context.mesh, dtype=context.dtype, device=context.device)
    if context.fills_weights_later and made.device.type != "meta":
        made.untyped_storage().resize_(0)
    made.initialization = initialization  # type: ignore[attr-defined]
    return made


class LinearBase(nn.Module):
    """Base of the linear layers: a ``weight``, and at most one low-rank adapter beside it, ``lora``."""

    weight: nn.Parameter
    _context: ModelContext

    def __init__(self) -> None:
        super().__init__()
        self.lora: LowRankAdapter | SeveralAdapters | None = None

    def adapt(self, settings: LoraConfig, place: str, parts: frozenset[str]) -> None:
        """Add an adapter. ``place``: of the layer in the model. ``parts``: of its matrices, "" for all."""
        self.lora = LowRankAdapter(self.weight, settings, self._context, place=place, parts=parts, make=make_parameter)

    def adapt_tokens(self, adapters: Mapping[int, tuple[LoraConfig, frozenset[str]]], choice: AdaptersOfTokens) -> None:
        """Add adapters by number, each for the tokens of its own. ``adapters``: their settings, and matrices of this
        layer, "" for all.
        """
        made = {
            number: LowRankAdapter(self.weight, settings, self._context, place="", parts=parts, make=make_parameter)
            for number, (settings, parts) in adapters.items()
        }
        self.lora = SeveralAdapters(made, choice)

    def with_adapter(self, out: Tensor, x: Tensor) -> Tensor:
        """The layer's output ``out``, before it leaves its region, and what the adapter adds to it for input ``x``."""
        return out if self.lora is None else self.lora.added_to(out, x)


class ColumnParallelLinear(LinearBase):
    """``[s, b, in] -> [S, b, out/tp]``: each rank holds some rows of the ``[out, in]`` weight, that is, some outputs.

    ``parts`` stacked along ``out`` (gate and up of a gated MLP) are each split over the ranks; ``shared``
    outputs (a key/value head that serves several ranks) are computed by each rank that needs them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: ModelContext,
        *,
        init: Initialization,
        bias: bool,
        parts: tuple[StackedPart, ...] = (),
        shared: SharedRows | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        weight = Sharding((out_features, in_features), {0: "tp"}, parts=parts, shared=shared)
        self.weight = make_parameter(weight, init, context)
        sharding = Sharding((out_features,), {0: "tp"}, parts=parts, shared=shared)
        self.bias = make_parameter(sharding, Constant(0.0), context) if bias else None
        self.fp8 = fp8_linear(context, inputs=partial_under_sequence_parallel(context), weights=("tp",), grads=("tp",))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Enter the tensor-parallel region and multiply."""
        context = self._context
        if context.sequence_parts > 1:
            return self.with_adapter(linear(x, self.weight, self.bias, context, gathers=True, fp8=self.fp8), x)
        return self.with_adapter(linear(enter(x, context), self.weight, self.bias, context, fp8=self.fp8), x)

    def costs(self, workload: Workload) -> Costs:
        """Keeps its input: what is gathered for the product isn't kept."""
        found = _product(
            self.weight,
            workload,
            self._context,
            kept=workload.rows,
            fp8=self.fp8,
            gathers=self._context.sequence_parts > 1,
        )
        return found + costs_of(self.lora, workload)


class RowParallelLinear(LinearBase):
    """``[S, b, in/tp] -> [s, b, out]``: each rank holds some columns of the ``[out, in]`` weight, that is, some inputs.

    The first rank adds the bias in its matmul, before the partial sums are reduced; other ranks' gradient of it is 0.
    Where ``Fp8Linear`` reduces, each rank adds it to its part of the sequence.
    """

    def __init__(
        self, in_features: int, out_features: int, context: ModelContext, *, init: Initialization, bias: bool
    ) -> None:
        super().__init__()
        self._context = context
        self.weight = make_parameter(Sharding((out_features, in_features), {1: "tp"}), init, context)
        bias_sharding = Sharding((out_features,), partial_grad=("tp",))
        self.bias = make_parameter(bias_sharding, Constant(0.0), context) if bias else None
        self.fp8 = fp8_linear(context, inputs=("tp",), weights=("tp",), is_partial=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Multiply and leave the tensor-parallel region."""
        bias: Tensor | None = self.bias
        if self.fp8 is not None and self.fp8.reduces and is_in_8_bits(self._context):
            out = linear(x, self.weight, bias, self._context, fp8=self.fp8)
            return out if self.lora is None else out + leave(self.lora(x), self._context)
        if bias is not None and self._context.mesh.rank("tp") != 0:
            bias = bias * 0
        out = self.with_adapter(linear(x, self.weight, bias, self._context, fp8=self.fp8), x)
        return leave(out, self._context)

    def costs(self, workload: Workload) -> Costs:
        """Keeps its input."""
        found = _product(self.weight, workload, self._context, kept=workload.tokens, fp8=self.fp8)
        return found + costs_of(self.lora, workload)


class ReplicatedLinear(LinearBase):
    """``[…, in] -> […, out]`` outside the regions, for layers too small to be split: every rank holds the whole weight.

    ``partial_grad``: axes on which ranks apply it to parts of the data; default: those that split the sequence.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: ModelContext,
        *,
        init: Initialization,
        partial_grad: tuple[Axis, ...] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._context = context
        partial = partial_under_sequence_parallel(context) if partial_grad is None else partial_grad
        self.weight = make_parameter(Sharding((out_features, in_features), partial_grad=partial), init, context)
        of_outputs = Sharding((out_features,), partial_grad=partial)
        self.bias = make_parameter(of_outputs, Constant(0.0), context) if bias else None
        divided = partial_under_sequence_parallel(context)
        self.fp8 = fp8_linear(context, inputs=divided, grads=divided)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` by the whole weight, which every rank holds."""
        return self.with_adapter(linear(x, self.weight, self.bias, self._context, fp8=self.fp8), x)

    def costs(self, workload: Workload) -> Costs:
        """Keeps its input."""
        found = _product(self.weight, workload, self._context, kept=workload.rows, fp8=self.fp8)
        return found + costs_of(self.lora, workload)


def _product(
    weight: nn.Parameter,
    workload: Workload,
    context: ModelContext,
    *,
    kept: int,
    fp8: Fp8Linear | None = None,
    gathers: bool = False,
) -> Costs:
    """Costs of a product with ``weight`` that keeps ``kept`` rows, and needs memory for the weight's gradient unless it
    is added to others at once.
    """
    outputs, inputs = sharding_of(weight).shape
    width, itemsize = weight.shape[1], workload.itemsize
    flops = 2.0 * outputs * inputs * workload.all_tokens
    rows = kept * width * itemsize if fp8 is None else fp8.bytes_kept(kept, width, itemsize=itemsize, gathers=gathers)
    fuses = fp8 is None and context.weight_gradients.fuses_accumulation
    return Costs.of_product(weight, flops, kept=rows, working=0 if fuses else weight.shape[0] * width * itemsize)


class VocabParallelEmbedding(nn.Module):
    """Token ids ``[b, S]`` to vectors ``[s, b, h]``; each rank holds a range of the vocabulary.

    Local rows beyond the vocabulary exist only to make the ranges equal; no token reaches them.
    """

    looks_up = True

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: ModelContext,
        *,
        init: Initialization,
        pad_multiple: int,
        tied: str | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        shape = (vocab_size, hidden_size)
        sharding = Sharding(shape, {0: "tp"}, pad_multiple=pad_multiple, tied=tied, kind="table")
        self.weight = make_parameter(sharding, init, context)
        self._first = self.weight.shape[0] * context.mesh.rank("tp")

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the ids this rank holds, zeros for others, and leave the region, which sums over the ranks."""
        local = tokens.t() - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._context)

    def costs(self, workload: Workload) -> Costs:
        """Keeps the ids, and a mask of those that other ranks look up."""
        return Costs(kept=9 * workload.tokens)
