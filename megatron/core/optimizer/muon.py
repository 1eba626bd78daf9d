"""Muon: momentum whose matrices are orthogonalized by Newton-Schulz steps (kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.update_rules import COEFFICIENTS
from megatron.core.optimizer.update_rule import Shape, Step

_STACKED_ELEMENTS = 1 << 26  # of small matrices that are multiplied together
_EPSILON = 1e-7


class Muon:
    """An average of gradients, optionally with Nesterov's look-ahead, made nearly orthogonal, matrix by matrix."""

    reads_weights = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def state_names(self) -> tuple[str, ...]:
        """Name of the average of gradients."""
        return ("momentum_buffer",)

    def matrix_state(self, shape: Shape) -> Mapping[str, Shape]:
        """Nothing: the average is kept element by element."""
        return {}

    def direction(self, grads: Tensor, state: list[Tensor], step: Step) -> Tensor:
        """The average, or with Nesterov's look-ahead its mix with the gradient."""
        grads, (average,) = step.unscaled(grads), state
        average.lerp_(grads, 1.0 - self._config.muon_momentum)
        return grads.lerp(average, self._config.muon_momentum) if self._config.muon_nesterov else average

    def workspace(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Bytes of those that are multiplied together: as they are, and divided by their norm and turned if they are
        tall, or two of a step's matrices and of their products with themselves.
        """
        width, found = 2 if self._config.muon_fp32_matmul_prec == "medium" else 4, 0
        for (rows, columns), count in Counter(shapes).items():
            size, together = rows * columns, min(count, max(1, _STACKED_ELEMENTS // (rows * columns)))
            multiplied = 2 * width * (size + min(rows, columns) ** 2)
            normed = 4 * size + width * size * (2 if rows > columns else 1)
            found = max(found, together * (4 * size + max(normed, multiplied)))
        return found

    def transform(
        self,
        matrices: Sequence[Tensor],
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[int],
    ) -> list[Tensor]:
        """Orthogonal factors of ``matrices``, scaled by their shapes; those of one shape are multiplied together."""
        config, updates = self._config, list[Tensor](matrices)
        by_shape = defaultdict[Shape, list[int]](list)
        for place, matrix in enumerate(matrices):
            by_shape[tuple(matrix.shape)].append(place)
        for (rows, columns), places in by_shape.items():
            scale = update_scale(config.muon_scale_mode, rows, columns) * config.muon_extra_scale_factor
            together = max(1, _STACKED_ELEMENTS // (rows * columns))
            for start in range(0, len(places), together):
                group = places[start : start + together]
                stack = torch.stack([matrices[place] for place in group])
                factors = orthogonalized(
                    stack,
                    kind=config.muon_coefficient_type,
                    steps=config.muon_num_ns_steps,
                    in_bf16=config.muon_fp32_matmul_prec == "medium",
                )
                for place, factor in zip(group, factors.to(stack.dtype).mul_(scale)):
                    updates[place] = factor
        return updates


def update_scale(mode: str, rows: int, columns: int) -> float:
    """Factor of an orthogonal update of a matrix ``[rows, columns]``, that is, [out, in]."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns) if mode == "unit_rms_norm" else math.sqrt(max(1.0, rows / columns))


def orthogonalized(x: Tensor, *, kind: str, steps: int, in_bf16: bool = False) -> Tensor:
    """``U·Vᵀ`` of the singular value decomposition of each matrix ``[n, rows, columns]``, nearly: the steps bring
    singular values near 1. Computes in bf16, ``in_bf16`` and unless the matrices are in fp64.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=_EPSILON)
    x = (x.bfloat16() if in_bf16 and x.dtype != torch.float64 else x).contiguous()
    for a, b, c in coefficients_of(kind, steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def coefficients_of(kind: str, steps: int) -> list[tuple[float, float, float]]:
    """The coefficients of each step: in turn, except that the last of polar_express repeats."""
    found = COEFFICIENTS[kind]
    return [found[min(step, len(found) - 1) if kind == "polar_express" else step % len(found)] for step in range(steps)]
