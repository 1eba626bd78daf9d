"""The models whose training steps are timed: for each family ours and its peers, with equal input and equal losses.

A family is a ``Case``: one entry of ``CASES``, by its ``--model-type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from torch import nn

    from megatron.config.model import ModelConfig
    from megatron.core.parallel.model_context import ModelContext
    from megatron.core.transformer.stack import StackConfig

Loss = Callable[[], Any]
"""One forward pass: the mean loss, ready for ``backward``."""


@dataclass(frozen=True)
class Shape:
    """Size of the model and of a step."""

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    sequence: int = 512
    batch: int = 4
    vocabulary: int = 32000

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Case:
    """One family's models to compare. ``ours``: of a shape and settings of the model and context, the model and its
    loss. ``settings``: beyond the shape's.

    ``peers``: by name, of a shape the model and its loss. ``dense``: ours without experts, with as many products.
    """

    ours: Callable[[Shape, ModelConfig, ModelContext], tuple[nn.Module, Loss]]
    peers: Mapping[str, Callable[[Shape], tuple[nn.Module, Loss]]]
    settings: Mapping[str, Any]
    dense: Callable[[Shape, ModelConfig, ModelContext], tuple[nn.Module, Loss]] | None = None


def random_batch(shape: Shape) -> tuple[Any, Any]:
    """Tokens and labels [b, s]."""
    import torch

    ids = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_gpt(
    shape: Shape, config: ModelConfig, context: ModelContext, *, stack: StackConfig | None = None
) -> tuple[nn.Module, Loss]:
    """GPTModel, whose layers are those of ``stack`` if there is one."""
    import torch

    from megatron.core.models.gpt.model import GPTModel

    model = GPTModel(config, context, stack=stack, seed=1)
    tokens, labels = random_batch(shape)
    weights = torch.full(labels.shape, 1 / shape.tokens)
    return model, lambda: model(tokens).cross_entropy(labels, weights)


def transformers_gpt(shape: Shape) -> tuple[nn.Module, Loss]:
    """GPT2LMHeadModel with torch's scaled dot product attention."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.sequence, n_embd=shape.hidden, n_layer=shape.layers,
        n_head=shape.heads, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, activation_function="gelu",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()  # type: ignore[no-untyped-call]
    tokens, _ = random_batch(shape)
    return model, lambda: model(tokens, labels=tokens).loss


def plain_gpt(shape: Shape) -> tuple[nn.Module, Loss]:
    """A GPT as one would write it in plain PyTorch, after the manner of nanoGPT."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            h = shape.hidden
            self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        @override
        def forward(self, x: Tensor) -> Tensor:
            b, s, h = x.shape
            q, k, v = (
                part.view(b, s, shape.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(h, dim=2)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
            out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
            return out

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(shape.vocabulary, shape.hidden)
            self.positions = nn.Embedding(shape.sequence, shape.hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            self.words.weight = self.head.weight
            nn.init.normal_(self.head.weight, std=0.02)

        @override
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    model = GPT()
    tokens, labels = random_batch(shape)
    return model, lambda: model(tokens, labels)


@dataclass(frozen=True)
class MaskedBatch:
    """BERT's input: 15 % of the words hidden, and every other sample a quarter shorter than the longest."""

    tokens: Any
    types: Any
    real: Any
    labels: Any
    order: Any


