"""Self-attention and cross-attention with heads split over tensor-parallel ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.parallel import CpCommType
from megatron.core.context_parallel.attention import attention, heads_split_over
from megatron.core.context_parallel.visible import Documents
from megatron.core.ops.attention import AttentionOptions, AttentionRequest, LayerBackend
from megatron.core.ops.attention.chunked import bytes_of_scores
from megatron.core.ops.attention.masks import alibi_slopes
from megatron.core.ops.output_gate import sigmoid_gated
from megatron.core.ops.rotary import apply_rotary
from megatron.core.ops.text_cache import Paged, TextCache, TextState, WholeText
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.sharding import Sharding, SharedRows
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, make_parameter
from megatron.core.transformer.initialization import input_init, output_init, table_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import HeadNorm, Norm
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.positions import rotary_of


@dataclass(frozen=True)
class AttentionScope:
    """What queries may attend to: masks and bias of ``AttentionOptions``, the cache of ``LayerInputs``."""

    document_ids: Tensor | None = None
    documents: Documents | None = None
    attention_mask: Tensor | None = None
    bias: Tensor | None = None
    cache: TextCache | None = None
    ahead: Tensor | None = None


class Attention(nn.Module):
    """Attention over this rank's heads and the output projection; a subclass projects queries, keys and values.

    Key and value weights are fused and grouped by key/value head, ``[k, v]`` for each, so that a rank's part is
    contiguous (grouped-query attention: arXiv:2305.13245). With fewer key/value heads than ranks, those that share one
    divide its query heads, and each computes its key and value. ``purpose``: in the names of random streams.

    A subclass makes its matmuls and then calls ``_add_output``, so that parameters come in the order of their use.
    """

    def __init__(self, place: BranchPlace, *, causal: bool, purpose: str = "scores") -> None:
        super().__init__()
        config, context = place.stack.model, place.context
        self._config, self._context, self._output_init = config, context, output_init(place.stack)
        self.number, self.is_causal = place.number, causal
        self._recompute, self._recompute_core = place.recompute, "core_attn" in place.recompute
        self._purpose = purpose
        ranks = context.mesh.size("tp")
        self._groups = max(1, config.num_query_groups // ranks)
        self._queries_per_group = config.num_attention_heads // ranks // self._groups
        self._head_dim = config.kv_channels
        self._width = self._value_width = config.num_attention_heads * config.kv_channels
        self._scale = 1.0 / math.sqrt(config.kv_channels) if config.softmax_scale is None else config.softmax_scale
        self._backend = LayerBackend(config.attention_backend)
        self._window: tuple[int, int] | None = None
        self._slopes: Tensor | None = None
        self._cached_options: AttentionOptions | None = None
        self.sees_keys_and_values: Callable[[Tensor, Tensor], None] | None = None
        """Called with the keys and values [T, b, g, d] of each forward pass, as a cache would keep them."""

    def _add_head_norms(self) -> None:
        """Norms of query and key heads, where the model has them."""
        config, context = self._config, self._context
        queries, keys = config.num_attention_heads, config.num_query_groups
        self.q_layernorm: Norm | None = HeadNorm(queries, config, context) if config.has_qk_norms else None
        self.k_layernorm = HeadNorm(keys, config, context) if config.has_qk_norms else None

    def _add_output(self) -> None:
        """Sinks, where the model has them, and the last matmul."""
        config, context = self._config, self._context
        heads = Sharding((config.num_attention_heads,), {0: "tp"})
        has_sinks = config.softmax_type == "learnable"
        self.sinks = make_parameter(heads, table_init(config), context) if has_sinks else None
        self.linear_proj = RowParallelLinear(
            self._value_width,
            config.hidden_size,
            context,
            init=self._output_init,
            bias=config.add_attention_output_bias,
        )

    def _columns(self, outputs: int, *, queries: Sequence[int] = (), keys: bool = False) -> ColumnParallelLinear:
        """A matmul to ``outputs``. ``keys``: keys and values are the last rows of each key/value head and serve all its
        queries. ``queries``: numbers of the matrices to which the other rows of a head belong, in turn.
        """
        config, width = self._config, self._config.kv_channels
        first = max(queries, default=-1) + 1
        heads = tuple((matrix, width) for matrix in (*queries, first, first + 1))
        return ColumnParallelLinear(
            config.hidden_size,
            outputs,
            self._context,
            init=input_init(config),
            bias=config.add_qkv_bias,
            shared=SharedRows(config.num_query_groups, 2 * width, heads) if keys else None,
        )

    def _clipped(self, projected: Tensor) -> Tensor:
        limit = self._config.clip_qkv
        return projected if limit is None else projected.clamp(-limit, limit)

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stream: StreamKey,
        scope: AttentionScope,
        *,
        gate: Tensor | None = None,
    ) -> Tensor:
        """``[S, b, n, d]``, keys and values ``[T, b, g, d]``, to ``[s, b, h]``. ``gate`` [S, b, n·d]: of the heads'
        results.
        """
        if self._recompute_core and self.training:
            mixed = recomputed(self._attend, query, key, value, stream, scope)
        else:
            mixed = self._attend(query, key, value, stream, scope)
        if gate is not None:
            mixed = sigmoid_gated(mixed, gate)
        out: Tensor = self.linear_proj(mixed)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, stream: StreamKey, scope: AttentionScope) -> Tensor:
        config = self._config
        drop = config.attention_dropout if self.training else 0.0
        if self.sees_keys_and_values is not None:
            self.sees_keys_and_values(key, value)
        if drop:  # seeded here, so that recomputing the scores alone draws the same mask
            self._context.rng.enter(stream, f"layer {self.number} {self._purpose}")
        if scope.cache is not None:
            if self._cached_options is None:  # they are the same at every step
                self._cached_options = self._options(query, scope, drop=drop, window=self._window)
            return scope.cache.attend(self.number, query, key, value, self._cached_options)
        window = self._window_over(key.shape[0] * self._context.mesh.size("cp"))
        return attention(
            query,
            key,
            value,
            self._options(query, scope, drop=drop, window=window),
            context=self._context,
            comm_type=self._context.cp_comm_type(self.number),
            documents=scope.documents,
            backend=self._backend,
            **self._expansion(),
        )

    def _expansion(self) -> dict[str, Any]:
        """Arguments of ``attention`` where ranks send something narrower than keys and values, to compute these from
        it.
        """
        return {}

    def _options(
        self, query: Tensor, scope: AttentionScope, *, drop: float, window: tuple[int, int] | None
    ) -> AttentionOptions:
        off_by_one = self._config.softmax_type == "off-by-one"
        return AttentionOptions(
            causal=self.is_causal,
            window=window,
            scale=self._scale,
            soft_cap=self._config.attn_logit_softcapping,
            slopes=self._slopes,
            sinks=query.new_zeros(query.shape[2]) if off_by_one else self.sinks,
            dropout=drop,
            generator=self._context.rng.split,
            document_ids=scope.document_ids,
            ahead=scope.ahead,
            attention_mask=scope.attention_mask,
            bias=scope.bias,
            softmax_in_fp32=self._config.attention_softmax_in_fp32,
        )

    @property
    def text_state(self) -> TextState:
        """Keys and values of each token; where attention is not causal, a token changes what those before it see."""
        return Paged(self._groups, self._head_dim, self._head_dim) if self.is_causal else WholeText()

    def request(self, workload: Workload) -> AttentionRequest:
        """The call that ``forward`` makes in training, over whole sequences."""
        config = self._config
        return AttentionRequest(
            device=self._context.device,
            dtype=self._context.dtype,
            query_length=workload.length,
            key_length=workload.length,
            head_width=self._head_dim,
            causal=self.is_causal,
            window=self._window_over(workload.length),
            soft_cap=config.attn_logit_softcapping is not None,
            slopes=self._slopes is not None,
            sinks=config.softmax_type != "vanilla",
            dropout=config.attention_dropout,
            document_ids=workload.has_documents,
            ahead=workload.sees_ahead and self.is_causal,
            attention_mask=workload.has_padding,
            bias=config.position_embedding_type == "relative",
            softmax_in_fp32=config.attention_softmax_in_fp32,
        )

    def _window_over(self, keys: int) -> tuple[int, int] | None:
        """The window, if a sequence of so many keys is longer."""
        if self._window is None or (self._window[0] >= keys - 1 and (self.is_causal or self._window[1] >= keys - 1)):
            return None
        return self._window

    def _with_scores(self, matmuls: Costs, workload: Workload, *, keys: int, projected: int, is_padded: bool) -> Costs:
        """Costs of ``matmuls``, and of attention to ``keys`` keys between them, which is given ``projected`` bytes.

        A kernel keeps its inputs and one fp32 number for each query, with padding its result, too; others keep every
        score. Where it is recomputed only its inputs are kept.
        """
        ranks, kind = self._context.mesh.size("cp"), self._comm_type
        if self._keeps_scores and kind == "a2a":
            inside = self._scores(workload, keys=keys)
        else:
            # The kernel's result is the projection's input, unless that is another tensor or a copy in 8 bits.
            copies = self._context.keeps_bytes and self._width == self._value_width
            keeps_result = self._config.attention_dropout == 0 and (copies or (is_padded and kind == "a2a"))
            inside = workload.tokens * (
                4 * self._queries // self._head_dim + self._queries * workload.itemsize * keeps_result
            )
        kept, again = (projected, inside) if self._recompute_core else (projected + inside, 0)
        # Gradients of queries, keys and values, and the keys of other ranks with theirs.
        exchanged = 0 if kind == "a2a" else 2 * ranks if kind == "all_gather" else 4
        key_rows = workload.batch * keys // ranks
        of_keys = key_rows * (2 * (self._keys + self._values) + exchanged * self._sent)
        gradients = (2 * workload.tokens * self._queries + of_keys) * workload.itemsize
        flops = 2.0 * (self._width + self._value_width) * workload.all_tokens * self._keys_of_a_query(keys)
        working = matmuls.working + gradients + again + self._scores_at_once(workload, keys=keys)
        return dataclasses.replace(matmuls, flops=matmuls.flops + flops, kept=matmuls.kept + kept, working=working)

    def _keys_of_a_query(self, keys: int) -> float:
        """The mean over all queries; half of the keys where attention is causal."""
        window = self._window_over(keys)
        if window is None:
            return keys / 2 if self.is_causal else keys
        sides = [window[0], 0 if self.is_causal else window[1]]
        # The first ``side`` queries, or the last, see fewer keys on that side.
        return 1 + sum(side - side * (side + 1) / (2 * keys) for side in (min(each, keys - 1) for each in sides))

    def _scores(self, workload: Workload, *, keys: int) -> int:
        """Bytes of explicit scores of all pairs; with dropout also of the scores after it and its mask."""
        wide = 4 if self._config.attention_softmax_in_fp32 else workload.itemsize
        rounded = workload.itemsize if wide != workload.itemsize else 0
        after_softmax = 1 + workload.itemsize if self._config.attention_dropout > 0 else rounded
        return workload.tokens * keys * (self._queries // self._head_dim) * (wide + after_softmax)

    def _scores_at_once(self, workload: Workload, *, keys: int) -> int:
        """Bytes of scores that the backward pass computes again at a time with dropout, which torch's kernels lack, and
        of sums of narrow gradients over those times.
        """
        is_chunked = self._config.attention_backend in ("auto", "chunked") and not self._keeps_scores
        if self._config.attention_dropout == 0 or not is_chunked:
            return 0
        sums = 4 * workload.batch * keys * (self._keys + self._values) * (workload.itemsize < 4)
        return sums + bytes_of_scores(
            heads=workload.batch * self._queries // self._head_dim,
            queries=workload.tokens // workload.batch,
            keys=keys,
            itemsize=workload.itemsize,
            is_banded=self.is_causal or self._window_over(keys) is not None,
        )

    @property
    def _keeps_scores(self) -> bool:
        """Whether scores are kept for the backward pass; with dropout, chunks in the narrow type are recomputed."""
        config, narrow = self._config, self._context.dtype.itemsize < 4
        widened = config.attention_softmax_in_fp32 and narrow
        return config.attention_backend == "eager" or (widened and config.attention_dropout > 0)

    @property
    def _comm_type(self) -> CpCommType:
        """How this layer exchanges keys with other ranks; "a2a" without context parallelism."""
        return self._context.cp_comm_type(self.number) if self._context.mesh.size("cp") > 1 else "a2a"

    @property
    def _sent(self) -> int:
        """Width of what a rank sends to others for a token, where keys are sent."""
        return self._keys + self._values

    @property
    def _queries(self) -> int:
        """Width of this rank's queries."""
        return self._groups * self._queries_per_group * self._head_dim

    @property
    def _keys(self) -> int:
        """Width of this rank's keys."""
        return self._groups * self._head_dim

    @property
    def _values(self) -> int:
        """Width of this rank's values."""
        return self._keys


