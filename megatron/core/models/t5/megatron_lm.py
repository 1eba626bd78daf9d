"""T5 in checkpoints of Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Count, Layers, Width
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat
from megatron.core.conversion.megatron_lm.names import (
    ATTENTION,
    MLP,
    OUTPUT,
    POSITIONS,
    WORDS,
    Names,
    depths_of,
    same,
    sinks,
    stack,
)
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import PortableModel
from megatron.core.models.t5.config import T5Config
from megatron.errors import CheckpointError

_CROSS = (
    ("pre_cross_attn_layernorm", "post_attention_norm", None),
    ("cross_attention.linear_q", "inter_attention.query", None),
    ("cross_attention.linear_kv", "inter_attention.key_value", None),
    ("cross_attention.linear_proj", "inter_attention.dense", None),
)
_MLP_BEHIND_CROSS = (("pre_mlp_layernorm", "post_inter_attention_norm", "mlp.linear_fc1.layer_norm"), *MLP[1:])
_RELATIVE = "relative_pos_emb.relative_attention_bias.weight"
_SAME_FIELDS = ("decoder_seq_length", "relative_attention_num_buckets", "relative_attention_max_distance")


class T5Format(MegatronLMFormat):
    """T5's checkpoints. Before core, the decoder had a number of layers of its own; core saves that argument and
    doesn't read it.
    """

    names = Names(
        WORDS,
        dataclasses.replace(POSITIONS, copy="position_embeddings.weight"),
        same("encoder_positions.weight", None, core=f"encoder_{_RELATIVE}"),
        same("decoder_positions.weight", None, core=f"decoder_{_RELATIVE}"),
        *stack("encoder", "encoder"),
        *stack("decoder", "decoder", (*ATTENTION, *_CROSS, *_MLP_BEHIND_CROSS)),
        sinks("decoder.layers.{n}.cross_attention"),
        same(OUTPUT.ours, OUTPUT.legacy, core=f"lm_head.{OUTPUT.core}", copy=OUTPUT.core),
        same("output_layer.bias", "lm_head.bias", core="lm_head.output_layer.bias", copy="output_layer.bias"),
    )
    marker_names = ("inter_attention.", "cross_attention.")
    replicated = ("encoder_positions.weight", "decoder_positions.weight")
    layer_count_arguments: Mapping[str, str] = {"decoder": "decoder_num_layers"}
    output_has_extra_state = True
    has_latest_layers = False
    kinds: Mapping[str, Any] = {
        **dict.fromkeys(("encoder_num_layers", "decoder_num_layers"), Layers),
        "decoder_seq_length": Count,
        **dict.fromkeys(("relative_attention_num_buckets", "relative_attention_max_distance"), Width),
    }

    @override
    def check(self, args: Arguments) -> None:
        """A tied output has a bias there, whatever the linear layers have."""
        tied = not args("untie_embeddings_and_output_weights", False)
        if tied and not args("add_bias_linear", True):
            raise CheckpointError(
                f"{args.where} is of a T5 without biases in linear layers (add_bias_linear), whose tied output layer "
                "still has a bias; here it has none, so only an untied output layer can be converted"
            )

    @override
    def groups_from_arguments(
        self, args: Arguments, model: ModelConfig, stored: Collection[str], *, legacy: bool
    ) -> tuple[object, ...]:
        """A decoder of as many layers as there are tensors of."""
        if args("num_experts", 0):
            raise CheckpointError(
                f"{args.where} is of a T5 with {args('num_experts')} experts, and a T5 with experts is not converted"
            )
        group = T5Config(decoder_num_layers=depths_of(stored)["decoder"])
        return (dataclasses.replace(group, **{name: args(name, getattr(group, name)) for name in _SAME_FIELDS}),)

    @override
    def unsupported(self, portable: PortableModel) -> dict[str, bool]:
        """Stacks of unequal depth, a scaled output, shared keys and values, a tied output without bias."""
        model, group = portable.model, T5Config.among(portable.groups)
        tied, depth = not model.untie_embeddings_and_output_weights, group.decoder_num_layers
        unequal = f"a T5 with equally many layers in encoder and decoder only, not {depth} and {model.num_layers}"
        return {
            "no T5 with experts (--num-experts)": MoEConfig.among(portable.groups).has_experts,
            unequal: depth != model.num_layers,
            "no scale of a T5's output (--scale-output)": group.scale_output,
            "no T5 whose heads share keys and values": model.num_query_groups != model.num_attention_heads,
            "a bias in a T5's tied output layer even with --disable-bias-linear": tied and not model.add_bias_linear,
        }

    @override
    def arguments(self, portable: PortableModel) -> dict[str, Any]:
        """Arguments for both stacks' sizes and relative positions."""
        group = T5Config.among(portable.groups)
        same_fields = {name: getattr(group, name) for name in ("decoder_num_layers", *_SAME_FIELDS)}
        return {
            **same_fields,
            "encoder_num_layers": portable.model.num_layers,
            "encoder_seq_length": portable.seq_length,
        }


FORMAT = T5Format()
