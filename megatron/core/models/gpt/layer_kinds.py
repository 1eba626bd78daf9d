"""The layers of a decoder: one for each letter of a hybrid's pattern, or attention and MLP in all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, DELTA_NET, EXPERTS, MAMBA, MLP
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.lora import LoraConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe.layer import expert_branch, expert_layers, layers_with
from megatron.core.ssm.gated_delta_net import delta_net_branch
from megatron.core.ssm.mamba import mamba_branch
from megatron.core.transformer.stack import FEED_FORWARD, Layer, StackConfig, self_attention


def _attention(model: ModelConfig, groups: Sequence[object]) -> Layer:
    return (self_attention(model),)


def _mlp(model: ModelConfig, groups: Sequence[object]) -> Layer:
    return (FEED_FORWARD,)


def _experts(model: ModelConfig, groups: Sequence[object]) -> Layer:
    return (expert_branch(MoEConfig.among(groups)),)


def _mamba(model: ModelConfig, groups: Sequence[object]) -> Layer:
    return (mamba_branch(MambaConfig.among(groups)),)


def _delta_net(model: ModelConfig, groups: Sequence[object]) -> Layer:
    return (delta_net_branch(GatedDeltaNetConfig.among(groups)),)


LAYER_KINDS: Mapping[str, Callable[[ModelConfig, Sequence[object]], Layer]] = {
    ATTENTION: _attention,
    MLP: _mlp,
    EXPERTS: _experts,
    MAMBA: _mamba,
    DELTA_NET: _delta_net,
}
"""The layer that each letter of a pattern means, from the model's settings and its family's groups."""


def decoder_stack(model: ModelConfig, groups: Sequence[object]) -> StackConfig:
    """Causal layers: of a hybrid those of its pattern, else attention, which may be linear, and a feed-forward network
    each, which may be experts. Those of multi-token prediction come last, and are like the last of the model unless
    the pattern says them.

    ``groups``: settings that only a decoder has.
    """
    hybrid, moe, depths = HybridConfig.among(groups), MoEConfig.among(groups), model.mtp_num_layers
    if hybrid.is_hybrid:
        letters = hybrid.letters + hybrid.depth_letters * depths
        pattern = tuple(LAYER_KINDS[letter](model, groups) for letter in letters)
        depth = len(hybrid.depth_letters)
        return StackConfig(model, causal=True, pattern=pattern, layers_per_depth=depth, lora=LoraConfig.among(groups))
    marked = expert_layers(moe, (model.num_layers,), mtp_layers=depths)
    layers = layers_with((self_attention(model),), moe, marked)
    delta_nets = GatedDeltaNetConfig.among(groups)
    linear, branch = delta_nets.linear_layers(model.num_layers), delta_net_branch(delta_nets)
    kinds = zip(layers, (*linear, *linear[-1:] * depths))
    pattern = tuple((branch, *layer[1:]) if is_linear else layer for layer, is_linear in kinds)
    return StackConfig(model, causal=True, pattern=pattern, lora=LoraConfig.among(groups))


def layers_with_experts(model: ModelConfig, groups: Sequence[object]) -> tuple[bool, ...]:
    """Whether each layer has experts, those of multi-token prediction last."""
    hybrid = HybridConfig.among(groups)
    if hybrid.is_hybrid:
        return tuple(letter == EXPERTS for letter in hybrid.letters + hybrid.depth_letters * model.mtp_num_layers)
    return expert_layers(MoEConfig.among(groups), (model.num_layers,), mtp_layers=model.mtp_num_layers)
