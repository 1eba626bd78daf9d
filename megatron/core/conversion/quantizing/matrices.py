"""The matrices of a layer that are quantized, each with what calibration learns of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.conversion.portable import parameters_of
from megatron.core.parallel.operands import Grouping, Operands
from megatron.core.quantization.statistics import InputStatistics
from megatron.core.quantization.targets import is_quantized
from megatron.errors import ConfigError


@dataclass
class Matrix:
    """A matrix of a layer. ``weight`` [out, in]: a view of the parameter ``name``, that of one ``expert`` if any.
    ``peak``: the largest magnitude of its inputs before anything weights them.
    """

    name: str
    weight: Tensor
    statistics: InputStatistics
    expert: int | None = None
    peak: Tensor = field(default_factory=lambda: torch.zeros(1))

    @property
    def title(self) -> str:
        """The matrix in messages."""
        return self.name if self.expert is None else f"expert {self.expert} of {self.name}"


def quantized_parameters(
    model: ModelConfig, groups: Sequence[object], ignore: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that are quantized: of linear layers of attention, mixers, MLPs and experts.

    Never quantized are embeddings, output layers, norms, routers, convolutions, gates with one output, and layers of
    multi-token prediction. ``ignore``: patterns of further names, or of the modules that hold them; ConfigError for one
    that matches none.
    """
    shapes = {name: sharding.shape for name, sharding in parameters_of(model, groups).items()}
    found = {name: shape for name, shape in shapes.items() if is_quantized(name) and not name.startswith("mtp.")}
    for pattern in ignore:
        hit = [
            name for name in found if fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)
        ]
        if not hit:
            raise ConfigError(
                f"--quantize-ignore {pattern} matches no weight that would be quantized; those have names such as "
                f"{next(iter(found), 'none')}"
            )
        found = {name: shape for name, shape in found.items() if name not in hit}
    return found


def matrices_of(name: str, weight: Tensor) -> list[Matrix]:
    """The matrix of a weight, or those of its experts, [out, in] each, with gate and up below each other."""
    views = [weight] if weight.dim() == 2 else [expert.flatten(0, -2) for expert in weight.unbind()]
    return [
        Matrix(name, view, InputStatistics.of_width(view.shape[1], view.device), None if weight.dim() == 2 else number)
        for number, view in enumerate(views)
    ]


class Observer(Operands):
    """Hands products their operands as they are, and shows the inputs of ``matrices``, by weight, to their statistics:
    largest magnitudes, once they are ``measured`` the sums, and nothing when that ``is_done``.
    """

    replaces = True

    def __init__(self) -> None:
        self.matrices: Mapping[Tensor, Sequence[Matrix]] = {}
        self.measured = self.is_done = False

    @override
    def rows(self, rows: Tensor, weight: Tensor, grouping: Grouping | None = None) -> Tensor:
        """``rows`` themselves."""
        matrices = () if self.is_done else self.matrices.get(weight, ())
        flat = rows.detach().flatten(0, -2)
        parts = grouping.parts(flat) if grouping is not None else (flat,)
        for matrix, part in zip(matrices, parts, strict=bool(matrices)):
            if self.measured:
                matrix.statistics.add(part)
            else:
                matrix.statistics.measure(part)
        if matrices and not self.measured and flat.numel():
            plain = flat if grouping is None or grouping.scales is None else flat / grouping.scales.clamp(min=1e-12)
            peak = plain.abs().amax().float().view(1)
            for matrix in matrices:
                matrix.peak = torch.maximum(matrix.peak.to(peak.device), peak)
        return rows
