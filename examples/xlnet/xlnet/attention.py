"""Two-stream relative attention with memory (Yang et al. 2019, arXiv:1906.08237; Dai et al. 2019, arXiv:1901.02860).

The rows of a segment are its S tokens (the content stream) and, behind them, its P predicted places (the query stream).
Both have the same weights and see the same keys; which keys a row sees is all that differs. So two streams are one
attention with more queries than keys. The segments of a sample lie side by side in the batch, and the memory of one is
what the layer was given for those before it, without a gradient: nothing is carried from batch to batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.attention import AttentionRequest
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, make_parameter
from megatron.core.tensor_parallel.linear import linear
from megatron.core.transformer.attention import Attention, AttentionScope
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from xlnet.config import XLNetConfig

if TYPE_CHECKING:
    from megatron.core.transformer.place import BranchPlace


@dataclass(frozen=True)
class Segments:
    """Sizes of a sample: segments, tokens and predicted places of each, and hidden states in a segment's memory."""

    count: int
    length: int
    predicted: int
    memory: int

    @property
    def rows(self) -> int:
        """Rows of a segment in both streams."""
        return self.length + self.predicted

    @property
    def keys(self) -> int:
        """Keys of a row, seen or not."""
        return self.memory + self.length

    @property
    def distances(self) -> int:
        """Distances from a row to a key, from ``1 - length`` on."""
        return self.keys + self.length - 1

    def memory_places(self, device: torch.device) -> Tensor:
        """Places in the sample of the tokens in each segment's memory [count, memory]; negative before its first."""
        starts = self.length * torch.arange(self.count, device=device).unsqueeze(1)
        return starts - self.memory + torch.arange(self.memory, device=device)


@dataclass(frozen=True, kw_only=True)
class SegmentInputs(LayerInputs):
    """Inputs that all layers share, for the rows and keys of ``b`` segments; ``segments`` are the sizes of a sample.

    ``distance`` [b, 1, rows, keys]: index of each pair's distance in ``encodings`` [distances, h]; ``same``: whether
    both are of one document; ``unseen``: which keys a row doesn't see.
    """

    segments: Segments
    encodings: Tensor
    distance: Tensor
    same: Tensor
    unseen: Tensor


