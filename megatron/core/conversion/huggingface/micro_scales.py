"""Floats of 4 or 8 bits in small groups, as compressed-tensors keeps them: NVFP4, MXFP4 and MXFP8.

A weight ``[out, in]`` has a scale for 16 or 32 inputs: of two levels in NVFP4 (E4M3, over one fp32 number for all), a
power of two in the MX formats (OCP Microscaling Formats 1.0), whose exponent is that of the largest number. Readers
have the products as bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.quantize import E4M3, LARGEST
from megatron.core.quantization.scheme import Scheme
from megatron.errors import ConfigError

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_OF_4, _BIAS = 6.0, 127


@dataclass(frozen=True)
class MicroFormat:
    """A format. ``format``: its name in config.json; ``exponent``: that of the largest code of an MX format."""

    format: str
    bits: int
    group: int
    exponent: int | None = None

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the tensors that take the place of a weight."""
        codes = (
            ("weight_packed", (rows, columns // 2), torch.uint8)
            if self.bits == 4
            else ("weight", (rows, columns), E4M3)
        )
        scale = torch.uint8 if self.exponent is not None else E4M3
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {codes[0]: (codes[1], codes[2])}
        found["weight_scale"] = ((rows, columns // self.group), scale)
        if self.exponent is None:
            found["weight_global_scale"] = ((1,), torch.float32)
        return found

    def arguments(self) -> dict[str, Any]:
        """What config.json says of weights."""
        two_levels = self.exponent is None
        return {
            "num_bits": self.bits,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group" if two_levels else "group",
            "group_size": self.group,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn" if two_levels else "torch.uint8",
        }

    def stored(self, weight: Tensor, largest: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors that take the place of ``weight``, rounded to the nearest.

        ``largest``: the largest magnitude of the weights that programs join with it, which then have one number for all
        in NVFP4; that of this weight unless given.
        """
        grouped = weight.float().view(len(weight), -1, self.group)
        peaks = grouped.abs().amax(-1)
        found: dict[str, Tensor] = {}
        if self.exponent is None:
            whole = peaks.amax() if largest is None else largest
            over = torch.where(whole > 0, LARGEST[E4M3] * _LARGEST_OF_4 / whole, torch.ones_like(whole)).view(1)
            scales = (peaks / _LARGEST_OF_4 * over).clamp(max=LARGEST[E4M3]).to(E4M3)
            found = {"weight_scale": scales, "weight_global_scale": over}
        else:
            exponents = torch.floor(torch.log2(peaks)) - self.exponent
            found["weight_scale"] = (exponents.clamp(-_BIAS, _BIAS) + _BIAS).to(torch.uint8)
        factors = self.factors(found)
        numbers = (grouped / torch.where(factors > 0, factors, 1.0).unsqueeze(-1)).flatten(1)
        if self.bits == 8:
            return {"weight": numbers.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3), **found}
        return {"weight_packed": _packed(numbers), **found}

    def factors(self, held: Mapping[str, Tensor]) -> Tensor:
        """What each group's codes are multiplied by, fp32 ``[out, groups]``."""
        if self.exponent is None:
            return held["weight_scale"].float() / held["weight_global_scale"].float()
        return torch.exp2(held["weight_scale"].float() - _BIAS)

    def codes(self, held: Mapping[str, Tensor]) -> Tensor:
        """The codes as fp32 numbers ``[out, in]``."""
        if self.bits == 8:
            return held["weight"].float()
        packed = held["weight_packed"].int()
        numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        values = torch.cat((_MAGNITUDES, -_MAGNITUDES))
        return values[numbers]

    def values(self, held: Mapping[str, Tensor]) -> Tensor:
        """The numbers that the tensors stand for, as readers have them: in bf16."""
        factors = self.factors(held).repeat_interleave(self.group, 1)
        return (self.codes(held) * factors).to(torch.bfloat16)


def _packed(numbers: Tensor) -> Tensor:
    """The nearest of E2M1 to numbers ``[out, in]``, ties to even, two in a byte, the first in its lower half."""
    sizes = numbers.abs().clamp(max=_LARGEST_OF_4)
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    nearest = torch.round(sizes / step) * step
    codes = torch.searchsorted(_MAGNITUDES, nearest.contiguous()).to(torch.uint8)
    codes |= ((numbers < 0) & (codes > 0)).to(torch.uint8) << 3
    return codes[:, ::2] | (codes[:, 1::2] << 4)


MICRO_FORMATS = {
    "nvfp4": MicroFormat("nvfp4-pack-quantized", 4, 16),
    "mxfp4": MicroFormat("mxfp4-pack-quantized", 4, 32, exponent=2),
    "mxfp8": MicroFormat("mxfp8-quantized", 8, 32, exponent=8),
}
"""The formats by the names of their schemes."""


def micro_format(scheme: Scheme) -> MicroFormat | None:
    """The format of a scheme; None for another."""
    return MICRO_FORMATS.get(scheme.name)


def check_micro(name: str, columns: int, scheme: Scheme) -> None:
    """Raise ConfigError for a weight whose inputs are no whole number of groups."""
    found = micro_format(scheme)
    if found is not None and columns % found.group:
        raise ConfigError(
            f"--quantize {scheme.name} has groups of {found.group} inputs, which don't divide the {columns} of {name}; "
            "take int4 with a --group-size that divides them, or leave the layer out with --quantize-ignore"
        )
