"""Token embeddings, split by vocabulary, and those of positions and token types."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.context_parallel.slicing import take
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.layers import (
    ReplicatedLinear,
    VocabParallelEmbedding,
    make_parameter,
    partial_under_sequence_parallel,
)
from megatron.core.tensor_parallel.regions import sequence_slice
from megatron.core.transformer.initialization import input_init, table_init
from megatron.core.transformer.norm import Norm

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"


class PositionEmbedding(nn.Module):
    """A learned vector for each position, held whole by every rank, behind ``position_embedding_offset`` other rows."""

    looks_up = True

    def __init__(self, config: ModelConfig, context: ModelContext, *, tied: str | None = None) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None
        self._context, self._offset = context, config.position_embedding_offset
        sharding = Sharding(
            (self._offset + config.max_position_embeddings, config.hidden_size),
            partial_grad=partial_under_sequence_parallel(context),
            tied=tied,
            kind="table",
        )
        self.weight = make_parameter(sharding, table_init(config), context)

    @override
    def forward(self, length: int, position_ids: Tensor | None) -> Tensor:
        """Vectors ``[s, b or 1, h]`` for positions ``[b, S]``, or for this rank's of 0, 1, … when None."""
        if position_ids is None:
            mesh = self._context.mesh
            used = self.weight[self._offset : self._offset + length * mesh.size("cp")]
            held = take(used, mesh.rank("cp"), mesh.size("cp"), dim=0)
            return sequence_slice(held, self._context).unsqueeze(1)
        return F.embedding(sequence_slice(position_ids.t() + self._offset, self._context), self.weight)


class TokenTypeEmbedding(nn.Module):
    """A learned vector for each kind of token, such as first and second sentence, held whole by every rank."""

    looks_up = True

    def __init__(self, count: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._context = context
        partial = partial_under_sequence_parallel(context)
        sharding = Sharding((count, config.hidden_size), partial_grad=partial, kind="table")
        self.weight = make_parameter(sharding, table_init(config), context)

    @override
    def forward(self, types: Tensor) -> Tensor:
        """Types ``[b, S]`` to vectors ``[s, b, h]``."""
        return F.embedding(sequence_slice(types.t(), self._context), self.weight)


def word_projection(inputs: int, outputs: int, config: ModelConfig, context: ModelContext) -> ReplicatedLinear | None:
    """The matrix between word vectors and hidden states, ``[…, inputs] -> […, outputs]``, where their widths differ."""
    if inputs == outputs:
        return None
    return ReplicatedLinear(inputs, outputs, context, init=input_init(config), bias=False)


class LanguageModelEmbedding(nn.Module):
    """Word vectors, projected where they have a width of their own, plus, with learned positions, position vectors, and
    with token types theirs; then a norm, where the model has one, and dropout.

    ``copied``: another stage of the model has such an embedding as well, with the same words and positions.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, *, token_types: int = 0, copied: bool = False
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the tokenizer's vocabulary is known before a model is built"
        self._config, self._context = config, context
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.word_width,
            context,
            init=table_init(config),
            pad_multiple=config.make_vocab_size_divisible_by,
            tied=WORD_EMBEDDINGS if copied or not config.untie_embeddings_and_output_weights else None,
        )
        self.projection = word_projection(config.word_width, config.hidden_size, config, context)
        # Rounded as transformers rounds Gemma's: sqrt(3072) is 55.5 in bf16.
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=context.dtype).item()
        learned, tied = config.position_embedding_type == "learned_absolute", POSITION_EMBEDDINGS if copied else None
        self.position_embeddings = PositionEmbedding(config, context, tied=tied) if learned else None
        self.tokentype_embeddings = TokenTypeEmbedding(token_types, config, context) if token_types else None
        self.norm = Norm(config.hidden_size, config, context) if config.embedding_norm else None

    @override
    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        rng_key: StreamKey,
        *,
        types: Tensor | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
        stream: str = "embedding",
    ) -> Tensor:
        """Token ids, and for a model that has them types, ``[b, S]``, to hidden states ``[s, b, h]``.

        ``replaced``: a mask ``[b, S]`` of places that hold no word, whose ids don't count, and the vectors that stand
        there as they are, without ``--embedding-multiplier``: ``[h]`` or this rank's ``[s, b, h]``. ``stream``: name of
        the random stream of its dropout.
        """
        x: Tensor = self.word_embeddings(tokens)
        if self._multiplier != 1.0:
            x = x * self._multiplier
        if self.projection is not None:
            x = self.projection(x)
        if replaced is not None:
            mask, vectors = replaced
            x = torch.where(sequence_slice(mask.t(), self._context).unsqueeze(-1), vectors, x)
        if self.position_embeddings is not None:
            x = x + self._multiplied(self.position_embeddings(tokens.shape[1], position_ids))
        if self.tokentype_embeddings is not None:
            assert types is not None, "a model with token types is told them"
            x = x + self._multiplied(self.tokentype_embeddings(types))
        if self.norm is not None:
            x = self.norm(x)
        if self._config.fp32_residual_connection:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.training or self._config.hidden_dropout == 0.0:
            return x
        self._context.rng.enter(rng_key, stream)
        return dropout(x, self._config.hidden_dropout, self._context.hidden_generator)

    def _multiplied(self, vectors: Tensor) -> Tensor:
        factor = self._config.position_embedding_multiplier
        return vectors if factor == 1.0 else vectors * factor

    def costs(self, workload: Workload) -> Costs:
        """The words' look-up, the input of the norm, and a mask of dropout."""
        elements = workload.rows * self._config.hidden_size
        kept = elements * ((self._config.hidden_dropout > 0) + workload.itemsize * self._config.embedding_norm)
        return total_of((self.word_embeddings, self.projection), workload) + Costs(kept=kept)
