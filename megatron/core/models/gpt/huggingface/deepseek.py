"""DeepSeek-V2 and V3: latent attention, dense first layers, shared experts; V3 predicts future tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Factor, Width
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.rotary import ROTARY, read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform, stacked
from megatron.core.models.gpt.huggingface.experts import (
    KINDS,
    expert_layers,
    expert_rows,
    shared_rows,
    with_experts,
)
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS
from megatron.core.ops.rotary_scaling import yarn_attention_factor

LATER, THEIR_LATER = "mtp.layers.{n}", "model.layers.{beyond}"
_LATENT_EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps says


def _last_pairs_as_neighbours(tensor: Tensor, model: ModelConfig, *, width: int) -> Tensor:
    """``[heads·width, …]`` with the rotary pairs, in a head's last channels, as neighbours, whatever ours are."""
    if model.rotary_interleaved or not model.multi_latent_attention:
        return tensor
    turned, start = model.qk_pos_emb_head_dim, width - model.qk_pos_emb_head_dim
    order = [start + each for pair in range(turned // 2) for each in (pair, pair + turned // 2)]
    return tensor.reshape(-1, width, *tensor.shape[1:])[:, [*range(start), *order]].reshape(tensor.shape)


_QUERIES = Transform(
    lambda parts, model: parts[0],
    lambda tensor, model: [_last_pairs_as_neighbours(tensor, model, width=model.kv_channels)],
)
_LATENT = Transform(
    lambda parts, model: parts[0],
    lambda tensor, model: [
        _last_pairs_as_neighbours(tensor, model, width=model.kv_lora_rank + model.qk_pos_emb_head_dim)
    ],
)


def layer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """A layer with latent attention and a dense network."""
    attention, own = f"{theirs}.self_attn", f"{ours}.self_attention"
    pair = (f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj")
    return (
        Row(f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        Row(f"{own}.linear_q_proj", f"{attention}.q_proj", _QUERIES),
        Row(f"{own}.linear_q_down_proj", f"{attention}.q_a_proj"),
        Row(f"{own}.q_layernorm", f"{attention}.q_a_layernorm"),
        Row(f"{own}.linear_q_up_proj", f"{attention}.q_b_proj", _QUERIES),
        Row(f"{own}.linear_kv_down_proj", f"{attention}.kv_a_proj_with_mqa", _LATENT),
        Row(f"{own}.kv_layernorm", f"{attention}.kv_a_layernorm"),
        Row(f"{own}.linear_kv_up_proj", f"{attention}.kv_b_proj"),
        Row(f"{own}.linear_proj", f"{attention}.o_proj"),
        Row(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm"),
        Row(f"{ours}.mlp.linear_fc1", pair, stacked(2)),
        Row(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.down_proj"),
    )


ENDS = (
    Row("embedding.word_embeddings", "model.embed_tokens"),
    Row("decoder.final_layernorm", "model.norm"),
    Row("output_layer", "lm_head"),
)
MTP_ROWS = (
    Row(f"{LATER}.enorm", f"{THEIR_LATER}.enorm"),
    Row(f"{LATER}.hnorm", f"{THEIR_LATER}.hnorm"),
    Row(f"{LATER}.eh_proj", f"{THEIR_LATER}.eh_proj"),
    Row(f"{LATER}.final_layernorm", f"{THEIR_LATER}.shared_head.norm"),
)
"""Rows around the layer of a depth of multi-token prediction, which comes after the others."""


def mtp_copies(model: ModelConfig) -> dict[str, str]:
    """Tensors of multi-token prediction that are those of the model, a second time."""
    layers = [f"model.layers.{model.num_layers + depth}" for depth in range(model.mtp_num_layers)]
    output = "lm_head" if model.untie_embeddings_and_output_weights else "model.embed_tokens"
    return {
        f"{layer}.{name}.weight": f"{theirs}.weight"
        for layer in layers
        for name, theirs in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", output))
    }


def _read(reader: ConfigReader) -> dict[str, Any]:
    heads, turned = reader("num_attention_heads"), reader("qk_rope_head_dim")
    wanted = {
        "num_key_value_heads": heads,
        "head_dim": turned,
        "qk_head_dim": reader("qk_nope_head_dim") + turned,
        "rms_norm_eps": _LATENT_EPSILON,
    }
    for name, value in wanted.items():
        if reader.get(name, value) not in (value, None):
            raise reader.refuse(name, f"with the other settings it must be {value}")
    rotary, rope = read_rotary(reader), reader.within("rope_scaling", "rope_parameters")
    scale = rope.get("mscale_all_dim")
    if rotary.get("position_embedding_type") == "yarn" and scale and not rope.get("mscale"):
        # It scales the scores; cosine and sine have YaRN's own factor then.
        factor = rotary["rotary_attention_factor"] or yarn_attention_factor(rotary["rotary_scaling_factor"])
        rotary |= {"mscale": 1.0, "mscale_all_dim": float(scale), "rotary_attention_factor": factor}
    return {**rotary, "rotary_interleaved": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    found = written_rotary(model)
    if model.position_embedding_type == "yarn" and model.mscale_all_dim:
        found["rope_scaling"]["mscale_all_dim"] = model.mscale_all_dim
    return {**found, "num_key_value_heads": model.num_attention_heads}


def _refuse(model: ModelConfig) -> list[str]:
    if model.norm_epsilon == _LATENT_EPSILON:
        return []
    return [f"norms have the epsilon {model.norm_epsilon:g} and not {_LATENT_EPSILON:g}"]


_BASE = replace(
    LLAMA,
    architecture="DeepseekV2ForCausalLM",
    table=(*ENDS, *layer_rows(OURS, THEIRS)),
    settings={
        **{name: theirs for name, theirs in LLAMA.settings.items() if name not in ("num_query_groups", "kv_channels")},
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    optional=("q_lora_rank",),
    features=(ROTARY, attention_biases()),
    fixed={**LLAMA.fixed, "multi_latent_attention": True, "qk_layernorm": True},
    defaults={
        **LLAMA.defaults,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "topk_method": "greedy",
    },
    kinds={
        **KINDS,
        **dict.fromkeys(("num_key_value_heads", "head_dim", "qk_head_dim"), Width),
        **dict.fromkeys(("scoring_func", "topk_method"), str),
        **dict.fromkeys(("rope_interleave", "mlp_bias"), bool),
        "routed_scaling_factor": Factor,
        "moe_layer_freq": int,
    },
    read=_read,
    write=_write,
    refuse=_refuse,
)


def experts_after_dense(reader: ConfigReader) -> dict[str, Any]:
    """Experts in all but the first layers, and shared ones."""
    dense, layers = reader("first_k_dense_replace"), reader("num_hidden_layers")
    width, factor = reader("moe_intermediate_size"), reader("routed_scaling_factor")
    return {
        "num_experts": reader("n_routed_experts"),
        "moe_layer_freq": expert_layers([layer >= dense for layer in range(layers)]),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": reader("n_shared_experts") * width or None,
        "moe_router_topk": reader("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else float(factor),
    }


def written_after_dense(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    """The settings of ``experts_after_dense``."""
    marked = moe.expert_layers(model.num_layers)
    return {
        "n_routed_experts": moe.num_experts,
        "first_k_dense_replace": marked.index(True) if any(marked) else len(marked),
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "n_shared_experts": (moe.moe_shared_expert_intermediate_size or 0) // moe.moe_ffn_hidden_size,
        "num_experts_per_tok": moe.moe_router_topk,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
    }


def _v2_experts(reader: ConfigReader) -> dict[str, Any]:
    method = reader.one_of("topk_method", {"greedy": False, "group_limited_greedy": True})
    groups, kept = reader.get("n_group"), reader.get("topk_group")
    return {
        **experts_after_dense(reader),
        "moe_router_pre_softmax": True,
        **({"moe_router_num_groups": groups, "moe_router_group_topk": kept} if method else {}),
        **({"moe_router_group_score": "max"} if method else {}),
    }


def _written_v2(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    has_groups = moe.moe_router_num_groups is not None
    return {
        **written_after_dense(moe, model),
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
        "n_group": moe.moe_router_num_groups,
        "topk_group": moe.moe_router_group_topk,
    }


def _rows(moe: MoEConfig, *, ours: str = OURS, theirs: str = THEIRS) -> Sequence[Row]:
    network = f"{theirs}.mlp"
    return (*expert_rows(moe, ours, network), *shared_rows(ours, f"{network}.shared_experts"))


DEEPSEEK_V2 = with_experts(
    replace(
        _BASE,
        expected={"mlp_bias": False, "norm_topk_prob": False, "moe_layer_freq": 1, "scoring_func": "softmax"},
        about="DeepSeek-V2 and V2-Lite: latent attention, YaRN, experts in groups",
        example="deepseek-ai/DeepSeek-V2-Lite",
    ),
    read=_v2_experts,
    write=_written_v2,
    rows=_rows,
)


def biased_experts(reader: ConfigReader) -> dict[str, Any]:
    """Experts after dense layers, chosen as ``biased_choice`` says."""
    return {**experts_after_dense(reader), **biased_choice(reader)}


def biased_choice(reader: ConfigReader) -> dict[str, Any]:
    """Sigmoid scores, which add up to 1 where a token chooses several, and a bias of each expert for the choice."""
    groups, kept, several = reader("n_group"), reader("topk_group"), reader("num_experts_per_tok") > 1
    if reader("norm_topk_prob") != several:
        raise reader.refuse("norm_topk_prob", f"with this num_experts_per_tok this project supports only {several}")
    found: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    if groups == kept == 1:
        return found
    of_two = "sum" if reader("num_experts_per_tok") == 2 * kept else "top2"  # of the best scores, whatever is chosen
    return {
        **found,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_group_score": of_two,
    }


def written_biased(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    """The settings of ``biased_experts``."""
    return {**written_after_dense(moe, model), **written_choice(moe)}


def written_choice(moe: MoEConfig) -> dict[str, Any]:
    """The settings of ``biased_choice``."""
    groups = {"n_group": moe.moe_router_num_groups or 1, "topk_group": moe.moe_router_group_topk or 1}
    return {**groups, "norm_topk_prob": moe.moe_router_topk > 1}


def biased_rows(moe: MoEConfig) -> Sequence[Row]:
    """Rows of experts with a bias for the choice, in layers and in that of multi-token prediction."""
    bias = Row(f"{OURS}.mlp.router.expert_bias", f"{THEIRS}.mlp.gate.e_score_correction_bias", is_parameter=True)
    rows = (*_rows(moe), bias)
    return (*rows, *mtp_layer(rows))


def mtp_layer(
    rows: Sequence[Row], *, ours: str = f"{LATER}.transformer_layer", before: str = THEIRS, theirs: str = THEIR_LATER
) -> tuple[Row, ...]:
    """The rows of a layer as those of multi-token prediction. ``ours``, ``theirs``: what their names begin with there,
    and ``before`` in other layers.
    """

    def moved(name: str) -> str:
        return name.replace(before, theirs)

    return tuple(
        replace(
            row,
            ours=row.ours.replace(OURS, ours),
            theirs=moved(row.theirs) if isinstance(row.theirs, str) else tuple(map(moved, row.theirs)),
        )
        for row in rows
        if row.ours.startswith(OURS)
    )


BIASED_DEFAULTS = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
DEEPSEEK_V3 = with_experts(
    replace(
        _BASE,
        architecture="DeepseekV3ForCausalLM",
        table=(*_BASE.table, *mtp_layer(_BASE.table), *MTP_ROWS),
        settings={**_BASE.settings, "mtp_num_layers": "num_nextn_predict_layers"},
        optional=(*_BASE.optional, "num_nextn_predict_layers"),
        copies=mtp_copies,
        defaults={
            **_BASE.defaults,
            **BIASED_DEFAULTS,
            "topk_method": "noaux_tc",
            "max_position_embeddings": 4096,
            "rope_interleave": True,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
        },
        expected={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        read=lambda reader: {**_read(reader), "rotary_interleaved": reader("rope_interleave")},
        write=lambda model: {**_write(model), "rope_interleave": True},
        about="DeepSeek-V3 and R1, with their layers of multi-token prediction; weights in fp8 blocks are read",
        example="deepseek-ai/DeepSeek-V3",
    ),
    read=biased_experts,
    write=written_biased,
    rows=biased_rows,
)

TYPES: dict[str, ModelType] = {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3}
