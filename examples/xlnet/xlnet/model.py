"""XLNet: layers of two-stream attention and MLP over the rows of a sample's segments, in one stage or several."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.sharding import Sharding
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.tensor_parallel.layers import make_parameter, partial_under_sequence_parallel
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.embedding import LanguageModelEmbedding
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput, vocabulary_costs, vocabulary_output
from megatron.core.transformer.stack import FEED_FORWARD, Branch, StackConfig
from xlnet.attention import SegmentInputs, Segments, TwoStreamAttention
from xlnet.config import XLNetConfig


class XLNetModel(nn.Module):
    """The stage's part of an XLNet.

    With ``--apply-residual-connection-post-layernorm --no-first-attention-norm`` and a bias on the logits it has the
    weights of the original and of Hugging Face's, one by one.
    """

    def __init__(
        self,
        config: ModelConfig,
        own: XLNetConfig,
        context: ModelContext,
        *,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        stage = stage or Stage(range(config.num_layers), is_first=True, is_last=True)
        self._config, self._own, self._context, self._stage = config, own, context, stage
        self.embedding = LanguageModelEmbedding(config, context) if stage.is_first else None
        vector = Sharding((config.hidden_size,), partial_grad=partial_under_sequence_parallel(context))
        self.mask_embedding = make_parameter(vector, input_init(config), context) if stage.is_first else None
        attention = Branch("self_attention", "input_layernorm", "attention", partial(TwoStreamAttention, own=own))
        self.encoder = TransformerBlock(
            StackConfig(config, causal=False, pattern=((attention, FEED_FORWARD),)),
            context,
            layer_numbers=stage.layers,
            final_norm=stage.is_last,
            recompute=recompute or RecomputePlan(),
        )
        shares = stage.is_first and not config.untie_embeddings_and_output_weights
        bias = config.add_output_layer_bias
        has_layer = stage.is_last and (bias or not shares)
        self.output_layer = OutputLayer(config, context, has_weight=not shares, bias=bias) if has_layer else None
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    @override
    def forward(
        self,
        tokens: Tensor | None,
        *,
        ranks: Tensor,
        places: Tensor,
        documents: Tensor,
        rng_key: StreamKey | None = None,
        hidden: Tensor | None = None,
        side_losses: SideLosses | None = None,
    ) -> VocabularyOutput | Tensor:
        """The output of the predicted places; before the last stage, hidden states ``[s, b·segments, h]``.

        The output has ``P`` places of each of the ``b·segments`` segments. ``tokens`` ``[b, segments, S]``: None after
        the first stage. ``ranks`` and ``documents`` ``[b, segments, S]``, ``places`` ``[b, segments, P]``: see
        ``SegmentDataset``.
        ``hidden``: what the stage before returned. ``rng_key``: the microbatch's random streams, needed only when
        dropout draws. ``side_losses``: takes the losses of layers.
        """
        rng_key = rng_key or StreamKey(0)
        sizes = Segments(ranks.shape[1], ranks.shape[2], places.shape[2], self._own.mem_len)
        if self.embedding is not None:
            assert tokens is not None and self.mask_embedding is not None, "the first stage needs tokens"
            rows = F.pad(tokens.flatten(0, 1), (0, sizes.predicted))
            is_query = (torch.arange(sizes.rows, device=rows.device) >= sizes.length).expand_as(rows)
            hidden = self.embedding(rows, None, rng_key, replaced=(is_query, self.mask_embedding))
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        distance, same, unseen = pairs(sizes, ranks, places, documents)
        inputs = SegmentInputs(
            rng_key=rng_key,
            side_losses=side_losses or SideLosses(),
            segments=sizes,
            encodings=self._encodings(sizes, rng_key),
            distance=distance,
            same=same,
            unseen=unseen,
        )
        hidden = self._dropped(self.encoder(hidden, inputs), rng_key)
        if not self._stage.is_last:
            return hidden
        bias = None if self.output_layer is None else self.output_layer.bias
        output = vocabulary_output(hidden, self._output_weight(), self._config, self._context, bias=bias)
        return dataclasses.replace(output, hidden=output.hidden[sizes.length :])

    def _dropped(self, hidden: Tensor, rng_key: StreamKey) -> Tensor:
        """The last stage's hidden states after dropout."""
        if not (self._stage.is_last and self.training and self._config.hidden_dropout):
            return hidden
        self._context.rng.enter(rng_key, "output")
        return dropout(hidden, self._config.hidden_dropout, self._context.hidden_generator)

    def _encodings(self, sizes: Segments, rng_key: StreamKey) -> Tensor:
        """Sines and cosines of all distances, ``[distances, h]``, after dropout; the same on every rank and stage."""
        context, width = self._context, self._config.hidden_size
        wide = torch.promote_types(context.dtype, torch.float32)
        distance = torch.arange(sizes.distances, device=context.device, dtype=wide) - (sizes.length - 1)
        powers = torch.arange(0, width, 2, device=context.device, dtype=wide) / width
        angles = distance.unsqueeze(1) / 10_000**powers
        found = torch.cat((angles.sin(), angles.cos()), dim=1).to(context.dtype)
        if not self.training:
            return found
        context.rng.enter(rng_key, "positions")
        return dropout(found, self._config.hidden_dropout, context.rng.replicated)

    def costs(self, workload: Workload) -> Costs:
        """Embedding, layers and output; all layers share 10 bytes for each pair of row and key."""
        own, found = self._own, costs_of(self.embedding, workload) + costs_of(self.encoder, workload)
        sizes = Segments(own.segments_per_sample, workload.length - own.num_predict, own.num_predict, own.mem_len)
        encodings = sizes.distances * self._config.hidden_size * (workload.itemsize + (self._config.hidden_dropout > 0))
        found += Costs(kept=10 * workload.batch * sizes.rows * sizes.keys + encodings)
        return found + vocabulary_costs(self._output_weight(), workload, self._config) if self._stage.is_last else found

    def _output_weight(self) -> Tensor:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight


def pairs(sizes: Segments, ranks: Tensor, places: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``distance``, ``same`` and ``unseen`` of ``SegmentInputs``, for the ``b`` segments of some samples.

    A row sees the given tokens, those of lower rank, all of its memory that exists, and in the content stream its own
    token.
    """
    device, memory = ranks.device, sizes.memory_places(ranks.device)
    remembered = documents.flatten(1)[:, memory.clamp(min=0)].flatten(0, 1)  # [b, memory]
    rank, place, document = (each.flatten(0, 1) for each in (ranks, places, documents))
    own = torch.arange(sizes.length, device=device).expand_as(rank)
    row_place = torch.cat((own, place), dim=1)
    row_rank, row_document = (torch.cat((each, each.gather(1, place)), dim=1) for each in (rank, document))
    sees = (rank.unsqueeze(1) < 0) | (rank.unsqueeze(1) < row_rank.unsqueeze(2))
    sees[:, : sizes.length] |= torch.eye(sizes.length, dtype=torch.bool, device=device)
    exists = (memory >= 0).repeat(len(ranks), 1).unsqueeze(1).expand(-1, sizes.rows, -1)
    keys = torch.arange(-sizes.memory, sizes.length, device=device)
    key_document = torch.cat((remembered, document), dim=1)
    distance = row_place.unsqueeze(2) - keys + (sizes.length - 1)
    same = row_document.unsqueeze(2) == key_document.unsqueeze(1)
    return distance.unsqueeze(1), same.unsqueeze(1), ~torch.cat((exists, sees), dim=2).unsqueeze(1)
