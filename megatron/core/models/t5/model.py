"""T5: an encoder and a decoder that attends to it, as one chain of layers in one stage or several."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.layers import EncoderDecoderLayers
from megatron.core.moe.layer import layers_with
from megatron.core.ops.text_cache import LayerStates, TextCache
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.embedding import LanguageModelEmbedding
from megatron.core.transformer.inputs import LayerInputs, text_rows
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput, vocabulary_costs, vocabulary_output
from megatron.core.transformer.positions import RotaryPositions
from megatron.core.transformer.relative import RelativeBias
from megatron.core.transformer.stack import CROSS_ATTENTION, StackConfig, self_attention

DECODER = "decoder_"
"""How the names of losses of the decoder's routers begin."""


class T5Model(nn.Module):
    """The stage's part of a T5 (Raffel et al. 2020, arXiv:1910.10683). ``config`` is the encoder's; the decoder differs
    in its number of layers. Both look up words, and learned positions, in one table.

    The output has a bias where it is tied and linear layers have theirs, as Megatron-LM's.
    """

    def __init__(
        self,
        config: ModelConfig,
        t5: T5Config,
        context: ModelContext,
        *,
        moe: MoEConfig | None = None,
        lora: LoraConfig | None = None,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        layers = config.num_layers
        stage = stage or Stage(range(layers + t5.decoder_num_layers), is_first=True, is_last=True)
        held = EncoderDecoderLayers.of(stage.layers, layers)
        self._config, self._t5, self._context = config, t5, context
        self._stage, self._opens_decoder = stage, held.opens_decoder
        has_embedding, tied = stage.is_first or held.opens_decoder, not config.untie_embeddings_and_output_weights
        self.embedding = LanguageModelEmbedding(config, context, copied=True) if has_embedding else None
        has_encoder, has_decoder = len(held.encoder) > 0, len(held.decoder) > 0
        self.encoder_positions = self._relative_bias("encoder_positions") if has_encoder else None
        plan, moe, lora = recompute or RecomputePlan(), moe or MoEConfig(), lora or LoraConfig()
        marked = moe.expert_layers(layers, t5.decoder_num_layers)
        attention = (self_attention(config), CROSS_ATTENTION)
        self.encoder = (
            TransformerBlock(
                StackConfig(
                    config,
                    causal=False,
                    pattern=layers_with((self_attention(config),), moe, marked[:layers]),
                    lora=lora,
                ),
                context,
                layer_numbers=held.encoder,
                final_norm=held.closes_encoder,
                recompute=plan,
            )
            if has_encoder
            else None
        )
        self.decoder_positions = self._relative_bias("decoder_positions") if has_decoder else None
        self.decoder = (
            TransformerBlock(
                StackConfig(
                    dataclasses.replace(config, num_layers=t5.decoder_num_layers),
                    causal=True,
                    first=layers,
                    pattern=layers_with(attention, moe, marked[layers:], stack=DECODER),
                    lora=lora,
                ),
                context,
                layer_numbers=held.decoder,
                final_norm=stage.is_last,
                recompute=plan,
            )
            if has_decoder or stage.is_last
            else None
        )
        bias, has_weight = tied and config.add_bias_linear, not (tied and has_embedding)
        self.output_layer = OutputLayer(config, context, has_weight=has_weight, bias=bias) if stage.is_last else None
        self._rotary = RotaryPositions(config, context)
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    def _relative_bias(self, name: str) -> RelativeBias | None:
        if self._config.position_embedding_type != "relative":
            return None
        return RelativeBias(
            self._config,
            self._context,
            buckets=self._t5.relative_attention_num_buckets,
            max_distance=self._t5.relative_attention_max_distance,
            bidirectional=name == "encoder_positions",
            tied=f"{name}.weight",
        )

    @override
    def forward(
        self,
        encoder_tokens: Tensor | None,
        decoder_tokens: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        rng_key: StreamKey | None = None,
        hidden: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        side_losses: SideLosses | None = None,
        encoder_text_mask: Tensor | None = None,
        decoder_text_mask: Tensor | None = None,
    ) -> VocabularyOutput | dict[str, Tensor]:
        """Token ids ``[b, S]`` for the first stage and ``[b, D]`` for the one with the decoder's first layer, to the
        output; before the last stage to what the next is given as ``hidden`` and, once the decoder is open,
        ``encoder_hidden_states``.

        With context parallelism tokens are the rank's slices. ``attention_mask`` ``[b, S]``: True for the encoder's
        tokens that are no padding, of the whole sequence; None where there is none. The decoder's padding comes last,
        where no real token sees it. ``rng_key``: the microbatch's random streams, needed only when dropout draws.
        ``side_losses``: takes the losses of layers. ``encoder_text_mask`` ``[b, S]``, ``decoder_text_mask`` ``[b, D]``:
        the tokens of the rank's slices that are no padding, which alone are sent to experts; None: all.
        """
        rng_key, side_losses = rng_key or StreamKey(0), side_losses or SideLosses()
        if self._stage.is_first:
            hidden = self._embedded(encoder_tokens, rng_key, "embedding")
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        if self.encoder is not None:
            bias = None if self.encoder_positions is None else self.encoder_positions(hidden)
            inputs = LayerInputs(
                rng_key=rng_key,
                rotary=self._rotary(hidden, None),
                attention_mask=attention_mask,
                bias=bias,
                side_losses=side_losses,
                text_mask=text_rows(encoder_text_mask, self._context),
            )
            hidden = self.encoder(hidden, inputs)
        if self._opens_decoder:
            encoder_hidden_states, hidden = hidden, self._embedded(decoder_tokens, rng_key, "decoder embedding")
        if self.decoder is None:
            return {"hidden": hidden}
        assert encoder_hidden_states is not None, "a stage of the decoder needs the encoder's output"
        bias = None if self.decoder_positions is None else self.decoder_positions(hidden)
        inputs = LayerInputs(
            rng_key=rng_key,
            rotary=self._rotary(hidden, None),
            bias=bias,
            side_losses=side_losses,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=attention_mask,
            text_mask=text_rows(decoder_text_mask, self._context),
        )
        hidden = self.decoder(hidden, inputs)
        return (
            self._output(hidden)
            if self._stage.is_last
            else {"hidden": hidden, "encoder_hidden_states": encoder_hidden_states}
        )

    def layer_states(self) -> LayerStates:
        """What the decoder's layers keep of a text in generation; nothing on stages before the decoder."""
        return LayerStates() if self.decoder is None else self.decoder.layer_states()

    def encode(self, tokens: Tensor, hidden: Tensor | None = None, *, cache: TextCache | None = None) -> Tensor:
        """Token ids ``[b, T]`` through the stage's part of the encoder, to hidden states ``[T, b, h]``. ``cache``:
        computes attention in place of layers.
        """
        if self._stage.is_first:
            hidden = self._embedded(tokens, StreamKey(0), "embedding")
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        if self.encoder is None:
            return hidden
        bias = None
        if self.encoder_positions is not None and cache is not None:
            cache = cache.with_bias(self.encoder_positions.between)
        elif self.encoder_positions is not None:
            bias = self.encoder_positions(hidden)
        rotary = self._rotary(hidden, None)
        inputs = LayerInputs(rng_key=StreamKey(0), rotary=rotary, bias=bias, side_losses=SideLosses(), cache=cache)
        encoder_hidden_states: Tensor = self.encoder(hidden, inputs)
        return encoder_hidden_states

    def continue_texts(
        self, tokens: Tensor, position_ids: Tensor, *, cache: TextCache, hidden: Tensor | None = None
    ) -> VocabularyOutput | Tensor:
        """Continue texts with the decoder: the vocabulary output or hidden states; stages before the decoder return
        zeros.
        """
        if self.decoder is None:
            assert self.encoder is not None, "a stage has layers"
            dtype = self._context.dtype
            if self._config.fp32_residual_connection:
                dtype = torch.promote_types(dtype, torch.float32)
            return torch.zeros(tokens.shape[1], 1, self._config.hidden_size, dtype=dtype, device=tokens.device)
        if self._opens_decoder:
            hidden = self._embedded(tokens, StreamKey(0), "decoder embedding", position_ids)
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        if self.decoder_positions is not None:
            cache = cache.with_bias(self.decoder_positions.between)
        rotary = self._rotary(hidden, position_ids, length=cache.max_length)
        inputs = LayerInputs(rng_key=StreamKey(0), rotary=rotary, side_losses=SideLosses(), cache=cache)
        hidden = self.decoder(hidden, inputs)
        return self._output(hidden) if self._stage.is_last else hidden

    def _embedded(
        self, tokens: Tensor | None, rng_key: StreamKey, stream: str, position_ids: Tensor | None = None
    ) -> Tensor:
        assert self.embedding is not None and tokens is not None, "a stage that begins a stack needs its tokens"
        hidden: Tensor = self.embedding(tokens, position_ids, rng_key, stream=stream)
        return hidden

    def costs(self, workload: Workload) -> Costs:
        """Costs of the encoder over its tokens and the decoder over ``workload.length``. Every stage of the decoder
        keeps the encoder's output.
        """
        encoding, decoding = workload.of_encoder(), dataclasses.replace(workload, has_padding=False)
        encoder = total_of((self.encoder_positions, self.encoder), encoding)
        decoder = total_of((self.decoder_positions, self.decoder), decoding)
        found = encoder.before(decoder, splits_backward=workload.splits_backward)
        for begins, stack in ((self._stage.is_first, encoding), (self._opens_decoder, decoding)):
            found += costs_of(self.embedding, stack) if begins else Costs()
        if self.decoder is not None:
            found += Costs(kept=encoding.rows * self._config.hidden_size * workload.itemsize)
        return found + vocabulary_costs(self._output_weight(), decoding, self._config) if self._stage.is_last else found

    def _output_weight(self) -> Tensor:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def _output(self, hidden: Tensor) -> VocabularyOutput:
        assert self.output_layer is not None
        if self._t5.scale_output:
            hidden = hidden * (1.0 / math.sqrt(self._config.hidden_size))
        weight, bias = self._output_weight(), self.output_layer.bias
        return vocabulary_output(hidden, weight, self._config, self._context, bias=bias)