class TwoStreamAttention(Attention):
    """``softmax((q+u)·k + (q+v)·r + (q+w)·s)`` over memory and segment, for the rows of both streams.

    ``k`` and the values come from the content stream, ``r`` from the sinusoid of the distance, and ``s`` is one of two
    learned vectors: both tokens are of one document, or not. Heads are split over tensor-parallel ranks.
    """

    def __init__(self, place: BranchPlace, *, own: XLNetConfig) -> None:
        super().__init__(place, causal=False)
        config, context, width = self._config, self._context, self._width
        self._own = own
        init = input_init(config)
        self.linear_q = self._columns(width)
        self.linear_kv = ColumnParallelLinear(
            config.hidden_size,
            2 * width,
            context,
            init=init,
            bias=config.add_qkv_bias,
            parts=(StackedPart(width),) * 2,
        )
        self.position_weight = make_parameter(Sharding((width, config.hidden_size), {0: "tp"}), init, context)
        self.content_bias, self.position_bias, self.document_bias = (
            make_parameter(Sharding((width,), {0: "tp"}), init, context) for _ in range(3)
        )
        self.document_embedding = make_parameter(Sharding((2, width), {1: "tp"}), init, context)
        self._add_output()

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``, for the rows of ``b`` segments."""
        assert isinstance(inputs, SegmentInputs)
        sizes, given = inputs.segments, x
        query = self._heads(self.linear_q(x))
        if sizes.memory and sizes.count > 1:
            by_sample = x.detach().view(x.shape[0], -1, sizes.count, x.shape[2])
            earlier = by_sample[:, :, :-1].flatten(1, 2)
            given = torch.cat((x, earlier), dim=1)
        key, value = (_with_memory(self._heads(each), sizes) for each in self.linear_kv(given).chunk(2, dim=-1))
        position = linear(inputs.encodings, self.position_weight, None, self._context)
        if self._recompute_core and self.training:
            mixed = recomputed(self._mixed, query, key, value, position, inputs)
        else:
            mixed = self._mixed(query, key, value, position, inputs)
        out: Tensor = self.linear_proj(mixed)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self._head_dim)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, inputs: SegmentInputs) -> Tensor:
        """``[rows, b, n, d]``, keys and values ``[keys, b, n, d]``, to ``[rows, b, n·d]``.

        Every row has its own bias on the scores, so the heads of all segments count as heads of one sample.
        """
        rows, batch, heads, width = query.shape
        content, place, document = (
            each.view(heads, width) for each in (self.content_bias, self.position_bias, self.document_bias)
        )
        by_distance = torch.einsum("rbnd,tnd->bnrt", query + place, self._heads(position.unsqueeze(0))[0])
        bias = by_distance.gather(3, inputs.distance.expand(-1, heads, -1, -1))
        by_document = torch.einsum("rbnd,cnd->bnrc", query + document, self.document_embedding.view(2, heads, width))
        bias = bias + torch.where(inputs.same, by_document[..., :1], by_document[..., 1:])
        bias = (bias * self._scale).masked_fill(inputs.unseen, torch.finfo(bias.dtype).min)
        asked, keys, values = (each.flatten(1, 2).unsqueeze(1) for each in (query + content, key, value))
        mixed = self._attend(asked, keys, values, inputs.rng_key, AttentionScope(bias=bias.flatten(0, 1)))
        return mixed.view(rows, batch, heads * width)

    @override
    def request(self, workload: Workload) -> AttentionRequest:
        """The request of rows of both streams for memory and segment, with a bias of every score."""
        sizes = self._sizes(workload)
        found = super().request(workload)
        return dataclasses.replace(found, query_length=sizes.rows, key_length=sizes.keys, bias=True)

    def costs(self, workload: Workload) -> Costs:
        """Costs of the matmuls, of biases of every row for every key and distance, and of attention."""
        sizes, width = self._sizes(workload), self._queries
        remembers = dataclasses.replace(workload, batch=2 * workload.batch - workload.batch // sizes.count)
        projected = remembers if sizes.memory else workload
        matmuls = total_of((self.linear_q, self.linear_proj), workload)
        matmuls += costs_of(self.linear_kv, projected)
        encodings = 2.0 * sizes.distances * self._width * self._config.hidden_size
        matmuls += Costs.of_product(self.position_weight, encodings, kept=sizes.distances * width * workload.itemsize)
        pairs = workload.batch * sizes.rows * width // self._head_dim
        by_distance = pairs * sizes.distances * workload.itemsize
        biases = pairs * sizes.keys * workload.itemsize
        flops = 2.0 * workload.batch * sizes.rows * self._width * (sizes.distances + 2)
        tensors = workload.tokens * 4 * width + 2 * workload.batch * sizes.keys * width
        return self._with_scores(
            dataclasses.replace(
                matmuls,
                flops=matmuls.flops + flops,
                kept=matmuls.kept + (0 if self._recompute_core else biases),
                working=matmuls.working + 2 * by_distance + 3 * biases,
            ),
            workload,
            keys=sizes.keys,
            projected=tensors * workload.itemsize,
            is_padded=False,
        )

    def _sizes(self, workload: Workload) -> Segments:
        own = self._own
        length = workload.length - own.num_predict
        return Segments(own.segments_per_sample, length, own.num_predict, own.mem_len)


def _with_memory(x: Tensor, sizes: Segments) -> Tensor:
    """Keys or values with those of each segment's memory in front: ``[keys, b, n, d]``.

    ``x`` ``[rows, …, n, d]``: those of ``b`` segments, then those of the earlier segments of each sample, without
    gradient. Memory before the sample's first token holds the values of another token, which is masked.
    """
    if not sizes.memory:
        return x[: sizes.length]
    if sizes.count == 1:
        return torch.cat((x.new_zeros(sizes.memory, *x.shape[1:]), x[: sizes.length]))
    samples = x.shape[1] // (2 * sizes.count - 1)
    batch, tokens = samples * sizes.count, x[: sizes.length]
    by_sample = tokens[:, batch:].unflatten(1, (samples, -1))  # type: ignore[no-untyped-call]  # in torch's stubs
    stream = by_sample.permute(2, 0, 1, 3, 4).flatten(0, 1)  # [earlier tokens, samples, n, d]
    places = sizes.memory_places(x.device).clamp(min=0)
    memory = stream[places].permute(1, 2, 0, 3, 4).flatten(1, 2)  # [segments, M, samples, n, d] -> [M, b, n, d]
    return torch.cat((memory, tokens[:, :batch]))
