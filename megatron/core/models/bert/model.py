"""BERT: a bidirectional transformer that predicts masked tokens and the order of two texts, in one stage or several."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.moe.layer import layers_with
from megatron.core.ops.activation import activation
from megatron.core.ops.text_cache import TextCache
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.regions import first_token
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.embedding import LanguageModelEmbedding
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs, text_rows
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput, vocabulary_costs, vocabulary_output
from megatron.core.transformer.positions import RotaryPositions
from megatron.core.transformer.stack import StackConfig, self_attention

NO_EXPERTS, NO_ADAPTERS = MoEConfig(), LoraConfig()


@dataclass(frozen=True)
class BertOutput:
    """Results of BERT's heads. ``words``: logits of the masked tokens. ``order`` ``[b, 2]``: logits of the order of two
    texts, 1 for exchanged; None without a binary head. Of context-parallel ranks only the first has the token that
    ``order`` is made of.
    """

    words: VocabularyOutput
    order: Tensor | None


class BertBody(nn.Module):
    """The stage's part of what every BERT has: embeddings and layers. Subclasses add the heads."""

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        *,
        stage: Stage,
        token_types: int,
        moe: MoEConfig,
        lora: LoraConfig,
        recompute: RecomputePlan | None,
    ) -> None:
        super().__init__()
        self._config, self._context, self._is_last = config, context, stage.is_last
        self._has_types = token_types > 1
        self.embedding = LanguageModelEmbedding(config, context, token_types=token_types) if stage.is_first else None
        marked = moe.expert_layers(config.num_layers)
        self.encoder = TransformerBlock(
            StackConfig(config, causal=False, pattern=layers_with((self_attention(config),), moe, marked), lora=lora),
            context,
            layer_numbers=stage.layers,
            final_norm=stage.is_last,
            recompute=recompute or RecomputePlan(),
        )
        self._rotary = RotaryPositions(config, context)

    def hidden_states(
        self,
        tokens: Tensor | None,
        types: Tensor | None,
        *,
        attention_mask: Tensor | None,
        rng_key: StreamKey,
        hidden: Tensor | None,
        side_losses: SideLosses | None,
        text_mask: Tensor | None,
        cache: TextCache | None = None,
    ) -> Tensor:
        """What the stage's last layer, and on the last stage the final norm, make of ids or of the stage before:
        ``[s, b, h]``. Arguments are those of ``BertModel.forward``; ``cache``: computes attention in place of layers.
        """
        if self.embedding is not None:
            assert tokens is not None, "the first stage needs tokens"
            types = types if self._has_types and types is not None else torch.zeros_like(tokens)
            hidden = self.embedding(tokens, None, rng_key, types=types)
        assert hidden is not None, "a later stage needs the hidden states of the one before"
        inputs = LayerInputs(
            rng_key=rng_key,
            rotary=self._rotary(hidden, None),
            attention_mask=attention_mask,
            side_losses=side_losses or SideLosses(),
            text_mask=text_rows(text_mask, self._context),
            cache=cache,
        )
        out: Tensor = self.encoder(hidden, inputs)
        return out

    def costs(self, workload: Workload) -> Costs:
        """Costs of the body: embeddings and layers, and on the last stage hidden states with their gradient."""
        working = 2 * workload.rows * self._config.hidden_size * workload.itemsize * self._is_last
        return total_of((self.embedding, self.encoder), workload) + Costs(working=working)


