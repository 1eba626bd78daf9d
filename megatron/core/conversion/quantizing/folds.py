"""Where factors of input channels come from: what can divide its results so that the matrices behind may be scaled.

A norm is followed by the matrices that read it; values are followed by the projection of attention, and the linear half
of a gated MLP by its second matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.quantizing.matrices import Matrix
from megatron.core.moe.layer import MoELayer
from megatron.core.parallel.matrices import logical_matrices
from megatron.core.parallel.sharding import sharding_of
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba import MambaMixer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm


@dataclass(frozen=True)
class Fold:
    """Matrices with the same inputs, and what divides these. ``matrices``: quantized ones, whose errors count.
    ``others``: weights [out, in] that are scaled as well, so that their products stay. ``divide``: the source of the
    inputs by factors [in].
    """

    matrices: tuple[Matrix, ...]
    others: tuple[Tensor, ...]
    divide: Callable[[Tensor], None]

    @torch.no_grad()
    def apply(self, factors: Tensor) -> None:
        """Scale the matrices by ``factors`` [in], fp32, and divide what they are given."""
        for weight in (*(matrix.weight for matrix in self.matrices), *self.others):
            weight.mul_(factors)
        for matrix in self.matrices:
            matrix.statistics.divide(factors)
        self.divide(factors)


def folds_of(layer: TransformerLayer, model: ModelConfig, by_weight: Mapping[Tensor, Sequence[Matrix]]) -> list[Fold]:
    """The folds of a layer. ``by_weight``: its quantized matrices by parameter. Experts that saw too few tokens are
    scaled with the others, but their errors don't count.
    """
    found = [*_after_norms(layer, model, by_weight)]
    for branch in layer.branches:
        module = getattr(layer, branch.name)
        if isinstance(module, SelfAttention):
            found += _after_values(module, model, by_weight)
        elif isinstance(module, MLP):
            found += _between(module.linear_fc1, module.linear_fc2, model, by_weight)
        elif isinstance(module, MoELayer):
            found += _between(module.experts.linear_fc1, module.experts.linear_fc2, model, by_weight)
            if module.shared_experts is not None:
                found += _between(module.shared_experts.linear_fc1, module.shared_experts.linear_fc2, model, by_weight)
    return [fold for fold in found if any(matrix.statistics.is_enough() for matrix in fold.matrices)]


def _after_norms(
    layer: TransformerLayer, model: ModelConfig, by_weight: Mapping[Tensor, Sequence[Matrix]]
) -> Iterator[Fold]:
    if model.apply_residual_connection_post_layernorm:  # the norm's result is the residual stream, too
        return
    readers = dict[str, list[Tensor | None]]()
    for branch in layer.branches:
        module = getattr(layer, branch.name)
        if branch.norm is not None:
            readers.setdefault(branch.norm, []).extend(_readers(module))
        if isinstance(module, LatentAttention):
            for norm, reader in (
                (module.q_layernorm, module.linear_q_up_proj),
                (module.kv_layernorm, module.linear_kv_up_proj),
            ):
                if norm is not None and reader is not None:
                    yield from _after_norm(norm, [reader.weight], by_weight)
    for name, weights in readers.items():
        yield from _after_norm(getattr(layer, name), weights, by_weight)


def _after_norm(
    norm: Norm, weights: Sequence[Tensor | None], by_weight: Mapping[Tensor, Sequence[Matrix]]
) -> Iterator[Fold]:
    if norm.weight is None or any(weight is None for weight in weights):
        return
    given = [weight for weight in weights if weight is not None]
    others = tuple(weight.data for weight in given if weight not in by_weight)
    yield Fold(tuple(each for weight in given for each in by_weight.get(weight, ())), others, norm.divide)


def _readers(module: nn.Module) -> list[Tensor | None]:
    """Weights of everything that reads a branch's input; None for something unknown."""
    if isinstance(module, LatentAttention):
        down = module.linear_q_down_proj or module.linear_q_proj
        assert down is not None, "one of them projects queries"
        return [down.weight, module.linear_kv_down_proj.weight]
    if isinstance(module, SelfAttention):
        return [module.linear_qkv.weight]
    if isinstance(module, MoELayer):
        shared = module.shared_experts
        of_shared = [] if shared is None else [shared.linear_fc1.weight]
        of_shared += [] if shared is None or shared.gate is None else [shared.gate.weight]
        return [module.experts.linear_fc1.weight, module.router.weight, *of_shared]
    if isinstance(module, MLP):
        return [module.linear_fc1.weight]
    return [module.in_proj.weight] if isinstance(module, MambaMixer | GatedDeltaNet) else [None]


def _after_values(
    module: SelfAttention, model: ModelConfig, by_weight: Mapping[Tensor, Sequence[Matrix]]
) -> Iterator[Fold]:
    """Attention is linear in its values; where queries share them, or something follows them, it isn't channel by
    channel.
    """
    weight = module.linear_proj.weight
    shared = model.num_query_groups != model.num_attention_heads
    if shared or model.attention_output_gate or model.clip_qkv is not None or weight not in by_weight:
        return
    values = logical_matrices(sharding_of(module.linear_qkv.weight))[-1]
    rows = torch.cat([torch.arange(first, first + count) for first, count in values.runs])
    yield Fold(tuple(by_weight[weight]), (), partial(_divide_rows, module.linear_qkv, rows))


def _between(
    first: nn.Module, second: nn.Module, model: ModelConfig, by_weight: Mapping[Tensor, Sequence[Matrix]]
) -> Iterator[Fold]:
    """The second matrix of an MLP, whose inputs are linear in half of the first one's rows, or positive multiples."""
    assert isinstance(first.weight, Tensor) and isinstance(second.weight, Tensor), "linear layers"
    is_linear = model.gated and model.activation_func_clamp_value is None and not model.glu_linear_offset
    if second.weight not in by_weight or not (is_linear or (model.nonlinearity == "relu" and not model.gated)):
        return
    for matrix in by_weight[second.weight]:
        width = matrix.weight.shape[1]
        rows = torch.arange(width) + (width if model.gated else 0)
        yield Fold((matrix,), (), partial(_divide_rows, first, rows, expert=matrix.expert))


@torch.no_grad()
def _divide_rows(module: nn.Module, rows: Tensor, factors: Tensor, *, expert: int | None = None) -> None:
    """Divide rows of a linear layer, or of one of its experts, by ``factors``."""
    for parameter, dims in ((module.weight, 2), (module.bias, 1)):
        if isinstance(parameter, Tensor):
            each = parameter.data if expert is None else parameter.data[expert].flatten(0, -dims)
            each[rows] = each[rows] / factors.view(-1, *(1,) * (dims - 1))
