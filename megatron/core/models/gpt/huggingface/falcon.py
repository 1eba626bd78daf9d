"""Falcon: the decoder of 7B, with one norm for attention and MLP in parallel, and the newer one of 40B and 11B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.biases import even_biases
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.huggingface.rotary import FIELDS, KINDS, read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import GROUPED
from megatron.small_files import Between

OURS, THEIRS = "decoder.layers.{n}", "transformer.h.{n}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Settings of positions, norms, branches and key/value heads, which differ between the newer decoder and the older
    one.
    """
    newer, parallel = bool(reader.get("new_decoder_architecture")), bool(reader("parallel_attn"))
    norms, heads = reader.get("num_ln_in_parallel_attn"), reader("num_attention_heads")
    groups = reader.get("num_kv_heads")
    shared = 1 if reader.get("multi_query") else heads
    if newer and not parallel:
        raise reader.refuse("parallel_attn", "the newer decoder (new_decoder_architecture) has them in parallel only")
    if norms == 2 and not newer:
        advice = "only the newer decoder (new_decoder_architecture) has two norms"
        raise reader.refuse("num_ln_in_parallel_attn", advice)
    positions = {"position_embedding_type": "rope", **read_rotary(reader)}
    if reader.get("alibi"):  # transformers writes rotary settings for it, too, and skips them
        positions = {"position_embedding_type": "alibi", "scale_alibi": True}
    if not newer:
        return {**positions, "num_query_groups": shared, "parallel_attention": parallel, "parallel_layernorm": False}
    return {
        **positions,
        "num_query_groups": groups or heads,
        "parallel_attention": True,
        "parallel_layernorm": norms in (None, 2),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    groups, heads = model.num_query_groups, model.num_attention_heads
    newer, has_alibi = model.parallel_layernorm or groups not in (1, heads), model.position_embedding_type == "alibi"
    return {
        "new_decoder_architecture": newer,
        "parallel_attn": model.parallel_attention,
        "num_ln_in_parallel_attn": (2 if model.parallel_layernorm else 1) if newer else None,
        "multi_query": groups == 1,
        "alibi": has_alibi,
        **({} if has_alibi else written_rotary(model)),
    }


def _refuse(model: ModelConfig) -> list[str]:
    wrong = []
    if not model.parallel_attention and model.num_query_groups not in (1, model.num_attention_heads):
        wrong.append("attention and MLP are in sequence, with more than one key/value head for several queries")
    if model.position_embedding_type == "alibi":
        if not model.scale_alibi:
            wrong.append("ALiBi's biases are not scaled with the scores")
    elif not model.is_rotary:
        wrong.append("positions are neither rotary nor ALiBi")
    return wrong


def _norms(model: ModelConfig) -> Sequence[Row]:
    if not model.parallel_layernorm:
        return ()
    return (Row(f"{OURS}.input_layernorm", f"{THEIRS}.ln_attn"), Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.ln_mlp"))


FALCON = ModelType(
    architecture="FalconForCausalLM",
    table=(
        Row("embedding.word_embeddings", "transformer.word_embeddings"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.input_layernorm"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.self_attention.query_key_value", GROUPED),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.self_attention.dense"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.dense_h_to_4h"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.dense_4h_to_h"),
        Row("decoder.final_layernorm", "transformer.ln_f"),
        Row("output_layer", "lm_head"),
    ),
    rows=_norms,
    settings={
        **USUAL_SETTINGS,
        "num_query_groups": "num_kv_heads",
        "ffn_hidden_size": "ffn_hidden_size",
        "norm_epsilon": "layer_norm_epsilon",
        "hidden_dropout": "hidden_dropout",
    },
    optional=("ffn_hidden_size", "num_kv_heads"),
    activation="activation",
    activations=UNGATED,
    features=(even_biases("bias", default=False),),
    by_code=("parallel_attention", "parallel_layernorm", "scale_alibi", *FIELDS),
    spellings=("new_decoder_architecture", "num_ln_in_parallel_attn", "multi_query", "num_kv_heads"),
    defaults={
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "multi_query": True,
        "parallel_attn": True,
        "rope_theta": 10000.0,
        "alibi": False,
    },
    kinds={
        **KINDS,
        **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "multi_query", "alibi"), bool),
        "num_ln_in_parallel_attn": Annotated[int, Between(1, 2)],
    },
    read=_read,
    write=_write,
    refuse=_refuse,
    prefix="transformer.",
    attention="sdpa",  # with eager attention transformers adds ALiBi twice, to the scores and with the mask
    unused=(".inv_freq",),
    tied_copies=("lm_head.weight",),
    about="Falcon 7B, 40B, 180B, RW 1B and 7B and Falcon 2 11B, with rotary positions or ALiBi (in the type of the "
    "model; transformers rounds it to bf16); any number of key/value heads; tied or not",
    example="tiiuae/falcon-7b",
)
TYPES = {"falcon": FALCON}
