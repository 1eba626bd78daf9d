"""BERT in checkpoints of Megatron-LM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat
from megatron.core.conversion.megatron_lm.names import OUTPUT, POSITIONS, WORDS, Names, both, same, stack
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.errors import CheckpointError

_TOKEN_TYPES = "embedding.tokentype_embeddings.weight"


class BertFormat(MegatronLMFormat):
    """BERT's checkpoints. Without the second head, today's Megatron-LM has no token types either."""

    names = Names(
        WORDS,
        POSITIONS,
        same(_TOKEN_TYPES, f"language_model.{_TOKEN_TYPES}"),
        *stack("encoder", "encoder"),
        *both("lm_head.dense", "lm_head.dense"),
        *both("lm_head.layer_norm", "lm_head.norm"),
        OUTPUT,
        same("output_layer.bias", "lm_head.bias"),
        *both("pooler.dense", "language_model.pooler.dense"),
        *both("binary_head", "binary_head"),
    )
    marker_names = ("lm_head.dense.",)
    output_has_extra_state = True
    has_latest_layers = False

    @override
    def groups_from_arguments(
        self, args: Arguments, model: ModelConfig, stored: Collection[str], *, legacy: bool
    ) -> tuple[object, ...]:
        """BERT's settings: with the second head where there are tensors of one."""
        if args("num_experts", 0):
            raise CheckpointError(
                f"{args.where} is of a BERT with {args('num_experts')} experts, and a BERT with experts is not "
                "converted"
            )
        exact = has_exact_head(args, legacy=legacy) and model.activation != "gelu"
        head = BertConfig(bert_binary_head="binary_head.weight" in stored, exact_gelu_head=exact)
        return (head, TokenTypesConfig())

    @override
    def default_tensors(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Zeros for the token types of a BERT without the second head."""
        if "binary_head.weight" in stored:
            return {}
        like = stored[WORDS.ours]
        shape = (TokenTypesConfig.num_tokentypes, like.shape[1])
        return {_TOKEN_TYPES: LazyTensor(shape, like.dtype, lambda: torch.zeros(shape, dtype=like.dtype))}

    @override
    def unsupported(self, portable: PortableModel) -> dict[str, bool]:
        """What Megatron-LM's BERT doesn't have, such as other positions than learned ones, and whether this model has
        it.
        """
        model, group = portable.model, BertConfig.among(portable.groups)
        types = TokenTypesConfig.among(portable.groups).num_tokentypes
        positions, is_exact = model.position_embedding_type, model.activation == "gelu" or group.exact_gelu_head
        return {
            "no BERT with experts (--num-experts)": MoEConfig.among(portable.groups).has_experts,
            f"no BERT with positions of type {positions}": positions != "learned_absolute",
            f"no BERT with --num-tokentypes {types}": types != TokenTypesConfig.num_tokentypes,
            "no head for masked tokens without a bias (--bert-no-head-bias)": not group.head_bias,
            "only the exact GELU in a BERT's head for masked tokens (--exact-gelu-head)": not is_exact,
        }

    @override
    def arguments(self, portable: PortableModel) -> dict[str, Any]:
        """Whether there is a second head."""
        return {"bert_binary_head": BertConfig.among(portable.groups).bert_binary_head}

    @override
    def tensors_to_write(self, portable: PortableModel) -> dict[str, LazyTensor]:
        """Tensors to write: without the second head, none of token types."""
        tensors = dict(portable.tensors)
        if BertConfig.among(portable.groups).bert_binary_head:
            return tensors
        if tensors.pop(_TOKEN_TYPES).make().any():
            raise CheckpointError(
                "Megatron-LM's BERT without a binary head has no embeddings of token types, and those of this model "
                "are not zero, so it can't be written for it"
            )
        return tensors


FORMAT = BertFormat()


def has_exact_head(args: Arguments, *, legacy: bool) -> bool:
    """Whether the head for masked tokens has the exact GELU: all but models before core with openai_gelu."""
    return not (legacy and args("openai_gelu", False))