def masked_batch(shape: Shape) -> MaskedBatch:
    """All [b, s]; ``labels`` −100 where no word is hidden, ``order`` [b]."""
    import torch

    tokens, labels = random_batch(shape)
    generator, positions = torch.Generator().manual_seed(2), torch.arange(shape.sequence)
    lengths = torch.where(torch.arange(shape.batch) % 2 == 0, shape.sequence, shape.sequence * 3 // 4)[:, None]
    real = positions < lengths
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.15) & real
    types = ((positions >= lengths // 2) & real).long()
    return MaskedBatch(tokens, types, real, torch.where(hidden, labels, -100), torch.arange(shape.batch) % 2)


def our_bert(shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
    """BertModel with both heads."""
    import torch.nn.functional as F

    from megatron.core.models.bert.model import BertModel

    model, batch = BertModel(config, context, seed=1), masked_batch(shape)
    hidden = (batch.labels >= 0).float()
    weights, labels = hidden / hidden.sum(), batch.labels.clamp(min=-1)

    def loss() -> Any:
        output: Any = model(batch.tokens, batch.types, attention_mask=batch.real)
        words = output.words.cross_entropy_where_weighted(labels, weights)
        return words + F.cross_entropy(output.order.float(), batch.order)

    return model, loss


def transformers_bert(shape: Shape) -> tuple[nn.Module, Loss]:
    """BertForPreTraining with torch's scaled dot product attention."""
    from transformers import AutoModelForPreTraining, BertConfig

    config = BertConfig(
        vocab_size=shape.vocabulary, max_position_embeddings=shape.sequence, hidden_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, intermediate_size=4 * shape.hidden,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act="gelu",
    )  # fmt: skip
    model = AutoModelForPreTraining.from_config(config, attn_implementation="sdpa").train()  # type: ignore[no-untyped-call]
    batch = masked_batch(shape)
    return model, lambda: model(
        batch.tokens, attention_mask=batch.real.long(), token_type_ids=batch.types,
        labels=batch.labels, next_sentence_label=batch.order,
    ).loss  # fmt: skip


@dataclass(frozen=True)
class SpanBatch:
    """T5's input: a decoder a quarter as long as the encoder, and every other sample of both a quarter shorter."""

    tokens: Any
    real: Any
    begun: Any
    labels: Any


def span_batch(shape: Shape) -> SpanBatch:
    """``tokens`` and ``real`` [b, s], ``begun`` and ``labels`` [b, s / 4], −100 where nothing is to be said."""
    import torch

    tokens, labels = random_batch(shape)
    length = shape.sequence // 4
    shares = torch.where(torch.arange(shape.batch) % 2 == 0, 4, 3)[:, None]
    real = torch.arange(shape.sequence) < shape.sequence * shares // 4
    answered = torch.arange(length) < length * shares // 4
    begun = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, : length - 1]], dim=1)
    return SpanBatch(tokens, real, begun, torch.where(answered, labels[:, :length], -100))


