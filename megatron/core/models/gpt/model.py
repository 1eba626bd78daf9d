"""GPT: a causal transformer over tokens, as one stage or as several."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.core.models.gpt.layer_kinds import decoder_stack
from megatron.core.models.gpt.multi_token import MultiTokenPrediction
from megatron.core.ops.text_cache import LayerStates, TextCache
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.embedding import LanguageModelEmbedding, word_projection
from megatron.core.transformer.inputs import LayerInputs, text_rows
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput, vocabulary_costs, vocabulary_output
from megatron.core.transformer.positions import RotaryPositions
from megatron.core.transformer.stack import StackConfig


class GPTModel(nn.Module):
    """The stage's part of a GPT. Parameter names and initial values don't depend on how stages are cut.

    ``stack``: its layers, if not all are causal attention and MLP. ``before``: modules that come before the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        *,
        stage: Stage | None = None,
        stack: StackConfig | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
        before: dict[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        for name, module in (before or {}).items():
            self.add_module(name, module)
        stage = stage or Stage(range(config.num_layers), is_first=True, is_last=True)
        self._config, self._context, self._stage = config, context, stage
        predicts_later = stage.is_last and config.mtp_num_layers > 0
        has_embedding, copied = stage.is_first or predicts_later, config.mtp_num_layers > 0
        self.embedding = LanguageModelEmbedding(config, context, copied=copied) if has_embedding else None
        stack, recompute = stack or decoder_stack(config, ()), recompute or RecomputePlan()
        self.decoder = TransformerBlock(
            stack, context, layer_numbers=stage.layers, final_norm=stage.is_last, recompute=recompute
        )
        shares_embedding = has_embedding and not config.untie_embeddings_and_output_weights
        bias, has_weight = config.add_output_layer_bias, not shares_embedding
        has_layer = stage.is_last and (bias or has_weight)
        self.output_layer = OutputLayer(config, context, has_weight=has_weight, bias=bias) if has_layer else None
        projection = word_projection(config.hidden_size, config.word_width, config, context)
        self.output_projection = projection if stage.is_last else None
        self.mtp = MultiTokenPrediction(stack, context, recompute=recompute) if predicts_later else None
        self._rotary = RotaryPositions(config, context)
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    @override
    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None = None,
        *,
        rng_key: StreamKey | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        side_losses: SideLosses | None = None,
        cache: TextCache | None = None,
        future_tokens: Tensor | None = None,
        text_mask: Tensor | None = None,
        future_text_mask: Tensor | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
        ahead: Tensor | None = None,
    ) -> VocabularyOutput | Tensor:
        """Token ids ``[b, S]`` (None after the first stage) to the vocabulary output, before the last to hidden states.

        With context parallelism, tokens and positions are the rank's slice (``context_parallel.slicing``), and
        ``document_ids`` are whole. ``position_ids`` ``[b, S]``: None means 0, 1, … of the whole sequence.
        ``document_ids`` ``[b, S]``: documents that attention doesn't cross. ``hidden`` ``[s, b, h]``: what the stage
        before returned. ``rng_key``: the microbatch's random streams, needed only when dropout draws.
        ``side_losses``: takes the losses of layers. ``cache``: see ``LayerInputs``; tokens are ``[1, t]``.
        ``future_tokens`` ``[b, depths, S]``: what each depth of multi-token prediction reads; without them the last
        stage predicts the next token alone. ``text_mask`` ``[b, S]``: the positions of the rank's slice that are text,
        and not padding; None: all. ``future_text_mask`` ``[b, depths, S]``: the same for each future token.
        ``replaced``: see ``LanguageModelEmbedding``. ``ahead``: see ``LayerInputs``.
        """
        rng_key = rng_key or StreamKey(0)
        if self._stage.is_first:
            assert self.embedding is not None and tokens is not None, "the first stage needs tokens"
            hidden = self.embedding(tokens, position_ids, rng_key, replaced=replaced)
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        inputs = LayerInputs(
            rng_key=rng_key,
            rotary=self._rotary(hidden, position_ids, length=None if cache is None else cache.max_length),
            document_ids=document_ids,
            ahead=ahead,
            side_losses=side_losses or SideLosses(),
            cache=cache,
            text_mask=text_rows(text_mask, self._context),
        )
        hidden = self.decoder(hidden, inputs)
        if not self._stage.is_last:
            return hidden
        output = self._output(hidden)
        if self.mtp is None or future_tokens is None:
            return output
        assert self.embedding is not None
        mtp = list[VocabularyOutput]()
        texts = [None] * len(self.mtp.layers) if future_text_mask is None else future_text_mask.unbind(1)
        for depth, ids, text in zip(self.mtp.layers, future_tokens.unbind(1), texts):
            embedded = self.embedding(ids, position_ids, rng_key, stream=f"mtp {depth} embedding")
            of_depth = inputs if text is None else inputs.with_text(text_rows(text, self._context))
            hidden = self.mtp.layers[depth](hidden, embedded, of_depth)
            coefficient = self._config.mtp_loss_scaling_factor / len(self.mtp.layers)
            mtp.append(dataclasses.replace(self._output(hidden), coefficient=coefficient))
        return dataclasses.replace(output, mtp=tuple(mtp))

    def _output(self, hidden: Tensor) -> VocabularyOutput:
        bias = None if self.output_layer is None else self.output_layer.bias
        hidden = hidden if self.output_projection is None else self.output_projection(hidden)
        return vocabulary_output(hidden, self._output_weight(), self._config, self._context, bias=bias)

    def layer_states(self) -> LayerStates:
        """What the stage's layers keep of a text in generation."""
        return self.decoder.layer_states()

    def continue_texts(
        self,
        tokens: Tensor | None,
        position_ids: Tensor,
        *,
        cache: TextCache,
        hidden: Tensor | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
    ) -> VocabularyOutput | Tensor:
        """Continue texts: the vocabulary output, or before the last stage the hidden states. ``replaced``: see
        ``LanguageModelEmbedding``.
        """
        return self.forward(tokens, position_ids, cache=cache, hidden=hidden, replaced=replaced)

    def costs(self, workload: Workload) -> Costs:
        """Embedding, layers and output, and embedding and output again for each depth of multi-token prediction. The
        losses of all depths make gradients of the output's weight before the backward pass.
        """
        begun = costs_of(self.embedding if self._stage.is_first else None, workload)
        found = begun.before(costs_of(self.decoder, workload), splits_backward=workload.splits_backward)
        if not self._stage.is_last:
            return found
        weight = self._output_weight()
        output = vocabulary_costs(weight, workload, self._config) + costs_of(self.output_projection, workload)
        for layer in self.mtp.layers.values() if self.mtp is not None else ():
            found += (
                total_of((self.embedding, layer), workload) + output + Costs(kept=weight.nbytes * weight.requires_grad)
            )
        return found + output

    def _output_weight(self) -> Tensor:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight
