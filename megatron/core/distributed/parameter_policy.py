"""What training does to each parameter, decided here alone and once; ``Sharding`` says where a parameter lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megatron.core.parallel.sharding import Sharding, sharding_of


@dataclass(frozen=True)
class ParameterPolicy:
    """What training does to a parameter; all parameters of a flat buffer have the same policy.

    ``is_trained``: a frozen parameter has no gradient, no optimizer state and no reduction. ``decays``: weight decay
    applies to it.
    """

    is_trained: bool
    decays: bool


Policies = Mapping[str, ParameterPolicy]
"""By global name, as checkpoints name parameters: tied copies share one."""


def parameter_policies(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, freeze: Sequence[str] = ()
) -> dict[str, ParameterPolicy]:
    """The policy of every parameter of this rank. ``freeze``: patterns of the names of frozen parameters."""
    policies = {}
    for name, parameter in named_parameters:
        sharding = sharding_of(parameter)
        name = sharding.tied or name
        policies[name] = ParameterPolicy(is_trained=not is_frozen(name, freeze), decays=_is_matrix(sharding))
    return policies


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's global name matches one of the patterns, as a shell matches file names, case included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_matrix(sharding: Sharding) -> bool:
    """Whether a parameter is a matrix or a table, not a bias or a norm weight.

    The dimension that numbers experts doesn't count: their stacked biases [experts, h] are biases.
    """
    return len(sharding.shape) - list(sharding.split.values()).count("ep") > 1
