"""The experts of a layer: one stacked parameter for each matrix, whatever ranks hold of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe.fp8_grouped_linear import Fp8GroupedLinear
from megatron.core.moe.grouped_linear import GroupedLinear, rows_of_groups
from megatron.core.moe.low_rank import ExpertAdapter
from megatron.core.ops.activation import activation, gated_activation, gated_gradients
from megatron.core.ops.grouped_matmul import Groups, choose
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, sharding_of
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer
from megatron.core.tensor_parallel.initialize import Constant, Initialization
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.place import BranchPlace

_REPLICAS: tuple[Axis, ...] = ("edp",)  # over which the gradients of an expert are summed


class StackedLinear(nn.Module):
    """Parameters of one linear layer of every expert: ``shape`` is that of the weight, experts first.

    ``split``: dimensions and their axes. ``bias_dims``: those of the bias among the weight's; none: no bias.
    """

    fp8: Fp8Quantizer | None = None

    def __init__(
        self,
        shape: tuple[int, ...],
        split: dict[int, Axis],
        context: ModelContext,
        *,
        init: Initialization,
        bias_dims: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self._context = context
        self.lora: ExpertAdapter | None = None
        self.weight = make_parameter(Sharding(shape, split, reduce=_REPLICAS), init, context)
        held = {place: split[dim] for place, dim in enumerate(bias_dims) if dim in split}
        partial_grad: tuple[Axis, ...] = () if "etp" in held.values() else ("etp",)
        bias_shape = tuple(shape[dim] for dim in bias_dims)
        bias = Sharding(bias_shape, held, reduce=_REPLICAS, partial_grad=partial_grad, kind="vector")
        self.bias = make_parameter(bias, Constant(0.0), context) if bias_dims else None

    def adapt(self, settings: LoraConfig, place: str, parts: frozenset[str]) -> None:
        """Add an adapter of every expert. ``place``: of the layer in the model. ``parts``: its matrices, "" for all."""
        self.lora = ExpertAdapter(self.weight, settings, self._context, place=place, parts=parts)


class Experts(nn.Module):
    """y = W2·(p·act(W1·x)) of the experts that this rank holds, gated or not, for rows in the order of the experts.

    A row's weight p multiplies the activation, not the output, which then needn't be kept for p's gradient. With
    biases p multiplies that of W2 as well. With "moe_act" among the place's recomputed modules the activation is
    computed again for the backward pass.
    """

    def __init__(self, moe: MoEConfig, place: BranchPlace) -> None:
        super().__init__()
        model, context = place.stack.model, place.context
        assert moe.num_experts is not None
        self._context, self._choices = context, moe.moe_router_topk
        self._keeps_activation = "moe_act" not in place.recompute
        experts, width, hidden, matrices = moe.num_experts, moe.moe_ffn_hidden_size, model.hidden_size, 1 + model.gated
        self.linear_fc1 = StackedLinear(
            (experts, matrices, width, hidden),
            {0: "ep", 2: "etp"},
            context,
            init=input_init(model),
            bias_dims=(0, 1, 2) if model.add_mlp_bias else (),
        )
        self.linear_fc2 = StackedLinear(
            (experts, hidden, width),
            {0: "ep", 2: "etp"},
            context,
            init=output_init(place.stack),
            bias_dims=(0, 1) if model.add_mlp_bias else (),
        )
        for parameter in self.parameters():
            parameter.active_share = moe.moe_router_topk / experts  # type: ignore[attr-defined]
        held = width // context.mesh.size("etp")
        choice = choose(context.dtype, context.device, (hidden, held), moe.moe_matmul_backend)
        self._activation = _Activation(model)
        self._linear = GroupedLinear(choice.backend, context)
        if context.low_precision.serves(context.layer):
            first = Fp8Quantizer(context, inputs=(), weights=("etp",), grads=("etp",))
            second = Fp8Quantizer(context, inputs=("etp",), weights=("etp",), grads=())
            self.linear_fc1.fp8, self.linear_fc2.fp8 = first, second
            quantizers: dict[Tensor, Fp8Quantizer] = {self.linear_fc1.weight: first, self.linear_fc2.weight: second}
            self._linear = Fp8GroupedLinear(choice.backend, context, quantizers=quantizers)

    @override
    def forward(self, rows: Tensor, weights: Tensor, groups: Groups, *, share: int) -> Tensor:
        """``[n, h]`` and ``[n]`` to ``[n, h]``; with expert tensor parallelism a part of the sum.

        ``share``: rows that this rank would have if choices were balanced. Many more than that are computed in pieces,
        whose activations are computed again in the backward pass: imbalance then costs time, and little memory.
        """
        limit = rows_at_once(share)
        if len(rows) <= limit:
            return self.compute(rows, weights, groups)
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # else autograd doesn't see the weights
        out: Tensor = _InPieces.apply(rows, weights, self, groups, limit, *self.biases)  # type: ignore[no-untyped-call]
        return out

    @property
    def _layers(self) -> tuple[StackedLinear, StackedLinear]:
        return self.linear_fc1, self.linear_fc2

    @property
    def biases(self) -> list[Tensor]:
        """The biases of both layers, where there are any."""
        return [each.bias for each in (self.linear_fc1, self.linear_fc2) if each.bias is not None]

    @contextmanager
    def one_gradient(self) -> Iterator[None]:
        """In the block, several calls of ``compute`` give each weight one gradient, their sum."""
        with ExitStack() as stack:
            for linear in (self._linear, *(layer.lora.linear for layer in self._layers if layer.lora is not None)):
                stack.enter_context(linear.one_gradient())
            yield

    def compute(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """All rows at once."""
        first, second = self.linear_fc1, self.linear_fc2
        inner = self._linear(rows, first.weight, groups)
        if first.lora is not None:
            inner = inner + first.lora.add(rows, groups)
        if first.bias is not None:
            inner = inner + rows_of_groups(first.bias.flatten(1), groups, rows=len(rows))
        scales = weights.to(inner.dtype).unsqueeze(-1)
        out = self._linear.of_activation(
            inner, scales, second.weight, groups, activation=self._activation, keeps_activation=self._keeps_activation
        )
        if second.lora is not None:
            out = out + second.lora.add(self._activation(inner) * scales, groups)
        if second.bias is None:
            return out
        mine = second.bias * (self._context.mesh.rank("etp") == 0)
        return out + rows_of_groups(mine, groups, rows=len(rows)) * scales

    def of_all_tokens(self, x: Tensor, shares: Tensor) -> Tensor:
        """``[t, h]`` to ``[t, h]`` without gradient: every expert computes every token, and ``shares`` [t, E], zero
        for experts that a token hasn't chosen, add them up. Costs as many times more as there are experts for a choice.
        """
        first, second, scales = self.linear_fc1, self.linear_fc2, shares.t().unsqueeze(-1)
        inner = torch.matmul(x, first.weight.flatten(1, 2).transpose(1, 2))  # [E, t, f]
        if first.bias is not None:
            inner = inner + first.bias.flatten(1).unsqueeze(1)
        out = torch.matmul(self._activation(inner) * scales, second.weight.transpose(1, 2))
        if second.bias is not None:
            out = out + second.bias.unsqueeze(1) * scales
        return out.sum(0)

    def costs(self, workload: Workload) -> Costs:
        """Costs with rows that all ranks share evenly. Keeps the input, the activation's input and, unless it is
        recomputed, its output.

        Working memory is the largest of: gradients that are reordered from tokens to experts; gradients of the
        activation beside the recomputed activation, with the second weight's gradient; gradients of the first matmul,
        after the second has freed its inputs. Where gradients are added expert by expert, a weight's is held for one.
        """
        mesh, (_, matrices, width, hidden) = self._context.mesh, sharding_of(self.linear_fc1.weight).shape
        rows = workload.tokens // mesh.size("tp") * self._choices * mesh.size("etp")
        each, given = width // mesh.size("etp") * workload.itemsize, hidden * workload.itemsize
        inner = (matrices + self._keeps_activation) * each
        flops = 2.0 * (matrices + 1) * width * hidden * self._choices * workload.all_tokens
        first, second = (layer.weight.numel() * workload.itemsize for layer in (self.linear_fc1, self.linear_fc2))
        quantizer = self.linear_fc1.fp8
        if quantizer is not None and quantizer.wgrad and self._context.weight_gradients.fuses_accumulation:
            first, second = (size // len(self.linear_fc1.weight) for size in (first, second))
        again = 0 if self._keeps_activation else each
        freed = 0 if workload.splits_backward else inner
        working = max(
            3 * rows * given * (mesh.size("ep", "etp") > 1),
            rows * (given + again + each) + max(second, rows * (matrices + 1) * each),
            rows * (matrices * each - freed) + max(first, rows * given),
        )
        found = Costs.of_product(self.linear_fc1.weight, flops, kept=rows * (given + inner), working=working)
        return found + self._costs_of_adapters(rows, workload)

    def _costs_of_adapters(self, rows: int, workload: Workload) -> Costs:
        """What adapters keep of ``rows``: what is between their factors, and the second layer's input."""
        found, tokens = Costs(), self._choices * workload.all_tokens
        for layer in self._layers:
            if layer.lora is not None:
                outputs, inputs = sharding_of(layer.weight).shape[-2:]
                kept = len(layer.lora) * layer.lora.rank + (layer is self.linear_fc2) * layer.weight.shape[-1]
                flops = 2.0 * len(layer.lora) * layer.lora.rank * (inputs + outputs) * tokens
                found += Costs(flops, rows * kept * workload.itemsize)
        return found