class SelfAttention(Attention):
    """Query, key and value from one matmul, whose weight has ``[q … q, k, v]`` for each key/value head; with
    ``--attention-output-gate`` ``[q, gate, … q, gate, k, v]``, so that ranks may divide the heads of a group.
    """

    def __init__(self, place: BranchPlace) -> None:
        super().__init__(place, causal=place.stack.causal)
        config, context, number = place.stack.model, place.context, place.number
        self._rotary = rotary_of(config, number)
        self._is_gated = config.attention_output_gate
        query = (0, 1) if self._is_gated else (0,)
        queries = query * (config.num_attention_heads // config.num_query_groups)
        rows = len(queries) + 2
        self.linear_qkv = self._columns(config.num_query_groups * rows * config.kv_channels, queries=queries, keys=True)
        self._window = config.window_of(number)
        if config.position_embedding_type == "alibi":
            heads, mesh = alibi_slopes(config.num_attention_heads), context.mesh
            heads = heads * self._scale if config.scale_alibi else heads
            self._slopes = heads.chunk(mesh.size("tp"))[mesh.rank("tp")].to(context.device)
        self._add_head_norms()
        self._add_output()

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        fused = self._clipped(self.linear_qkv(x))
        length, batch, _ = fused.shape
        per_group, step = self._queries_per_group, 2 if self._is_gated else 1
        fused = fused.view(length, batch, self._groups, step * per_group + 2, self._head_dim)
        query = fused[..., : step * per_group : step, :].reshape(length, batch, -1, self._head_dim)
        gate = fused[..., 1 : step * per_group : step, :].reshape(length, batch, -1) if self._is_gated else None
        key, value = fused[..., -2, :], fused[..., -1, :]  # [S, b, g, d], queries [S, b, n, d]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self._rotary is not None:
            table, interleaved = inputs.rotary[self._rotary], self._config.rotary_interleaved
            query = apply_rotary(query, table, interleaved=interleaved)
            key = apply_rotary(key, table, interleaved=interleaved)
        documents = inputs.documents if self._context.mesh.size("cp") > 1 else None
        scope = AttentionScope(
            inputs.document_ids, documents, inputs.attention_mask, inputs.bias, inputs.cache, inputs.ahead
        )
        return self._mix(query, key, value, inputs.rng_key, scope, gate=gate)

    def costs(self, workload: Workload) -> Costs:
        """Costs of the matmuls, and of attention of every token to the sequence."""
        has_bias = self._config.position_embedding_type == "relative"
        matmuls = total_of((self.linear_qkv, self.linear_proj), workload)
        return self._with_scores(
            matmuls,
            workload,
            keys=workload.length,
            projected=self._projected(workload),
            is_padded=workload.has_padding and not has_bias,
        )

    @override
    def _scores(self, workload: Workload, *, keys: int) -> int:
        """Bytes of scores: also the inputs of the products of explicit scores (keys repeated for each head), and the
        causal mask.
        """
        wide = 4 if self._config.attention_softmax_in_fp32 else workload.itemsize
        given = workload.tokens * self._queries * (2 * wide + workload.itemsize)
        return super()._scores(workload, keys=keys) + given + keys**2

    def _projected(self, workload: Workload) -> int:
        """Bytes of query, key and value: the fused projection, also before it is clipped, and the copies that rotation,
        norm or grouping make.
        """
        queries, keys, config = self._queries, self._keys, self._config
        gate = queries if self._is_gated else 0  # kept with the result that it multiplies
        clipped = (queries + 2 * keys) * (config.clip_qkv is not None)
        if self._keeps_scores and not self._recompute_core and self._comm_type == "a2a":
            normed = (queries + 2 * keys) * config.has_qk_norms
            return workload.tokens * (normed + clipped + 2 * gate) * workload.itemsize
        moved = self._rotary is not None or config.has_qk_norms
        grouped = config.num_query_groups != config.num_attention_heads
        one_group = self._groups == 1 and not self._is_gated  # its queries lie side by side
        anew = (queries if moved or grouped else 0) + (keys if moved else 0)
        again = queries if grouped and not one_group and config.has_qk_norms else 0
        if heads_split_over(self._comm_type, self._context) > 1:
            # What arrives, and the result that is sent back; norms keep what they were given.
            given = queries + 2 * keys + again if config.has_qk_norms else 0
            return workload.tokens * (2 * queries + 2 * keys + given + clipped + 2 * gate) * workload.itemsize
        return workload.tokens * (queries + 2 * keys + anew + again + clipped + 3 * gate) * workload.itemsize


class CrossAttention(Attention):
    """Attention of the decoder to the encoder's output, without rotary positions."""

    text_state = None  # the cache keeps keys and values of the encoder prompt

    def __init__(self, place: BranchPlace) -> None:
        super().__init__(place, causal=False, purpose="cross scores")
        config = place.stack.model
        self.linear_q = self._columns(self._width)
        self.linear_kv = self._columns(2 * config.num_query_groups * config.kv_channels, keys=True)
        self._add_head_norms()
        self._add_output()

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        query = self._clipped(self.linear_q(x))
        query = query.view(*query.shape[:2], -1, self._head_dim)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        if inputs.cache is not None:
            options = self._options(query, AttentionScope(), drop=0.0, window=None)
            mixed = inputs.cache.attend_encoder(self.number, query, self._keys_and_values, options)
            out: Tensor = self.linear_proj(mixed)
            return out
        assert inputs.encoder_hidden_states is not None, "a decoder that attends to an encoder is given its output"
        key, value = self._keys_and_values(inputs.encoder_hidden_states)
        scope = AttentionScope(attention_mask=inputs.encoder_attention_mask)
        return self._mix(query, key, value, inputs.rng_key, scope)

    def _keys_and_values(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[t, b, h]`` to key and value ``[T, b, g, d]``."""
        fused = self._clipped(self.linear_kv(encoder_hidden_states))
        fused = fused.view(*fused.shape[:2], self._groups, 2, self._head_dim)
        key = fused[..., 0, :]
        return key if self.k_layernorm is None else self.k_layernorm(key), fused[..., 1, :]

    @override
    def request(self, workload: Workload) -> AttentionRequest:
        """The request of attention to the encoder's tokens, without a bias."""
        return dataclasses.replace(
            super().request(workload), key_length=workload.encoder_length, attention_mask=True, bias=False
        )

    def costs(self, workload: Workload) -> Costs:
        """Costs of the matmuls, and of attention of every token to the encoder's; all layers share the encoder's
        output.
        """
        of_encoder, config = workload.of_encoder(), self._config
        shared = costs_of(self.linear_kv, of_encoder)
        shared = shared if self._context.keeps_bytes else dataclasses.replace(shared, kept=0)
        projected = (workload.tokens * self._queries + of_encoder.tokens * 2 * self._keys) * workload.itemsize
        if config.has_qk_norms:
            projected += (workload.tokens * self._queries + of_encoder.tokens * self._keys) * workload.itemsize
        if config.clip_qkv is not None:
            projected += (workload.tokens * self._queries + of_encoder.tokens * 2 * self._keys) * workload.itemsize
        matmuls = total_of((self.linear_q, self.linear_proj), workload) + shared
        return self._with_scores(matmuls, workload, keys=workload.encoder_length, projected=projected, is_padded=True)
