"""Which tensors of Hugging Face's model families are which of ours."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import KeyValue, PerHead, QueryKeyValue, Same, Stacked, ThirdsOf, Transposed

LAYER = "decoder.layers.{n}"
_KINDS = ("weight", "bias")

GPT2 = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    Row(f"{LAYER}.input_layernorm.weight", ("transformer.h.{n}.ln_1.weight",)),
    Row(f"{LAYER}.input_layernorm.bias", ("transformer.h.{n}.ln_1.bias",)),
    Row(f"{LAYER}.self_attention.linear_qkv.weight", ("transformer.h.{n}.attn.c_attn.weight",), ThirdsOf(Transposed())),
    Row(f"{LAYER}.self_attention.linear_qkv.bias", ("transformer.h.{n}.attn.c_attn.bias",), ThirdsOf(Same())),
    Row(f"{LAYER}.self_attention.linear_proj.weight", ("transformer.h.{n}.attn.c_proj.weight",), Transposed()),
    Row(f"{LAYER}.self_attention.linear_proj.bias", ("transformer.h.{n}.attn.c_proj.bias",)),
    Row(f"{LAYER}.pre_mlp_layernorm.weight", ("transformer.h.{n}.ln_2.weight",)),
    Row(f"{LAYER}.pre_mlp_layernorm.bias", ("transformer.h.{n}.ln_2.bias",)),
    Row(f"{LAYER}.mlp.linear_fc1.weight", ("transformer.h.{n}.mlp.c_fc.weight",), Transposed()),
    Row(f"{LAYER}.mlp.linear_fc1.bias", ("transformer.h.{n}.mlp.c_fc.bias",)),
    Row(f"{LAYER}.mlp.linear_fc2.weight", ("transformer.h.{n}.mlp.c_proj.weight",), Transposed()),
    Row(f"{LAYER}.mlp.linear_fc2.bias", ("transformer.h.{n}.mlp.c_proj.bias",)),
    Row("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)),
    Row("decoder.final_layernorm.bias", ("transformer.ln_f.bias",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_proj.{kind}" for letter in "qkv")


def _gate_and_up(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))


# Llama's names are those of Mistral and Qwen too. Biases and query/key norms are rows that most of them don't have.
LLAMA = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row(f"{LAYER}.input_layernorm.weight", ("model.layers.{n}.input_layernorm.weight",)),
    Row(f"{LAYER}.self_attention.linear_qkv.weight", _three("weight"), QueryKeyValue()),
    Row(f"{LAYER}.self_attention.linear_qkv.bias", _three("bias"), QueryKeyValue()),
    Row(f"{LAYER}.self_attention.q_layernorm.weight", ("model.layers.{n}.self_attn.q_norm.weight",), PerHead()),
    Row(f"{LAYER}.self_attention.k_layernorm.weight", ("model.layers.{n}.self_attn.k_norm.weight",), PerHead()),
    Row(f"{LAYER}.self_attention.linear_proj.weight", ("model.layers.{n}.self_attn.o_proj.weight",)),
    Row(f"{LAYER}.self_attention.linear_proj.bias", ("model.layers.{n}.self_attn.o_proj.bias",)),
    Row(f"{LAYER}.pre_mlp_layernorm.weight", ("model.layers.{n}.post_attention_layernorm.weight",)),
    Row(f"{LAYER}.mlp.linear_fc1.weight", _gate_and_up("weight"), Stacked(2)),
    Row(f"{LAYER}.mlp.linear_fc1.bias", _gate_and_up("bias"), Stacked(2)),
    Row(f"{LAYER}.mlp.linear_fc2.weight", ("model.layers.{n}.mlp.down_proj.weight",)),
    Row(f"{LAYER}.mlp.linear_fc2.bias", ("model.layers.{n}.mlp.down_proj.bias",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)

BERT_LAYER, THEIR_BERT_LAYER = "encoder.layers.{n}", "bert.encoder.layer.{n}"


def _both(ours: str, theirs: str) -> tuple[Row, Row]:
    return Row(f"{ours}.weight", (f"{theirs}.weight",)), Row(f"{ours}.bias", (f"{theirs}.bias",))


def _bert(norms: Sequence[Row]) -> tuple[Row, ...]:
    """A BERT's rows; where its ``norms`` are is what tells the two kinds apart."""
    layer, self_attention = THEIR_BERT_LAYER, f"{THEIR_BERT_LAYER}.attention.self"
    three = {kind: tuple(f"{self_attention}.{name}.{kind}" for name in ("query", "key", "value")) for kind in _KINDS}
    return (
        Row("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
        Row("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
        Row("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
        *norms,
        *(Row(f"{BERT_LAYER}.self_attention.linear_qkv.{kind}", three[kind], QueryKeyValue()) for kind in _KINDS),
        *_both(f"{BERT_LAYER}.self_attention.linear_proj", f"{layer}.attention.output.dense"),
        *_both(f"{BERT_LAYER}.mlp.linear_fc1", f"{layer}.intermediate.dense"),
        *_both(f"{BERT_LAYER}.mlp.linear_fc2", f"{layer}.output.dense"),
        *_both("lm_head.dense", "cls.predictions.transform.dense"),
        *_both("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
        Row("output_layer.bias", ("cls.predictions.bias",)),
        *_both("pooler.dense", "bert.pooler.dense"),
        *_both("binary_head", "cls.seq_relationship"),
    )


# The norm at the end of a layer of the original is the one at the start of our next.
BERT = _bert(
    (
        *_both("encoder.layers.0.input_layernorm", "bert.embeddings.LayerNorm"),
        *_both(f"{BERT_LAYER}.input_layernorm", "bert.encoder.layer.{before}.output.LayerNorm"),
        *_both(f"{BERT_LAYER}.pre_mlp_layernorm", f"{THEIR_BERT_LAYER}.attention.output.LayerNorm"),
        *_both("encoder.final_layernorm", "bert.encoder.layer.{last}.output.LayerNorm"),
    )
)
MEGATRON_BERT = _bert(
    (
        *_both(f"{BERT_LAYER}.input_layernorm", f"{THEIR_BERT_LAYER}.attention.ln"),
        *_both(f"{BERT_LAYER}.pre_mlp_layernorm", f"{THEIR_BERT_LAYER}.ln"),
        *_both("encoder.final_layernorm", "bert.encoder.ln"),
    )
)


def _t5_stack(stack: str, *, gated: bool) -> tuple[Row, ...]:
    """Rows of the encoder or the decoder; of its layers' parts the MLP is the last, cross-attention between."""
    ours, theirs = f"{stack}.layers.{{n}}", f"{stack}.block.{{n}}.layer"
    attention, cross, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention", 1 + (stack == "decoder")
    first = tuple(f"{theirs}.{mlp}.DenseReluDense.{name}.weight" for name in (("wi_0", "wi_1") if gated else ("wi",)))
    crossing = (
        Row(f"{ours}.pre_cross_attn_layernorm.weight", (f"{theirs}.1.layer_norm.weight",)),
        Row(f"{ours}.cross_attention.linear_q.weight", (f"{cross}.q.weight",)),
        Row(f"{ours}.cross_attention.linear_kv.weight", (f"{cross}.k.weight", f"{cross}.v.weight"), KeyValue()),
        Row(f"{ours}.cross_attention.linear_proj.weight", (f"{cross}.o.weight",)),
    )
    return (
        Row(f"{stack}_positions.weight", (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)),
        Row(f"{ours}.input_layernorm.weight", (f"{theirs}.0.layer_norm.weight",)),
        Row(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{attention}.{letter}.weight" for letter in "qkv"),
            QueryKeyValue(),
        ),
        Row(f"{ours}.self_attention.linear_proj.weight", (f"{attention}.o.weight",)),
        *(crossing if stack == "decoder" else ()),
        Row(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.{mlp}.layer_norm.weight",)),
        Row(f"{ours}.mlp.linear_fc1.weight", first, Stacked(2) if gated else Same()),
        Row(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.{mlp}.DenseReluDense.wo.weight",)),
        Row(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",)),
    )


def _t5(*, gated: bool) -> tuple[Row, ...]:
    return (
        Row("embedding.word_embeddings.weight", ("shared.weight",)),
        *_t5_stack("encoder", gated=gated),
        *_t5_stack("decoder", gated=gated),
        Row("output_layer.weight", ("lm_head.weight",)),
    )


T5, GATED_T5 = _t5(gated=False), _t5(gated=True)
_TABLES = {
    "gpt2": GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
}


def table_of(family: str, model: ModelConfig) -> tuple[Row, ...]:
    """The rows of a family, for its member ``model``."""
    if family == "t5":
        return GATED_T5 if model.gated else T5
    return _TABLES[family]


# Buffers that older versions of transformers saved, a table that T5 never read, and copies of tied tensors.
IGNORED = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    ".embeddings.position_ids",
    ".EncDecAttention.relative_attention_bias.weight",
)
TIED_COPIES = (
    "lm_head.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
# Of the bare model inside the language model; "model." unless named here.
PREFIXES = {"gpt2": "transformer.", "bert": "bert.", "megatron-bert": "bert.", "t5": ""}