@dataclass(frozen=True)
class _Activation:
    """The activation of ``model``, gated or not."""

    model: ModelConfig

    def __call__(self, inner: Tensor) -> Tensor:
        """The activation of the first layer's result [n, …]: [n, f]."""
        kind = self.model.nonlinearity
        return gated_activation(inner, kind, **self._limits) if self.model.gated else activation(inner, kind)

    def gradients(self, grad: Tensor, inner: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``inner`` and of ``scales`` [n, 1], from that of ``scales`` times the activation."""
        if self.model.gated:
            return gated_gradients(grad, inner, scales, self.model.nonlinearity, **self._limits)
        with torch.enable_grad():
            given = inner.detach().requires_grad_()
            activated = activation(given, self.model.nonlinearity)
        grad_scales = (grad * activated.detach()).sum(-1, keepdim=True, dtype=scales.dtype)
        return torch.autograd.grad(activated, given, grad.mul_(scales))[0], grad_scales

    @property
    def _limits(self) -> dict[str, Any]:
        return {"limit": self.model.activation_func_clamp_value, "offset": self.model.glu_linear_offset}


def rows_at_once(share: int) -> int:
    """The most rows that experts compute at once on a rank that would have ``share`` if choices were balanced."""
    return max(2 * share, 1024)


class _InPieces(torch.autograd.Function):
    """Experts, a run of rows after the other, with nothing but the rows kept.

    ``GroupedLinear`` accumulates the gradients of weights, autograd those of biases.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, experts: Experts, groups: Groups, limit: int, *biases: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.experts, ctx.groups, ctx.limit, ctx.biases = experts, groups, limit, biases
        out = torch.empty_like(rows)
        for start in range(0, len(rows), limit):
            piece = slice(start, min(start + limit, len(rows)))
            out[piece] = experts.compute(rows[piece], weights[piece], groups.within(piece.start, piece.stop))
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        experts: Experts = ctx.experts
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        sums = {bias: torch.zeros_like(bias) for bias in ctx.biases if bias.requires_grad}
        with experts.one_gradient():
            for start in range(0, len(rows), ctx.limit):
                piece = slice(start, min(start + ctx.limit, len(rows)))
                given = (rows[piece].detach().requires_grad_(), weights[piece].detach().requires_grad_())
                with torch.enable_grad():
                    out = experts.compute(*given, ctx.groups.within(piece.start, piece.stop))
                found = torch.autograd.grad(out, [*given, *sums], grad[piece])
                grad_rows[piece], grad_weights[piece] = found[:2]
                for total, each in zip(sums.values(), found[2:]):
                    total += each
        return grad_rows, grad_weights, None, None, None, *(sums.get(each) for each in ctx.biases)
