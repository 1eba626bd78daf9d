"""What training does to each parameter, decided once; ``Sharding`` describes where a parameter lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from megatron.config.optimizer import OptimizerConfig, pattern_and_factor
from megatron.config.parameter_names import matches
from megatron.core.parallel.sharding import Sharding, sharding_of

_QUERY_AND_KEY_NORMS = ("*.q_layernorm.*", "*.k_layernorm.*")


@dataclass(frozen=True)
class ParameterPolicy:
    """What training does to a parameter; all parameters of a flat buffer have the same policy.

    ``is_trained``: a frozen parameter, or one that was built without a gradient, has no gradient, no optimizer state
    and no reduction. ``decays``: weight decay applies to it. ``is_decoupled``: it has the learning rate of
    ``--decoupled-lr``. ``lr_multiplier``: its learning rate over that of the schedule, from ``--lr-multipliers``
    and muP. ``eps_multiplier``: its Adam's epsilon over ``--adam-eps``.
    ``update_rule``: how a step moves it, a name among ``optimizer.update_rules.UPDATE_RULES``.
    """

    is_trained: bool
    decays: bool
    is_decoupled: bool
    lr_multiplier: float
    update_rule: str
    eps_multiplier: float = 1.0


Policies = Mapping[str, ParameterPolicy]
"""Policies by global name, as checkpoints name parameters: tied copies share one."""


def parameter_policies(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig | None = None,
    *,
    width_multiplier: float = 1.0,
) -> dict[str, ParameterPolicy]:
    """The policy of every parameter of this rank. ``width_multiplier``: of muP, see ``ModelConfig``."""
    config, policies = config or OptimizerConfig(), {}
    factors = [pattern_and_factor(pair) for pair in config.lr_multipliers]
    for name, parameter in named_parameters:
        sharding = sharding_of(parameter)
        name = sharding.tied or name
        # Word embeddings and output matrices are the matrices with a padded vocabulary.
        is_vocabulary_table = sharding.pad_multiple is not None and _is_matrix(sharding)
        decays_too = config.no_weight_decay_cond_type is not None and matches(name, _QUERY_AND_KEY_NORMS)
        factor = next((factor for pattern, factor in factors if matches(name, [pattern])), 1.0)
        is_decoupled = config.decoupled_lr is not None and is_vocabulary_table
        of_width = 1.0 if is_decoupled else _rate_of_width(sharding, config.optimizer, width_multiplier)
        policies[name] = ParameterPolicy(
            is_trained=parameter.requires_grad and name in config.trained,
            decays=_is_matrix(sharding) or decays_too,
            is_decoupled=is_decoupled,
            lr_multiplier=factor * of_width,
            update_rule=config.optimizer if is_layer_matrix(name, sharding) else config.scalar_rule,
            eps_multiplier=1 / width_multiplier if _is_between_widths(sharding) else 1.0,
        )
    return policies


def _rate_of_width(sharding: Sharding, update_rule: str, width_multiplier: float) -> float:
    """MuP's factor of the learning rate (arXiv:2203.03466, table 8).

    Adam moves every weight by about the learning rate, and a sum over a wider input moves by as much more. An SGD step
    is as long as the gradient, which gets shorter with the width for all but matrices between two widths.
    """
    if update_rule == "sgd":
        return 1.0 if _is_between_widths(sharding) else width_multiplier
    return 1 / width_multiplier if _is_between_widths(sharding) else 1.0


def _is_between_widths(sharding: Sharding) -> bool:
    return _is_matrix(sharding) and sharding.kind != "table"


def is_layer_matrix(name: str, sharding: Sharding) -> bool:
    """Whether a parameter is the weight of a product in a layer: no table, head, bias, norm or convolution.

    Layers are what lies in a numbered module, such as ``decoder.layers.3``. Experts stack several matrices.
    """
    in_layer = sharding.kind != "table" and any(part.isdecimal() for part in name.split("."))
    dims = 2 if sharding.split.get(0) != "ep" else len(sharding.shape)
    is_weight = name.endswith(".weight") and sharding.tied is None and sharding.pad_multiple is None
    return in_layer and is_weight and len(sharding.shape) == dims and _is_matrix(sharding)


def _is_matrix(sharding: Sharding) -> bool:
    """Whether a parameter is a matrix or a table, not a bias or a norm weight.

    The dimension of experts doesn't count: their stacked biases [experts, h] are biases.
    """
    return sharding.kind != "vector" and len(sharding.shape) - list(sharding.split.values()).count("ep") > 1
