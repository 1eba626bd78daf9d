"""Which tensors of Hugging Face's model families are which of ours."""

from __future__ import annotations

from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PerHead, QueryKeyValue, Same, Stacked, ThirdsOf, Transposed

LAYER = "decoder.layers.{n}"

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

TABLES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}

# Buffers that older versions of transformers saved, and the copy of a tied embedding.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
PREFIXES = {"gpt2": "transformer."}  # of the bare model inside the language model; "model." unless named here
