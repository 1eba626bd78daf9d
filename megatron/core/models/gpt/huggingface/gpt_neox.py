"""GPT-NeoX and Pythia: attention and MLP in parallel with a norm each, and a part of each head rotated."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor, Width
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import GROUPED

OURS, THEIRS = "decoder.layers.{n}", "gpt_neox.layers.{n}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    parallel = reader("use_parallel_residual")
    found = {"parallel_attention": parallel, "parallel_layernorm": parallel}
    width = reader("hidden_size") // reader("num_attention_heads")
    if reader.get("head_dim", width) not in (width, None):
        raise reader.refuse("head_dim", f"heads have hidden_size / num_attention_heads = {width} channels")
    rope = reader.within("rope_scaling", "rope_parameters")  # without them, rotary settings have names of their own
    if not rope.get("rope_theta"):
        found["rotary_base"] = float(reader("rotary_emb_base"))
    if not rope.get("partial_rotary_factor"):
        found["rotary_percent"] = float(reader("rotary_pct"))
    return found


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "use_parallel_residual": model.parallel_attention,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
    }


def _one_norm(model: ModelConfig) -> list[str]:
    shared = model.parallel_attention and not model.parallel_layernorm
    return ["attention and MLP have one norm together"] if shared else []


GPT_NEOX = ModelType(
    architecture="GPTNeoXForCausalLM",
    table=(
        Row("embedding.word_embeddings", "gpt_neox.embed_in"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.input_layernorm"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.attention.query_key_value", GROUPED),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attention.dense"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.dense_h_to_4h"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.dense_4h_to_h"),
        Row("decoder.final_layernorm", "gpt_neox.final_layer_norm"),
        Row("output_layer", "embed_out"),
    ),
    settings={**USUAL_SETTINGS, "norm_epsilon": "layer_norm_eps", "hidden_dropout": "hidden_dropout"},
    activations=UNGATED,
    features=(partial_rotary(), attention_biases(default=True, mlp=True)),
    by_code=("parallel_attention", "parallel_layernorm"),
    fixed={"position_embedding_type": "rope"},
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
    },
    kinds={
        "use_parallel_residual": bool,
        "head_dim": Width,
        **dict.fromkeys(("rotary_emb_base", "rotary_pct"), Factor),
    },
    read=_read,
    write=_write,
    refuse=_one_norm,
    prefix="gpt_neox.",
    heads=("embed_out.", "lm_head."),
    aliases={"lm_head.weight": "embed_out.weight"},  # in memory, since transformers 5
    unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    tied_copies=("embed_out.weight",),
    about="GPT-NeoX 20B, Pythia and others: attention and MLP in parallel or in sequence; tied or not",
    example="EleutherAI/pythia-160m",
)
TYPES = {"gpt_neox": GPT_NEOX}
