"""GPT: a causal transformer over tokens, as one stage or as several."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.models.stage import Stage
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.embedding import LanguageModelEmbedding
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput, vocabulary_costs, vocabulary_output
from megatron.core.transformer.positions import RotaryPositions
from megatron.core.transformer.stack import StackConfig


class GPTModel(nn.Module):
    """The stage's part of a GPT. Parameter names and initial values don't depend on how stages are cut.

    ``stack``: its layers, when they are not all causal attention and MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        *,
        stage: Stage | None = None,
        stack: StackConfig | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        stage = stage or Stage(range(config.num_layers), is_first=True, is_last=True)
        self._config, self._context = config, context
        self.embedding = LanguageModelEmbedding(config, context) if stage.is_first else None
        self.decoder = TransformerBlock(
            stack or StackConfig(config, causal=True),
            context,
            layer_numbers=stage.layers,
            final_norm=stage.is_last,
            recompute=recompute or RecomputePlan(),
        )
        shares_embedding = stage.is_first and not config.untie_embeddings_and_output_weights
        self.output_layer = OutputLayer(config, context) if stage.is_last and not shares_embedding else None
        self._is_last = stage.is_last
        self._rotary = RotaryPositions(config, context)
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None = None,
        *,
        rng_key: StreamKey | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        side_losses: SideLosses | None = None,
    ) -> VocabularyOutput | Tensor:
        """Token ids ``[b, S]`` (None after the first stage) to the vocabulary output, before the last to hidden states.

        With context parallelism, tokens and positions are the rank's slice (``context_parallel.slicing``), and
        ``document_ids`` are whole. ``position_ids`` ``[b, S]``: None means 0, 1, … of the whole sequence.
        ``document_ids`` ``[b, S]``: documents that attention doesn't cross. ``hidden`` ``[s, b, h]``: what the stage
        before returned. ``rng_key``: the microbatch's random streams, needed only when dropout draws.
        ``side_losses``: takes the losses of layers.
        """
        rng_key = rng_key or StreamKey(0)
        if self.embedding is not None:
            assert tokens is not None, "the first stage needs tokens"
            hidden = self.embedding(tokens, position_ids, rng_key)
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        inputs = LayerInputs(
            rng_key=rng_key,
            rotary=self._rotary(hidden, position_ids),
            document_ids=document_ids,
            side_losses=side_losses or SideLosses(),
        )
        hidden = self.decoder(hidden, inputs)
        if not self._is_last:
            return hidden
        return vocabulary_output(hidden, self._output_weight(), self._config, self._context)

    def costs(self, workload: Workload) -> Costs:
        """Embedding, layers and output."""
        parts = total_of((self.embedding, self.decoder), workload)
        return parts + vocabulary_costs(self._output_weight(), workload) if self._is_last else parts

    def _output_weight(self) -> Tensor:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight
