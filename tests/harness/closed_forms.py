"""Closed forms of published models' parameters and FLOPs: what planning counts on the modules must come to the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage, model_stages
from megatron.config.run import RunConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.layers import EncoderDecoderLayers
from tasks.settings import AnswerShape


@dataclass(frozen=True)
class FamilyParts:
    """The parts of a model that differ from family to family."""

    decoder_layers: int = 0
    position_buckets: int = 0
    token_types: int = 0
    has_word_head: bool = False
    has_output_bias: bool = False
    pooled_outputs: int = 0
    predicts_words: bool = True


def family_parts(run: RunConfig) -> FamilyParts:
    """By the family's settings."""
    bert, t5, model = run.find(BertConfig), run.find(T5Config), run.model
    if bert is not None:
        return FamilyParts(token_types=2, has_word_head=True, pooled_outputs=2 if bert.bert_binary_head else 0)
    if t5 is not None:
        relative, tied = model.position_embedding_type == "relative", not model.untie_embeddings_and_output_weights
        return FamilyParts(
            decoder_layers=t5.decoder_num_layers,
            position_buckets=t5.relative_attention_num_buckets if relative else 0,
            has_output_bias=tied and model.add_bias_linear,
        )
    return FamilyParts(has_output_bias=model.add_output_layer_bias)


def model_parameters(run: RunConfig) -> int:
    """Of the whole model, without vocabulary padding."""
    assert run.model.vocab_size is not None
    whole = [Stage(range(run.num_layers), is_first=True, is_last=True)]
    return _parameters(run, whole, ranks=1, vocabulary=run.model.vocab_size)


