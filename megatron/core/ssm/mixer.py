"""What layers with a state have in common: projections, the ways through context parallelism, and generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.training import RecomputeModule
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.sharding import StackedPart
from megatron.core.ssm.heads import wide_type
from megatron.core.ssm.short_convolution import last_rows
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace

Heads = TypeVar("Heads")


class RecurrentMixer(nn.Module, ABC, Generic[Heads]):
    """``in_proj`` gives, of each token, a gate, the rows of a causal convolution and other numbers of heads; what these
    become is normalized with the gate and multiplied by ``out_proj``.

    ``module``: what ``--recompute-modules`` calls what lies between the projections. ``exchange``: what
    context-parallel ranks exchange, heads (a2a) or states. ``Heads``: parameters of the heads that a call computes.
    """

    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear

    def __init__(self, place: BranchPlace, *, module: RecomputeModule, exchange: str) -> None:
        super().__init__()
        self.number, self._context, self._exchange = place.number, place.context, exchange
        self._wide, self._recomputes = wide_type(place.context), module in place.recompute

    def _projection_of(self, place: BranchPlace, parts: Sequence[StackedPart]) -> ColumnParallelLinear:
        model, rows = place.stack.model, sum(part.rows for part in parts)
        init = input_init(model)
        return ColumnParallelLinear(model.hidden_size, rows, place.context, init=init, bias=False, parts=tuple(parts))

    def _output_of(self, place: BranchPlace, width: int) -> RowParallelLinear:
        init, hidden = output_init(place.stack), place.stack.model.hidden_size
        return RowParallelLinear(width, hidden, place.context, init=init, bias=False)

    def _kept_of_a_text(self, taps: int, channels: int, state: tuple[int, ...]) -> Slotted:
        """The last rows before the convolution, and the state of each head."""
        shapes = {"conv": (taps - 1, channels), "state": state}
        return Slotted(shapes, {"conv": self._context.dtype, "state": self._wide})

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``, through ``[S, b, d/tp]``."""
        projected = self.in_proj(x)
        if inputs.cache is not None:
            mixed = inputs.cache.advance(self.number, self._advance, projected)
        elif self._recomputes and self.training:
            mixed = recomputed(self._mix, projected, inputs.document_ids)
        else:
            mixed = self._mix(projected, inputs.document_ids)
        out: Tensor = self.out_proj(mixed)
        return out

    def _mix(self, projected: Tensor, document_ids: Tensor | None) -> Tensor:
        """What is between the projections: [s, b, projected] -> [s, b, d]."""
        gate, rows, rest = self._parts(projected)
        if self._context.mesh.size("cp") == 1:
            y, _ = self._recur(rows, rest, self._own_heads(), document_ids)
        elif self._exchange == "a2a":
            y = self._with_heads_split(projected, document_ids)
        else:
            y = self._with_states_passed(rows, rest, document_ids)
        return self._normalized(y, gate)

    def _advance(self, states: States, projected: Tensor) -> tuple[Tensor, States]:
        """Tokens [t, n, projected] of n texts to [t, n, d], and the states behind them."""
        gate, rows, rest = self._parts(projected)
        y, state = self._recur(rows, rest, self._own_heads(), None, states)
        return self._normalized(y, gate), {"conv": last_rows(states["conv"], rows.transpose(0, 1)), "state": state}

    @abstractmethod
    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, the rows of the convolution and the other numbers of heads, [s, b, …] each."""

    @abstractmethod
    def _own_heads(self) -> Heads:
        """Parameters of all heads of this rank."""

    @abstractmethod
    def _recur(
        self, rows: Tensor, rest: Tensor, heads: Heads, document_ids: Tensor | None, states: States | None = None
    ) -> tuple[Tensor, Tensor]:
        """Results [l, b, d] and the last state, of whole sequences [l, b, …]. ``states``: what came before."""

    @abstractmethod
    def _with_heads_split(self, projected: Tensor, document_ids: Tensor | None) -> Tensor:
        """Results [s, b, d] of this rank's tokens: each context-parallel rank computes the whole sequence for its
        heads.
        """

    @abstractmethod
    def _with_states_passed(self, rows: Tensor, rest: Tensor, document_ids: Tensor | None) -> Tensor:
        """Results [s, b, d] of this rank's tokens, whose two runs begin with zero states; what came before is added."""

    @abstractmethod
    def _normalized(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of results."""
