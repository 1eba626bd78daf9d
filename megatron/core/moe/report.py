"""What the routers of layers report, for the log and for curves: choices of experts, and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHOICES = "experts"


def metric_name(what: str, number: int) -> str:
    """Name under which layer ``number`` reports the ``CHOICES`` or a loss."""
    return f"{what} of layer {number}"


def log_line_and_curves(
    layer_metrics: Mapping[str, Sequence[float]], *, ranks: int, per_layer: bool
) -> tuple[str, dict[str, float]]:
    """The log line, and curves; those of losses of layers have Megatron-LM's names. ``ranks``: see ``Balance.of``."""
    layers, losses = dict[str, Balance](), dict[str, float]()
    for name, numbers in layer_metrics.items():
        what, _, layer = name.partition(" of ")
        if what == CHOICES:
            layers[layer] = Balance.of(numbers, ranks=ranks)
        else:
            losses[f"moe/{what}_{layer.replace(' ', '_')}"] = numbers[0] / max(numbers[1], 1.0)
    return balance_line(layers), balance_curves(layers, per_layer=per_layer) | losses


@dataclass(frozen=True)
class Balance:
    """How evenly one layer's experts are chosen. ``max_violation``: choices of the busiest expert over the mean, minus
    1 (MaxVio, arXiv:2408.15664). ``entropy``: of the experts' shares, 1 when they are equal. ``dead``: experts that
    nothing chose. ``dropped``: share of the choices. ``busiest_rank``: choices of the busiest expert-parallel rank over
    the mean.
    """

    max_violation: float
    entropy: float
    dead: int
    dropped: float
    busiest_rank: float

    @classmethod
    def of(cls, counts: Sequence[float], *, ranks: int) -> Balance:
        """The balance of a layer, from the choices of each expert, the last number being those that were dropped.
        ``ranks``: that divide the experts.
        """
        *chosen, dropped = counts
        total, experts = sum(chosen), len(chosen)
        if total == 0:
            return cls(0.0, 1.0, experts, 0.0, 1.0)
        shares = [number / total for number in chosen if number]
        held = experts // ranks
        of_ranks = [sum(chosen[start : start + held]) for start in range(0, experts, held)]
        return cls(
            max_violation=max(chosen) * experts / total - 1.0,
            entropy=1.0 if experts == 1 else -sum(share * math.log(share) for share in shares) / math.log(experts),
            dead=chosen.count(0),
            dropped=dropped / total,
            busiest_rank=max(of_ranks) * ranks / total,
        )


def balance_line(layers: Mapping[str, Balance]) -> str:
    """The line after the log line; the layer with the largest violation is named."""
    worst = max(layers, key=lambda name: layers[name].max_violation)
    balances = layers.values()
    parts = [
        f"max violation: {layers[worst].max_violation:.2f} ({worst})",
        f"mean violation: {_mean([each.max_violation for each in balances]):.2f}",
        f"entropy: {_mean([each.entropy for each in balances]):.3f}",
        f"dead experts: {sum(each.dead for each in balances)}",
        f"busiest rank: {max(each.busiest_rank for each in balances):.2f} x mean",
    ]
    if any(each.dropped for each in balances):
        parts.append(f"dropped: {_mean([each.dropped for each in balances]):.1%}")
    return f" {' | '.join(['experts', *parts])} |"


def balance_curves(layers: Mapping[str, Balance], *, per_layer: bool) -> dict[str, float]:
    """Means over the layers, the busiest rank's maximum, and the sum of dead experts; ``per_layer``: and each layer's
    values under ``moe/NAME_layer_N``, as Megatron-LM names them.
    """
    balances = layers.values()
    found = {
        "moe/max_violation": max(each.max_violation for each in balances),
        "moe/mean_violation": _mean([each.max_violation for each in balances]),
        "moe/entropy": _mean([each.entropy for each in balances]),
        "moe/dead_experts": float(sum(each.dead for each in balances)),
        "moe/dropped_share": _mean([each.dropped for each in balances]),
        "moe/busiest_rank": max(each.busiest_rank for each in balances),
    }
    for name, each in layers.items() if per_layer else ():
        number = name.rpartition(" ")[2]
        found |= {
            f"moe/max_violation_layer_{number}": each.max_violation,
            f"moe/entropy_layer_{number}": each.entropy,
            f"moe/dead_experts_layer_{number}": float(each.dead),
            f"moe/dropped_share_layer_{number}": each.dropped,
            f"moe/busiest_rank_layer_{number}": each.busiest_rank,
        }
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