def rank_parameters(run: RunConfig, *, pipeline_rank: int = 0) -> int:
    """Of a rank of this place in the pipeline, with vocabulary padding."""
    ranks = run.parallel.tensor_model_parallel_size
    stages = [stage for stage in model_stages(run) if stage.rank == pipeline_rank]
    return _parameters(run, stages, ranks=ranks, vocabulary=run.padded_vocab_size // ranks)


def _parameters(run: RunConfig, stages: Sequence[Stage], *, ranks: int, vocabulary: int) -> int:
    model, parts = run.model, family_parts(run)
    hidden, tied = model.hidden_size, not model.untie_embeddings_and_output_weights
    norm = hidden * _norm_weights(model)
    learned = model.position_embedding_type == "learned_absolute"
    # Without a decoder all layers are the encoder's.
    held = [EncoderDecoderLayers.of(stage.layers, model.num_layers) for stage in stages]
    last = any(stage.is_last for stage in stages)
    embeds = any(stage.is_first for stage in stages) or any(each.opens_decoder for each in held)
    embeds = embeds or (last and model.mtp_num_layers > 0)
    attention = _attention_parameters(model, ranks)
    layer, cross = (
        attention + _mlp_parameters(model, ranks) + _norms(model, first=1, others=1) * norm,
        attention + _norms(model, first=1, others=0) * norm,
    )
    positions = (model.max_position_embeddings if learned else 0) + parts.token_types
    counts = {
        "word_embeddings": vocabulary * model.word_width * embeds,
        "projections": model.word_width * hidden * (model.word_width != hidden) * (embeds + last),
        "position_embeddings": positions * hidden * embeds + _position_tables(run, held, ranks),
        "layers": sum(len(stage.layers) * layer for stage in stages) + sum(len(each.decoder) * cross for each in held),
        "embedding_norm": norm * model.embedding_norm * embeds,
        "first_attention_norm": -norm * (not model.first_attention_norm) * embeds,
        "future_tokens": (layer + 2 * hidden * hidden // ranks + 3 * norm) * model.mtp_num_layers * last,
        "final_norm": norm * (last + (parts.decoder_layers > 0 and any(each.closes_encoder for each in held))),
        "output_layer": vocabulary * model.word_width * (last and parts.predicts_words and not (tied and embeds)),
        "heads": _head_parameters(parts, hidden=hidden, norm=norm, vocabulary=vocabulary) if last else 0,
    }
    return sum(counts.values())


def _head_parameters(parts: FamilyParts, *, hidden: int, norm: int, vocabulary: int) -> int:
    """Parameters of the output heads."""
    dense = hidden * hidden + hidden
    words = dense + norm if parts.has_word_head else 0
    biases = vocabulary if parts.has_word_head or parts.has_output_bias else 0
    pooled = dense + parts.pooled_outputs * (hidden + 1) if parts.pooled_outputs else 0
    return words + biases + pooled


def _position_tables(run: RunConfig, held: Sequence[EncoderDecoderLayers], ranks: int) -> int:
    """Of relative positions: one for each stack that has layers here."""
    stacks = any(each.encoder for each in held) + any(each.decoder for each in held)
    return stacks * family_parts(run).position_buckets * run.model.num_attention_heads // ranks


def _latent_attention_parameters(model: ModelConfig, ranks: int) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads // ranks
    latent, query_latent = model.kv_lora_rank, model.q_lora_rank
    down = latent + model.qk_pos_emb_head_dim + (query_latent or 0)
    norms = (latent + (query_latent or 0)) * _norm_weights(model) * model.qk_layernorm
    queries = (query_latent or hidden) * heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    keys_and_values = latent * heads * (model.qk_head_dim + model.v_head_dim)
    output = heads * model.v_head_dim * hidden + hidden * model.add_attention_output_bias
    sinks = heads if model.softmax_type == "learnable" else 0
    return down * (hidden + model.add_qkv_bias) + norms + queries + keys_and_values + output + sinks


def _attention_parameters(model: ModelConfig, ranks: int) -> int:
    if model.multi_latent_attention:
        return _latent_attention_parameters(model, ranks)
    hidden, width = model.hidden_size, model.num_attention_heads * model.kv_channels
    fused = width + 2 * max(model.num_query_groups, ranks) * model.kv_channels  # ranks may have to share heads
    fused += width * model.attention_output_gate
    split = fused * hidden + width * hidden + fused * model.add_qkv_bias
    head_norms = _head_norm_parameters(model, ranks) if model.qk_layernorm else 0
    sinks = model.num_attention_heads // ranks if model.softmax_type == "learnable" else 0
    return split // ranks + hidden * model.add_attention_output_bias + head_norms + sinks


def _norm_weights(model: ModelConfig) -> int:
    """Numbers for each channel."""
    biased = model.norm_parameters == "weight_and_bias" and model.normalization == "LayerNorm"
    return (model.norm_parameters != "none") + biased


def _norms(model: ModelConfig, *, first: int, others: int) -> int:
    """Of so many branches."""
    share = model.parallel_attention and not model.parallel_layernorm
    before = first + (0 if share else others)
    after = first + others
    return (before if model.norm_placement != "after" else 0) + (after if model.norm_placement != "before" else 0)


def _head_norm_parameters(model: ModelConfig, ranks: int) -> int:
    if model.qk_layernorm_kind == "shared":
        return 2 * model.kv_channels * _norm_weights(model)
    heads = (model.num_attention_heads + max(model.num_query_groups, ranks)) // ranks
    return heads * model.kv_channels * (model.norm_parameters != "none")


def _mlp_parameters(model: ModelConfig, ranks: int) -> int:
    hidden, inner = model.hidden_size, model.ffn_hidden_size * (2 if model.gated else 1)
    split = inner * hidden + model.ffn_hidden_size * hidden + inner * model.add_mlp_bias
    return split // ranks + hidden * model.add_mlp_bias


def layers_flops_per_token(model: ModelConfig, keys: float) -> float:
    """Model FLOPs of all layers for one token that attends to ``keys`` others, forward and backward."""
    if model.multi_latent_attention:
        weights = _latent_attention_parameters(
            dataclasses.replace(model, qk_layernorm=False, softmax_type="vanilla"), 1
        )
        scores = model.num_attention_heads * (model.kv_channels + model.v_head_dim) * keys
        products = weights + scores + model.ffn_hidden_size * model.hidden_size * (3 if model.gated else 2)
        return 6 * model.num_layers * products
    query_width = model.num_attention_heads * model.kv_channels
    mlp = model.ffn_hidden_size * (1.5 if model.gated else 1.0)
    attention = query_width * (1 + model.num_query_groups / model.num_attention_heads + keys / model.hidden_size)
    return 12 * model.num_layers * model.hidden_size * (mlp + attention)


def gpt_flops_per_sample(model: ModelConfig, seq_length: int, *, tensor_model_parallel_size: int = 1) -> float:
    """Model FLOPs of one sequence, forward and backward: 2 per multiply-add, times 3.

    Megatron's formula: every matrix product of the dense model, half of the attention square (the causal half), the
    vocabulary as padded for the tensor-parallel size; all again for each future token. Recomputation, norms and
    activations are not counted.
    """
    padded_vocab_size = model.padded_vocab_size(tensor_model_parallel_size)
    later = model.mtp_num_layers
    layers = layers_flops_per_token(dataclasses.replace(model, num_layers=model.num_layers + later), seq_length / 2)
    outputs = (1 + later) * 6 * model.hidden_size * padded_vocab_size + later * 12 * model.hidden_size**2
    return float(seq_length * (layers + outputs))


def bert_flops_per_sample(
    model: ModelConfig, seq_length: int, *, hidden_share: float, binary_head: bool, tensor_model_parallel_size: int = 1
) -> float:
    """Model FLOPs of one sample of a bidirectional model, forward and backward.

    Layers over the whole square of attention; the dense layer of the word head over all tokens, the vocabulary over the
    ``hidden_share`` that are masked, and the order head over one.
    """
    hidden = model.hidden_size
    words = 6 * hidden * (hidden + hidden_share * model.padded_vocab_size(tensor_model_parallel_size))
    order = 6 * hidden * (hidden + 2) if binary_head else 0
    return float(seq_length * (layers_flops_per_token(model, seq_length) + words) + order)


def t5_flops_per_sample(
    model: ModelConfig,
    seq_length: int,
    *,
    decoder_num_layers: int,
    decoder_seq_length: int,
    tensor_model_parallel_size: int = 1,
) -> float:
    """Model FLOPs of one sample of an encoder and a decoder, forward and backward.

    The encoder with the whole square of attention, the decoder with its causal half; in each of the decoder's layers
    queries and outputs of cross-attention over its own tokens, keys and values over the encoder's, and the scores of
    every pair; the vocabulary over the decoder's tokens.
    """
    hidden, query_width = model.hidden_size, model.num_attention_heads * model.kv_channels
    decoder = dataclasses.replace(model, num_layers=decoder_num_layers)
    shared = model.num_query_groups / model.num_attention_heads
    queries = decoder_seq_length * (1 + seq_length / hidden)
    cross = 12 * decoder_num_layers * hidden * query_width * (queries + seq_length * shared)
    words = 6 * hidden * model.padded_vocab_size(tensor_model_parallel_size)
    spoken = decoder_seq_length * (layers_flops_per_token(decoder, decoder_seq_length / 2) + words)
    return float(seq_length * layers_flops_per_token(model, seq_length) + spoken + cross)


def answer_flops(model: ModelConfig, seq_length: int, answers: AnswerShape) -> float:
    """Model FLOPs of one sample, forward and backward: layers over the whole square of attention for each choice, and
    pooler and head on one token of each.
    """
    hidden = model.hidden_size
    head = 6 * hidden * (hidden + answers.classes)
    return float(answers.choices * (seq_length * layers_flops_per_token(model, seq_length) + head))
