"""Ways to quantize a model: which grid its weights have, and which its activations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from megatron.core.quantization.grid import Grid
from megatron.errors import ConfigError

SchemeName = Literal["int8", "int4", "int4-asym", "int3", "w8a8", "fp8", "fp8-tensor", "fp8-block"]
"""Values of ``--quantize`` and of ``--scheme``."""


@dataclass(frozen=True)
class Scheme:
    """A way to quantize linear layers. ``weights``: their grid. ``activations``: None, or how inputs of products are
    rounded: to 8 bits of the same kind as the weights with a scale for each token, found as it comes, or with one for
    the tensor, found by calibration.
    """

    name: str
    weights: Grid
    activations: Literal["token", "tensor"] | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether a forward pass over texts must come before."""
        return self.activations == "tensor"


_CHANNEL = (1, 0)
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", Grid("int", 8, _CHANNEL)),
        Scheme("int4", Grid("int", 4, (1, 128))),
        Scheme("int4-asym", Grid("int", 4, (1, 128), symmetric=False)),
        Scheme("int3", Grid("int", 3, (1, 128))),
        Scheme("w8a8", Grid("int", 8, _CHANNEL), activations="token"),
        Scheme("fp8", Grid("float", 8, _CHANNEL), activations="token"),
        Scheme("fp8-tensor", Grid("float", 8, (0, 0)), activations="tensor"),
        Scheme("fp8-block", Grid("float", 8, (128, 128)), activations="token"),
    )
}
"""All schemes by name. ``int3`` has no reader: it is for comparing methods."""


ROUNDED_WHEN_WRITTEN: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("nvfp4", Grid("float", 4, (1, 16))),
        Scheme("mxfp4", Grid("float", 4, (1, 32))),
        Scheme("mxfp8", Grid("float", 8, (1, 32))),
    )
}
"""Schemes with scales of kinds of their own, which Hugging Face folders alone have."""


def scheme_named(name: str, *, group_size: int | None = None) -> Scheme:
    """The scheme of a name; ConfigError for a ``group_size`` where scales aren't of groups."""
    scheme = SCHEMES.get(name) or ROUNDED_WHEN_WRITTEN[name]
    if group_size is None:
        return scheme
    if name in ROUNDED_WHEN_WRITTEN:
        raise ConfigError(
            f"--group-size {group_size} has no effect on {name}, whose groups are of {scheme.weights.block[1]} inputs"
        )
    if scheme.weights.block[0] != 1 or not scheme.weights.block[1]:
        grouped = ", ".join(each.name for each in SCHEMES.values() if each.weights.block == (1, 128))
        raise ConfigError(
            f"--group-size {group_size} has no effect on {name}, whose scales aren't of groups: {grouped} have"
        )
    return dataclasses.replace(scheme, weights=dataclasses.replace(scheme.weights, block=(1, group_size)))
