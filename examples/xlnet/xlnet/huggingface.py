"""Conversion from and to transformers' XLNet: its ``config.json``, and a table of its modules and ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.config_reader import GELUS, ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.small_files import Between
from xlnet.config import XLNetConfig

OURS, THEIRS = "encoder.layers.{n}", "transformer.layer.{n}"
ATTENTION, THEIR_ATTENTION = f"{OURS}.self_attention", f"{THEIRS}.rel_attn"
LONGEST = 1 << 20
"""``--max-position-embeddings`` of a published model: relative distances have no limit."""


def _split_inputs(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    return [tensor.t().reshape(tensor.shape[1], model.num_attention_heads, -1).contiguous()]


def _split_channels(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    return [tensor.reshape(*tensor.shape[:-1], model.num_attention_heads, -1).contiguous()]


FROM_HIDDEN = Transform(lambda parts, model: parts[0].flatten(1).t().contiguous(), _split_inputs)
"""A matrix ``[h, heads, d]`` of theirs, ``[heads·d, h]`` of ours."""
KEY_VALUE = Transform(
    lambda parts, model: torch.cat([FROM_HIDDEN.join([part], model) for part in parts]),
    lambda tensor, model: [FROM_HIDDEN.split(part, model)[0] for part in tensor.chunk(2)],
)
"""Two such matrices of theirs, keys and values, stacked in one of ours."""
BY_HEAD = Transform(lambda parts, model: parts[0].flatten(-2), _split_channels)
"""A tensor of theirs that ends in ``[heads, d]``, ours in ``[heads·d]``."""


def _parameters() -> tuple[Row, ...]:
    """Rows of the attention's parameters, which transformers keep in no modules."""
    rows = {
        "linear_q.weight": ("q", FROM_HIDDEN),
        "linear_proj.weight": ("o", BY_HEAD),
        "position_weight": ("r", FROM_HIDDEN),
        "content_bias": ("r_w_bias", BY_HEAD),
        "position_bias": ("r_r_bias", BY_HEAD),
        "document_bias": ("r_s_bias", BY_HEAD),
        "document_embedding": ("seg_embed", BY_HEAD),
    }
    key_value = tuple(f"{THEIR_ATTENTION}.{name}" for name in "kv")
    return (
        Row(f"{ATTENTION}.linear_kv.weight", key_value, KEY_VALUE, is_parameter=True),
        *(
            Row(f"{ATTENTION}.{ours}", f"{THEIR_ATTENTION}.{theirs}", transform, is_parameter=True)
            for ours, (theirs, transform) in rows.items()
        ),
    )


MASK = Transform(lambda parts, model: parts[0].flatten(), lambda tensor, model: [tensor.view(1, 1, -1)])
XLNET = ModelType(
    architecture="XLNetLMHeadModel",
    table=(
        Row("embedding.word_embeddings", "transformer.word_embedding"),
        Row("mask_embedding", "transformer.mask_emb", MASK, is_parameter=True),
        *_parameters(),
        # The norm at the end of a layer of theirs is the one at the start of our next.
        Row(f"{OURS}.input_layernorm", "transformer.layer.{before}.ff.layer_norm"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIR_ATTENTION}.layer_norm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.ff.layer_1"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.ff.layer_2"),
        Row("encoder.final_layernorm", "transformer.layer.{last}.ff.layer_norm"),
        Row("output_layer", "lm_loss"),
    ),
    settings={
        "num_layers": "n_layer",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "d_inner",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "dropout",
        "init_method_std": "initializer_range",
    },
    activation="ff_activation",
    activations={**GELUS, "relu": "relu"},
    by_code=("max_position_embeddings", "attention_dropout"),
    read=lambda reader: {"max_position_embeddings": LONGEST, "attention_dropout": reader("dropout")},
    expected={"attn_type": "bi", "bi_data": False, "same_length": False, "clamp_len": -1},
    written={"attn_type": "bi", "bi_data": False, "same_length": False, "clamp_len": -1, "reuse_len": None},
    fixed={
        "position_embedding_type": "relative",
        "apply_residual_connection_post_layernorm": True,
        "first_attention_norm": False,
        "add_bias_linear": False,
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
    },
    defaults={
        "ff_activation": "gelu",
        "attn_type": "bi",
        "dropout": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "mem_len": 512,
        "tie_word_embeddings": True,
    },
    kinds={
        "attn_type": str,
        "clamp_len": int,
        "mem_len": Annotated[int, Between(0, LONGEST)],
        "reuse_len": Annotated[int, Between(0, LONGEST)],
        **dict.fromkeys(("bi_data", "same_length"), bool),
    },
    prefix="transformer.",
    heads=("lm_loss.",),
    tied_copies=("lm_loss.weight",),
    about="XLNet with attention to both sides, here with --mem-len; tied or not",
    example="xlnet/xlnet-base-cased",
)


class XLNetFormat(HuggingFaceFormat):
    """The published format of XLNet."""

    types: Mapping[str, ModelType] = {"xlnet": XLNET}

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The length of the memory."""
        if reader.get("reuse_len"):
            raise reader.refuse("reuse_len", "this project remembers whole segments")
        return (XLNetConfig(mem_len=reader.get("mem_len") or 0),)

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """The length of the memory."""
        return {"mem_len": XLNetConfig.among(groups).mem_len or None}


FORMAT = XLNetFormat()
