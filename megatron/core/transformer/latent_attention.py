"""Multi-head latent attention: keys and values of all heads from one narrow vector of each token."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.context_parallel.attention import KEYS_TRAVEL
from megatron.core.ops.matmul import linear
from megatron.core.ops.rotary import apply_rotary
from megatron.core.ops.text_cache import Paged, TextState, WholeText
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.recompute import recomputed, with_recomputed_inputs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear
from megatron.core.tensor_parallel.regions import enter
from megatron.core.transformer.attention import Attention, AttentionScope
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.positions import rotary_of, score_factor_of


class LatentAttention(Attention):
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434).

    Every rank computes the latent vectors, of queries (unless ``q_lora_rank`` is None) and of keys and values, and one
    key with rotary positions that all heads share; the ranks divide the heads that are computed from them. A head's
    query and key are ``qk_head_dim`` channels without positions, then ``qk_pos_emb_head_dim`` with rotary positions.
    """

    def __init__(self, place: BranchPlace) -> None:
        super().__init__(place, causal=place.stack.causal)
        config, context = place.stack.model, place.context
        heads, plain = config.num_attention_heads, config.qk_head_dim
        self._rotary = rotary_of(config, place.number)
        self._window = config.window_of(place.number)
        self._value_width = heads * config.v_head_dim
        if config.softmax_scale is None:
            self._scale = score_factor_of(config) / math.sqrt(config.kv_channels)
        has_norms, query_rank = config.qk_layernorm, config.q_lora_rank
        self.linear_q_down_proj = None if query_rank is None else self._down(query_rank)
        self.q_layernorm = Norm(query_rank, config, context) if has_norms and query_rank is not None else None
        self.linear_q_up_proj = None if query_rank is None else self._up(query_rank, self._width)
        self.linear_q_proj = self._up(config.hidden_size, self._width) if query_rank is None else None
        self.linear_kv_down_proj = self._down(config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = Norm(config.kv_lora_rank, config, context) if has_norms else None
        self.linear_kv_up_proj = self._up(config.kv_lora_rank, heads * plain + self._value_width)
        self._add_output()

    def _down(self, outputs: int) -> ReplicatedLinear:
        config = self._config
        init, bias = input_init(config), config.add_qkv_bias
        return ReplicatedLinear(config.hidden_size, outputs, self._context, init=init, bias=bias)

    def _up(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(inputs, outputs, self._context, init=input_init(self._config), bias=False)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        config, of_query = self._config, x
        if self.linear_q_down_proj is not None:  # [s, b, q_lora_rank]
            of_query = self.linear_q_down_proj(x)
            of_query = of_query if self.q_layernorm is None else self.q_layernorm(of_query)
        latent, shared_key = torch.split(
            self.linear_kv_down_proj(x), [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        latent = latent if self.kv_layernorm is None else self.kv_layernorm(latent)
        if inputs.cache is not None:
            plain, turned, shared_key = self._turned(of_query, shared_key, inputs)
            return self._attend_to_latents(plain, turned, enter(latent, self._context), shared_key, inputs)
        documents = inputs.documents if self._context.mesh.size("cp") > 1 else None
        scope = AttentionScope(inputs.document_ids, documents, inputs.attention_mask, inputs.bias, ahead=inputs.ahead)
        attend = partial(self._attend, stream=inputs.rng_key, scope=scope)
        project, latents = partial(self._heads, inputs=inputs), (of_query, latent, shared_key)
        if not self.training or "mla_up_proj" not in self._recompute:
            return self._mix(*project(*latents), inputs.rng_key, scope)
        if self._recompute_core:
            mixed = recomputed(lambda *latents: attend(*project(*latents)), *latents)
        else:
            mixed = with_recomputed_inputs(attend, project, *latents)
        out: Tensor = self.linear_proj(mixed)
        return out

    def _heads(
        self, of_query: Tensor, latent: Tensor, shared_key: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[S, b, n, d]`` of this rank's heads, from the latent vector of queries (or hidden
        states), that of keys and values, and the key that all heads share, not yet turned. Where latents are sent, they
        and the shared key instead of keys and values.
        """
        plain, turned, shared_key = self._turned(of_query, shared_key, inputs)
        query = torch.cat((plain, turned), dim=-1)
        if self.sends_latents:
            return query, enter(latent, self._context), shared_key
        return query, *self._keys_and_values(self.linear_kv_up_proj(latent), shared_key)

    @property
    def sends_latents(self) -> bool:
        """Whether context-parallel ranks send each other latents and shared keys, and compute keys and values from
        them: where keys would be sent, and are wider. Products in 8 bits stay with the rank that has their scales.
        """
        if self.linear_kv_up_proj.fp8 is not None:
            return False
        travels = self._context.mesh.size("cp") > 1 and self._comm_type in KEYS_TRAVEL
        return travels and self._latent_width < self._keys + self._values

    def describe_sent(self) -> str | None:
        """What is sent, in words, where latents are sent."""
        if not self.sends_latents:
            return None
        return (
            f"context-parallel ranks send each other latents, {self._sent:,} numbers a token instead of "
            f"{super()._sent:,}, and compute keys and values from them"
        )

    @property
    def _latent_width(self) -> int:
        return self._config.kv_lora_rank + self._config.qk_pos_emb_head_dim

    @property
    @override
    def _sent(self) -> int:
        """Numbers that a token sends to other ranks: its latent, or its keys and values."""
        return self._latent_width if self.sends_latents else super()._sent

    @override
    def _expansion(self) -> dict[str, Any]:
        """Arguments of ``attention`` for keys and values made of latents. Where latents are sent in place of keys, the
        shared key is sent in place of values.
        """
        if not self.sends_latents:
            return {}

        def expand(weight: Tensor, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
            return self._keys_and_values(linear(latent, weight, None, by=self._context.products.multiply), shared_key)

        return {"expand": expand, "weight": self.linear_kv_up_proj.weight}

    def _turned(self, of_query: Tensor, shared_key: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The channels of the queries without and with rotary positions, ``[S, b, n, …]``, and the shared key
        ``[S, b, 1, qk_pos_emb_head_dim]`` with them.
        """
        project = self.linear_q_proj or self.linear_q_up_proj
        assert project is not None
        query, shared_key = project(of_query), enter(shared_key, self._context).unsqueeze(2)
        query = query.view(*query.shape[:2], -1, self._head_dim)
        plain, turned = torch.split(query, [self._config.qk_head_dim, self._config.qk_pos_emb_head_dim], dim=-1)
        if self._rotary is not None:
            table, interleaved = inputs.rotary[self._rotary], self._config.rotary_interleaved
            turned = apply_rotary(turned, table, interleaved=interleaved)
            shared_key = apply_rotary(shared_key, table, interleaved=interleaved)
        return plain, turned, shared_key

    def _attend_to_latents(
        self, plain: Tensor, turned: Tensor, latent: Tensor, shared_key: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Attention of a step of generation, whose cache holds latents: all heads have one key, latent and rotary, and
        its latent as value. What keys are computed with is multiplied into the queries, and what values are computed
        with into the results (arXiv:2405.04434, section 2.1.2).
        """
        config, products = self._config, self._context.products
        weight = self.linear_kv_up_proj.weight.view(-1, config.qk_head_dim + config.v_head_dim, config.kv_lora_rank)
        of_keys, of_values = torch.split(weight, [config.qk_head_dim, config.v_head_dim], dim=1)
        latent = latent.unsqueeze(2)
        query = torch.cat((products.by_head(plain, of_keys), turned), dim=-1)
        key = torch.cat((latent, shared_key), dim=-1)
        mixed = self._attend(query, key, latent, inputs.rng_key, AttentionScope(cache=inputs.cache))
        by_head = mixed.view(*mixed.shape[:2], -1, config.kv_lora_rank)
        out: Tensor = self.linear_proj(products.by_head(by_head, of_values.transpose(1, 2)).flatten(2))
        return out

    @property
    @override
    def text_state(self) -> TextState:
        """One latent and rotary key for all heads, whole on every rank."""
        latent = self._config.kv_lora_rank
        if not self.is_causal:
            return WholeText()
        return Paged(1, latent + self._config.qk_pos_emb_head_dim, latent, values_in_keys=True)

    def _keys_and_values(self, both: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[S, b, n, d]`` and values, from what is computed from latents and the key that heads share."""
        widths = [self._config.qk_head_dim, self._config.v_head_dim]
        key, value = torch.split(both.view(*both.shape[:2], -1, sum(widths)), widths, dim=-1)
        return torch.cat((key, shared_key.expand(-1, -1, key.shape[2], -1)), dim=-1), value

    def costs(self, workload: Workload) -> Costs:
        """Costs of the matmuls, and of attention of every token to the sequence. Both first matmuls keep the same
        input. Heads that are computed again aren't kept, but for values that a kernel has widened.
        """
        config = self._config
        latents = dataclasses.replace(workload, stream_itemsize=workload.itemsize)
        matmuls = total_of(self.children(), latents)
        makes_heads_again = "mla_up_proj" in self._recompute
        if (
            self.kv_layernorm is not None or makes_heads_again or self.sends_latents
        ):  # a part of the matmul's output is kept, and so all of it
            shared = workload.rows * config.qk_pos_emb_head_dim * workload.itemsize
            matmuls += Costs(kept=shared)
        again = 0 if self._context.keeps_bytes else workload.rows * config.hidden_size * workload.itemsize
        matmuls = dataclasses.replace(matmuls, kept=matmuls.kept - again)
        # Kernels with one width get all of them widened, and keep a wide result; else values are a part of a product.
        widest, one_width = max(self._queries, self._values), self._queries == self._values
        per_token = 3 * widest + (self._groups * config.qk_head_dim if one_width else widest)
        projected = workload.tokens * per_token * workload.itemsize
        kept = projected
        if self._recompute_core:  # what the kernel widens is made again, too
            both = self._groups * config.qk_head_dim + self._values
            kept = workload.tokens * (2 * self._queries + both) * workload.itemsize
        if makes_heads_again:
            kept = 0 if one_width or self._recompute_core else 2 * workload.tokens * widest * workload.itemsize
        if self.sends_latents:
            gathered = (workload.tokens - workload.rows) * config.kv_lora_rank
            queries = 0 if makes_heads_again else self._queries
            kept = (workload.tokens * (queries + config.qk_pos_emb_head_dim) + gathered) * workload.itemsize
        found = self._with_scores(
            matmuls, workload, keys=workload.length, projected=kept, is_padded=workload.has_padding
        )
        return dataclasses.replace(found, working=found.working + max(projected - kept, 0))

    @property
    @override
    def _values(self) -> int:
        """Width of this rank's values."""
        return self._groups * self._config.v_head_dim