def our_t5(shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
    """T5Model, the original."""
    from megatron.core.models.t5.config import T5Config
    from megatron.core.models.t5.model import T5Model

    t5 = T5Config(decoder_num_layers=shape.layers, decoder_seq_length=shape.sequence // 4, scale_output=True)
    model, batch = T5Model(config, t5, context, seed=1), span_batch(shape)
    answered = (batch.labels >= 0).float()
    weights, labels = answered / answered.sum(), batch.labels.clamp(min=-1)

    def loss() -> Any:
        output: Any = model(batch.tokens, batch.begun, attention_mask=batch.real)
        return output.cross_entropy(labels, weights)

    return model, loss


def transformers_t5(shape: Shape, attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    """T5ForConditionalGeneration with the kind of attention named; its words begin as small as ours."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(
        "t5",
        vocab_size=shape.vocabulary, d_model=shape.hidden, d_kv=shape.hidden // shape.heads, d_ff=4 * shape.hidden,
        num_layers=shape.layers, num_decoder_layers=shape.layers, num_heads=shape.heads, dropout_rate=0.0,
        feed_forward_proj="relu", tie_word_embeddings=True, use_cache=False, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention).train()  # type: ignore[no-untyped-call]
    model.shared.weight.data.normal_(std=0.02)
    batch = span_batch(shape)
    given = {"attention_mask": batch.real.long(), "decoder_input_ids": batch.begun, "labels": batch.labels}
    return model, lambda: model(batch.tokens, **given).loss


def published_settings(model_type: str, shape: Shape) -> Any:
    """transformers' settings of a published decoder of this shape: grouped queries, no dropout, half-long windows."""
    from transformers import AutoConfig

    given: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": 4 * shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2, "head_dim": shape.hidden // shape.heads,
        "query_pre_attn_scalar": shape.hidden // shape.heads, "max_position_embeddings": shape.sequence,
        "sliding_window": shape.sequence // 2, "attention_dropout": 0.0, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **given)


def our_published(model_type: str, shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
    """GPTModel with the architecture of the published type, whatever ``config`` says."""
    import dataclasses

    from megatron.core.conversion.huggingface.formats import model_from_config

    described = model_from_config(published_settings(model_type, shape).to_dict(), where=model_type)
    return our_gpt(shape, dataclasses.replace(described, attention_dropout=0.0, hidden_dropout=0.0), context)


def transformers_published(model_type: str, attention: str, shape: Shape) -> tuple[nn.Module, Loss]:
    """The published type in transformers, with the kind of attention named."""
    from transformers import AutoModelForCausalLM

    config = published_settings(model_type, shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()  # type: ignore[no-untyped-call]
    tokens, _ = random_batch(shape)
    return model, lambda: model(tokens, labels=tokens).loss


def published(model_type: str, *attentions: str) -> Case:
    """A case of one published type against transformers with each kind of attention."""
    peers = {
        f"transformers-{attention}": partial(transformers_published, model_type, attention) for attention in attentions
    }
    return Case(partial(our_published, model_type), peers, {})


@dataclass(frozen=True)
class Experts:
    """A Mixtral's, whose width is a multiple of that of hidden states."""

    number: int
    chosen: int
    width: float

    def settings(self, shape: Shape) -> Any:
        """transformers' settings: grouped products, and no balancing loss."""
        config = published_settings("mixtral", shape)
        config.update({
            "num_local_experts": self.number, "num_experts_per_tok": self.chosen, "sliding_window": None,
            "intermediate_size": int(self.width * shape.hidden),
        })  # fmt: skip
        config._experts_implementation = "grouped_mm"
        return config

    def ours(self, shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
        """GPTModel with the same experts, whatever ``config`` says."""
        from megatron.config.moe import MoEConfig
        from megatron.core.models.gpt.layer_kinds import decoder_stack

        width = int(self.width * shape.hidden)
        moe = MoEConfig(num_experts=self.number, moe_router_topk=self.chosen, moe_ffn_hidden_size=width)
        model = self._model(shape)
        return our_gpt(shape, model, context, stack=decoder_stack(model, (moe,)))

    def dense(self, shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
        """GPTModel with one network as wide as the experts that a token chooses."""
        import dataclasses

        width = int(self.width * shape.hidden) * self.chosen
        return our_gpt(shape, dataclasses.replace(self._model(shape), ffn_hidden_size=width), context)

    def _model(self, shape: Shape) -> ModelConfig:
        import dataclasses

        from megatron.core.conversion.huggingface.formats import model_from_config

        described = model_from_config(self.settings(shape).to_dict(), where="mixtral")
        return dataclasses.replace(described, attention_dropout=0.0, hidden_dropout=0.0)

    def theirs(self, shape: Shape) -> tuple[nn.Module, Loss]:
        """transformers' Mixtral, whose routers begin as ours: at zero all tokens choose the same experts."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.settings(shape), attn_implementation="sdpa").train()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=0.02)
        tokens, _ = random_batch(shape)
        return model, lambda: model(tokens, labels=tokens).loss

    @property
    def case(self) -> Case:
        return Case(self.ours, {"transformers-grouped_mm": self.theirs}, {}, self.dense)


RANK, ALPHA = 16, 32.0  # of adapters on all linear layers


def our_adapters(model_type: str, shape: Shape, config: ModelConfig, context: ModelContext) -> tuple[nn.Module, Loss]:
    """GPTModel of the published type with adapters beside frozen weights, whatever ``config`` says."""
    import dataclasses

    from megatron.config.lora import LoraConfig, is_adapter
    from megatron.core.conversion.huggingface.formats import model_from_config
    from megatron.core.models.gpt.layer_kinds import decoder_stack

    described = model_from_config(published_settings(model_type, shape).to_dict(), where=model_type)
    described = dataclasses.replace(described, attention_dropout=0.0, hidden_dropout=0.0)
    lora = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
    model, loss = our_gpt(shape, described, context, stack=decoder_stack(described, (lora,)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model, loss


def peft_adapters(model_type: str, shape: Shape) -> tuple[nn.Module, Loss]:
    """The published type in transformers, with peft's adapters."""
    import warnings

    import peft

    model: Any = transformers_published(model_type, "sdpa", shape)[0]
    settings = peft.LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name in transformers
        adapted: Any = peft.get_peft_model(model, settings)
    tokens, _ = random_batch(shape)
    return adapted, lambda: adapted(input_ids=tokens, labels=tokens).loss


ORIGINAL_T5 = {
    "position_embedding_type": "relative", "softmax_scale": 1.0, "normalization": "RMSNorm", "norm_epsilon": 1e-6,
    "add_bias_linear": False, "activation": "relu",
}  # fmt: skip

CASES = {
    "GPT": Case(our_gpt, {"transformers": transformers_gpt, "plain": plain_gpt}, {}),
    "BERT": Case(our_bert, {"transformers": transformers_bert}, {"apply_residual_connection_post_layernorm": True}),
    "T5": Case(
        our_t5,
        {"transformers": transformers_t5, "transformers-eager": partial(transformers_t5, attention="eager")},
        ORIGINAL_T5,
    ),
    "gemma2": published("gemma2", "eager"),  # its soft cap exists in eager attention alone
    "olmo2": published("olmo2", "sdpa", "eager"),
    "qwen2-adapters": Case(partial(our_adapters, "qwen2"), {"peft": partial(peft_adapters, "qwen2")}, {}),
    "mixtral-8-experts": Experts(8, 2, 2).case,
    "mixtral-64-experts": Experts(64, 8, 0.5).case,
}
