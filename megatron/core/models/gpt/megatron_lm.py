"""GPT in checkpoints of Megatron-LM, its experts' arguments among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any

import torch
from typing_extensions import override

from megatron.config.hybrid import HybridConfig
from megatron.config.layer_patterns import every_or_listed, shortest_pattern
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig, sinkhorn_weights
from megatron.core.conversion.bounds import Factor, Width
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat
from megatron.core.conversion.megatron_lm.names import (
    OUTPUT,
    POSITIONS,
    WORDS,
    Names,
    final_norm_of_hybrids,
    mixers_and_experts,
    mtp_layers,
    mtp_layers_of_hybrids,
    stack,
)
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.models.gpt import megatron_lm_delta_nets as delta_nets
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.megatron_lm_hybrid import KINDS as HYBRID_KINDS
from megatron.core.models.gpt.megatron_lm_hybrid import (
    depth_size,
    experts_of_pattern,
    hybrid_arguments,
    hybrid_from_arguments,
    unsupported,
)
from megatron.errors import CheckpointError, ConfigError
from megatron.small_files import Between

_Experts = Annotated[int, Between(1, 4096)]
_SAME = (
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype", "moe_router_enable_expert_bias"),
)
_NOT_OF_SINKHORN = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor")
# Those that --use-checkpoint-args doesn't take from a checkpoint.
_NOT_TAKEN = ("moe_shared_expert_gate", "moe_router_score_function", *_SAME[6:])
_BIAS, _GATE = ".mlp.experts.linear_fc1.bias", ".mlp.shared_experts.gate.weight"


_DECODER = (*stack("decoder", "encoder"), *mixers_and_experts("decoder.layers.{n}"))


@lru_cache(maxsize=8)
def _names_of_hybrids(depth_size: int) -> Names:
    """The norm behind a hybrid's layers has another name than a GPT's, and each depth has several layers."""
    return Names(WORDS, POSITIONS, *final_norm_of_hybrids(), *_DECODER, *mtp_layers_of_hybrids(depth_size), OUTPUT)


class GPTFormat(MegatronLMFormat):
    """Checkpoints without marker tensors of another family."""

    names = Names(WORDS, POSITIONS, *_DECODER, *mtp_layers(), *final_norm_of_hybrids(), OUTPUT)
    layer_count_arguments: Mapping[str, str] = {"mtp": "mtp_num_layers"}
    kinds: Mapping[str, Any] = {
        **HYBRID_KINDS,
        **delta_nets.KINDS,
        "num_experts": Annotated[int, Between(0, 4096)],
        **dict.fromkeys(("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"), _Experts),
        **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), Width),
        "moe_router_topk_scaling_factor": Factor,
        **dict.fromkeys(("moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate"), bool),
        **dict.fromkeys(("moe_router_score_function", "moe_router_dtype"), str),
        "moe_expert_capacity_factor": Annotated[float, Between(-1e6, 1e6)],
    }

    @override
    def names_of(self, groups: Sequence[object]) -> Names:
        """Hybrids have names of their own."""
        hybrid = HybridConfig.among(groups)
        return _names_of_hybrids(len(hybrid.depth_letters)) if hybrid.is_hybrid else self.names

    @override
    def names_in(self, args: Arguments) -> Names:
        """How many layers a depth of a hybrid has is in its pattern."""
        size = depth_size(args)
        return _names_of_hybrids(size) if size else self.names

    @override
    def is_engines(self, groups: Sequence[object]) -> bool:
        """Hybrids and gated delta nets."""
        return HybridConfig.among(groups).is_hybrid or GatedDeltaNetConfig.among(groups).has_delta_nets

    @override
    def check(self, args: Arguments) -> None:
        """Raise CheckpointError for gated delta nets that compute something else there."""
        delta_nets.check(args)

    @override
    def groups_from_arguments(
        self, args: Arguments, model: ModelConfig, stored: Collection[str], *, legacy: bool
    ) -> tuple[object, ...]:
        """Settings of the model's experts. Tensors alone tell whether shared experts have a gate in releases without an
        argument for it.

        Raises CheckpointError for choices that a router can't make, or makes in another way here.
        """
        hybrid, mamba = hybrid_from_arguments(args, model, stored)
        of_hybrid = (*((hybrid, mamba) if hybrid.is_hybrid else ()), delta_nets.read(args, model, hybrid))
        if not args("num_experts", 0):
            return (GPTConfig(), *of_hybrid)
        found = {name: value for name in _SAME if (value := args(name, None)) is not None}
        found.setdefault("moe_ffn_hidden_size", model.ffn_hidden_size)
        if args("moe_router_load_balancing_type", "") in ("sinkhorn", ["sinkhorn"]):  # which has no other settings
            found |= dict.fromkeys(_NOT_OF_SINKHORN) | sinkhorn_weights(args("moe_router_topk", 2))
        if args("moe_shared_expert_intermediate_size", 0):
            found["moe_shared_expert_gate"] = any(name.endswith(_GATE) for name in stored)
        marked = experts_of_pattern(hybrid) if hybrid.is_hybrid else str(args("moe_layer_freq", 1))
        try:
            pattern = shortest_pattern(every_or_listed(marked, model.num_layers, flag="moe_layer_freq"))
        except ConfigError as error:
            raise CheckpointError(f"{args.where}: its saved settings: {error}") from None
        moe = MoEConfig(**found, moe_layer_freq=pattern)
        if problems := [*_impossible(moe), *(f"has {what}" for what, asked in _differences(moe).items() if asked)]:
            raise CheckpointError(f"{args.where} describes a router that {' and '.join(problems)}")
        return (GPTConfig(), *of_hybrid, moe)

    @override
    def default_tensors(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Zeros for the biases of routers whose experts have some: releases before core 0.15 have none."""
        found = {}
        for layer in (name.removesuffix(_BIAS) for name in stored if name.endswith(_BIAS)):
            name = f"{layer}.mlp.router.bias"
            if name not in stored:
                like = stored[f"{layer}.mlp.router.weight"]
                zeros = partial(torch.zeros, like.shape[:1], dtype=like.dtype)
                found[name] = LazyTensor(like.shape[:1], like.dtype, zeros)
        return found

    @override
    def unsupported(self, portable: PortableModel) -> dict[str, bool]:
        """What no mixers, router or experts of Megatron-LM's have, and whether these have it."""
        moe, of_hybrid = MoEConfig.among(portable.groups), unsupported(portable.model, portable.groups)
        of_hybrid |= delta_nets.unsupported(portable.model, portable.groups)
        if not moe.has_experts:
            return of_hybrid
        other_score = moe.scores_of_group * (moe.moe_router_group_topk or 1) != moe.moe_router_topk
        shared = moe.moe_shared_expert_intermediate_size is not None
        return of_hybrid | {
            f"no groups of experts with that score (--moe-router-group-score {moe.moe_router_group_score})": (
                moe.moe_router_num_groups is not None and other_score
            ),
            **{f"another meaning of {what}": asked for what, asked in _differences(moe).items()},
            "no biases in shared experts": shared and portable.model.add_mlp_bias,
        }

    @override
    def arguments(self, portable: PortableModel) -> dict[str, Any]:
        """Arguments that describe experts and mixers; none for a dense model of attention."""
        moe, of_hybrid = MoEConfig.among(portable.groups), hybrid_arguments(portable.model, portable.groups)
        of_hybrid |= delta_nets.arguments(portable.groups)
        if not moe.has_experts:
            return of_hybrid
        marked = moe.expert_layers(portable.model.num_layers)
        pattern = shortest_pattern(marked)
        return of_hybrid | {
            **{name: getattr(moe, name) for name in _SAME},
            "moe_layer_freq": int(pattern) if pattern.isdecimal() else [int(each) for each in marked],
            "moe_shared_expert_gate": moe.moe_shared_expert_gate,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
        }

    @override
    def flags(self, groups: Sequence[object]) -> dict[str, Any]:
        """Flags of mixers, routers and shared experts that --use-checkpoint-args doesn't take, defaults aside."""
        moe, usual = MoEConfig.among(groups), MoEConfig()
        found = {name: getattr(moe, name) for name in _NOT_TAKEN} if moe.has_experts else {}
        found = {name: value for name, value in found.items() if value != getattr(usual, name)}
        return found | delta_nets.flags(groups)

    @override
    def tensors_to_read(
        self, tensors: Mapping[str, LazyTensor], model: ModelConfig, groups: Sequence[object]
    ) -> Mapping[str, LazyTensor]:
        """Norms of value heads as they are here."""
        return delta_nets.with_norms(tensors, model, added=1.0)

    @override
    def tensors_to_write(self, portable: PortableModel) -> dict[str, LazyTensor]:
        """Norms of value heads as they are there."""
        return delta_nets.with_norms(portable.tensors, portable.model, added=-1.0)

    @override
    def notes(self, args: Arguments) -> tuple[str, ...]:
        """Choices that were dropped."""
        factor = args("moe_expert_capacity_factor", -1.0)
        if not args("num_experts", 0) or factor < 0:
            return ()
        return (
            f"note: it was trained with moe_expert_capacity_factor {factor}, which drops choices; none is dropped here "
            "and in the proof unless training goes on with --moe-expert-capacity-factor",
        )


