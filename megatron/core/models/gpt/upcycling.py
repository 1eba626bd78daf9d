"""A dense model as a mixture of experts that computes the same (upcycling, arXiv:2212.05055 and arXiv:2410.07524)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.config.moe import MoEConfig
from megatron.core.conversion.portable import LazyTensor, PortableModel, refuse_quantized
from megatron.core.parallel.rng import derive_seed
from megatron.errors import ConfigError

_MLP = re.compile(r"(.*\.mlp\.)linear_(fc[12])\.(weight|bias)")


def upcycled(dense: PortableModel, *, num_experts: int, granularity: int, topk: int, seed: int) -> PortableModel:
    """The model with experts in all layers, each a part of the dense network or a copy of it.

    ``granularity``: parts into which the dense network is cut. A router gives all parts of one copy the same logit, so
    a token chooses whole copies, whose weights add up to 1: the experts' last matrices are multiplied by the number
    of parts, and the logits are those of the dense model. Raises ConfigError for numbers that don't divide.
    """
    refuse_quantized(dense, "the dense checkpoint", what="experts are parts of its weights, which the scales don't fit")
    model = dense.model
    sizes = {"--num-experts": num_experts, "--moe-router-topk": topk, "--ffn-hidden-size": model.ffn_hidden_size}
    for flag, size in sizes.items():
        if size % granularity:
            raise ConfigError(f"{flag} {size} is not divisible by --moe-upcycling-granularity {granularity}")
    if topk > num_experts:
        raise ConfigError(f"--moe-router-topk {topk} is more than --num-experts {num_experts}")
    if MoEConfig.among(dense.groups).has_experts or model.add_mlp_bias:
        what = "biases in its feed-forward networks" if model.add_mlp_bias else "experts"
        raise ConfigError(f"the model has {what}; a dense model without biases there is what can be upcycled")
    copies, tensors = num_experts // granularity, dict[str, LazyTensor]()
    width = model.ffn_hidden_size // granularity
    for name, tensor in dense.tensors.items():
        found = _MLP.fullmatch(name)
        if found is None:
            tensors[name] = tensor
            continue
        matrices = 1 + model.gated
        make: Callable[[], Tensor]
        if found[2] == "fc1":
            std = model.init_method_std / math.sqrt(model.width_multiplier)
            router, shape = f"{found[1]}router.weight", (num_experts, model.hidden_size)
            draw = partial(_router, router, tensor.dtype, shape, granularity, std, seed)
            tensors[router] = LazyTensor(shape, tensor.dtype, draw)
            held: tuple[int, ...] = (num_experts, matrices, width, model.hidden_size)
            make = partial(_first, tensor, matrices, granularity, copies)
        else:
            held, make = (num_experts, model.hidden_size, width), partial(_second, tensor, granularity, copies)
        tensors[f"{found[1]}experts.linear_{found[2]}.weight"] = LazyTensor(held, tensor.dtype, make)
    moe = MoEConfig(num_experts=num_experts, moe_ffn_hidden_size=width, moe_router_topk=topk)
    others = tuple(group for group in dense.groups if not isinstance(group, MoEConfig))
    return replace(dense, groups=(*others, moe), tensors=tensors)


def _first(tensor: LazyTensor, matrices: int, parts: int, copies: int) -> Tensor:
    """``[matrices·f, h]`` to ``[copies·parts, matrices, f/parts, h]``."""
    dense = tensor.make()
    cut = dense.view(matrices, parts, -1, dense.shape[1]).transpose(0, 1)
    return cut.repeat(copies, 1, 1, 1)


def _second(tensor: LazyTensor, parts: int, copies: int) -> Tensor:
    """``[h, f]`` to ``[copies·parts, h, f/parts]``, times the number of parts."""
    dense = tensor.make()
    cut = dense.view(dense.shape[0], parts, -1).transpose(0, 1) * parts
    return cut.repeat(copies, 1, 1)


def _router(name: str, dtype: torch.dtype, shape: tuple[int, int], parts: int, std: float, seed: int) -> Tensor:
    """A random row for each copy, the same for all of its parts."""
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    rows = torch.empty(shape[0] // parts, shape[1]).normal_(0.0, std, generator=generator)
    return rows.repeat_interleave(parts, dim=0).to(dtype)