class BertModel(BertBody):
    """The stage's part of a BERT (Devlin et al. 2018, arXiv:1810.04805). Pre-norm layers unless the config says else;
    with the residuals behind the norms it is the original, and Hugging Face's, weight for weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        *,
        stage: Stage | None = None,
        binary_head: bool = True,
        exact_gelu_head: bool = False,
        head_bias: bool = True,
        token_types: int = TokenTypesConfig.num_tokentypes,
        moe: MoEConfig = NO_EXPERTS,
        lora: LoraConfig = NO_ADAPTERS,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        stage = stage or Stage(range(config.num_layers), is_first=True, is_last=True)
        super().__init__(config, context, stage=stage, token_types=token_types, moe=moe, lora=lora, recompute=recompute)
        shares_embedding = stage.is_first and not config.untie_embeddings_and_output_weights
        exact = config.nonlinearity == "gelu" or exact_gelu_head
        self.lm_head = MaskedLMHead(config, context, exact=exact, bias=head_bias) if stage.is_last else None
        self.output_layer = (
            OutputLayer(config, context, has_weight=not shares_embedding, bias=True) if stage.is_last else None
        )
        has_order = stage.is_last and binary_head
        self.pooler = Pooler(config, context) if has_order else None
        self.binary_head = head_of_first_token(2, config, context) if has_order else None
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    @override
    def forward(
        self,
        tokens: Tensor | None,
        types: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        rng_key: StreamKey | None = None,
        hidden: Tensor | None = None,
        side_losses: SideLosses | None = None,
        text_mask: Tensor | None = None,
    ) -> BertOutput | Tensor:
        """Token ids and types ``[b, S]`` (None after the first stage) to the output, before the last to hidden states.

        With context parallelism both are the rank's slice. ``attention_mask`` ``[b, S]``: True for tokens that are no
        padding, of the whole sequence; None where there is none. ``hidden`` ``[s, b, h]``: what the stage before
        returned. ``rng_key``: the microbatch's random streams, needed only when dropout draws. ``side_losses``: takes
        the losses of layers. ``text_mask`` ``[b, S]``: the tokens of the rank's slice that are no padding, which alone
        are sent to experts; None: all.
        """
        rng_key = rng_key or StreamKey(0)
        hidden = self.hidden_states(
            tokens,
            types,
            attention_mask=attention_mask,
            rng_key=rng_key,
            hidden=hidden,
            side_losses=side_losses,
            text_mask=text_mask,
        )
        return self.heads(hidden) if self._is_last else hidden

    def heads(self, hidden: Tensor) -> BertOutput:
        """What the heads say of the last hidden states ``[s, b, h]``."""
        assert self.lm_head is not None and self.output_layer is not None
        words = vocabulary_output(
            self.lm_head(hidden), self._output_weight(), self._config, self._context, bias=self.output_layer.bias
        )
        if self.pooler is None or self.binary_head is None:
            return BertOutput(words, None)
        return BertOutput(words, self.binary_head(self.pooler(hidden)))

    @override
    def costs(self, workload: Workload) -> Costs:
        """The body's, those of the words that are predicted, and of the order on one token."""
        found = super().costs(workload) + costs_of(self.lm_head, workload)
        if self._is_last:
            found += vocabulary_costs(self._output_weight(), workload, self._config)
        return found + total_of((self.pooler, self.binary_head), dataclasses.replace(workload, length=1))

    def _output_weight(self) -> Tensor:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight


class MaskedLMHead(nn.Module):
    """Dense, GELU and norm between the last layer and the output layer; each rank holds all of it."""

    def __init__(self, config: ModelConfig, context: ModelContext, *, exact: bool, bias: bool) -> None:
        super().__init__()
        self._exact = exact
        self.dense = ReplicatedLinear(
            config.hidden_size, config.hidden_size, context, init=input_init(config), bias=bias
        )
        self.layer_norm = Norm(config.hidden_size, config, context)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        out: Tensor = self.layer_norm(activation(self.dense(x), "gelu" if self._exact else "gelu_tanh"))
        return out

    def costs(self, workload: Workload) -> Costs:
        """Keeps the inputs of the matmul, of the activation and of the norm."""
        dense = self.dense.costs(workload)
        return dataclasses.replace(dense, kept=3 * dense.kept)


class Pooler(nn.Module):
    """tanh of a dense layer on the first token: one vector for a sample, the same on every tensor-parallel rank."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._context = context
        self.dense = ReplicatedLinear(
            config.hidden_size, config.hidden_size, context, init=input_init(config), partial_grad=()
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h] -> [b, h]``."""
        return torch.tanh(self.dense(first_token(x, self._context)))


def head_of_first_token(outputs: int, config: ModelConfig, context: ModelContext) -> ReplicatedLinear:
    """A linear layer on the pooler's output; each rank computes all of it and of its gradient."""
    return ReplicatedLinear(config.hidden_size, outputs, context, init=input_init(config), partial_grad=())