FORMAT = GPTFormat()


def _impossible(moe: MoEConfig) -> list[str]:
    experts, chosen = moe.num_experts or 0, moe.moe_router_topk
    groups, kept = moe.moe_router_num_groups, moe.moe_router_group_topk
    if chosen > experts:
        return [f"chooses moe_router_topk {chosen} of num_experts {experts}"]
    if bool(groups) != bool(kept):
        return ["has only one of moe_router_num_groups and moe_router_group_topk"]
    if groups and kept and (experts % groups or kept > groups or chosen % kept or chosen > experts // groups * kept):
        return [f"chooses {chosen} of {experts} experts in {kept} of {groups} groups"]
    return []


def _differences(moe: MoEConfig) -> dict[str, bool]:
    """What routers do in another way there than here, and whether this one does it."""
    several = bool(moe.moe_router_group_topk) and moe.moe_router_topk != moe.moe_router_group_topk
    of_softmax = moe.moe_router_score_function == "softmax"
    return {
        "groups chosen by the sum of several logits (moe_router_group_topk without moe_router_pre_softmax)": (
            several and of_softmax and not moe.moe_router_pre_softmax
        ),
        "a bias of experts on softmax scores (moe_router_enable_expert_bias)": (
            of_softmax and moe.moe_router_enable_expert_bias
        ),
    }
