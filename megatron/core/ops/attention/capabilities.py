"""What a GPU kernel supports, as a table; the refusal of a call names the missing feature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.ops.attention.request import AttentionRequest

Feature = Literal[
    "dropout",
    "windows",
    "soft caps",
    "ALiBi",
    "sinks",
    "documents",
    "keys ahead",
    "padding masks",
    "biases",
    "cached keys",
    "parts of the keys",
    "determinism",
]

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Everything a kernel can compute.

    ``features``: what it can do beside plain attention; ``apart``: pairs of them that it can't combine. ``widest``: the
    widest head. ``lowest``, ``highest``: compute capability of the GPUs that it runs on.
    """

    subject: str
    dtypes: tuple[torch.dtype, ...] = HALF
    widest: int = 256
    lowest: tuple[int, int] = (8, 0)
    highest: tuple[int, int] | None = None
    features: frozenset[Feature] = frozenset()
    apart: tuple[tuple[Feature, Feature], ...] = ()

    def refusal(self, request: AttentionRequest) -> str | None:
        """None, or why the kernel cannot compute ``request``."""
        if request.device.type == "cpu":
            return f"{self.subject} runs on GPUs only"
        found = request.capability
        if found is not None and not self.lowest <= found <= (self.highest or found):
            return f"{self.subject} needs {self.devices}, and this GPU has {_dotted(found)}"
        if request.dtype not in self.dtypes:
            return f"{self.subject} does not support {str(request.dtype).removeprefix('torch.')}"
        if request.head_width > self.widest:
            return f"{self.subject} has no heads of {request.head_width}, only up to {self.widest}"
        asked = list(asked_features(request))
        for feature in asked:
            if feature not in self.features:
                return f"{self.subject} has no {feature}"
        for first, second in self.apart:
            if first in asked and second in asked:
                return f"{self.subject} has no {first} together with {second}"
        return None

    @property
    def devices(self) -> str:
        """The compute capabilities in words."""
        if self.highest is None:
            return f"compute capability {_dotted(self.lowest)} or newer"
        return f"compute capability {_dotted(self.lowest)} to {_dotted(self.highest)}"


def asked_features(request: AttentionRequest) -> Iterator[Feature]:
    """What ``request`` needs beside plain attention."""
    asked: dict[Feature, bool] = {
        "dropout": request.dropout > 0.0,
        "windows": request.window is not None,
        "soft caps": request.soft_cap,
        "ALiBi": request.slopes,
        "sinks": request.sinks,
        "documents": request.document_ids,
        "keys ahead": request.ahead,
        "padding masks": request.attention_mask,
        "biases": request.bias,
        "cached keys": request.causal and request.query_length != request.key_length,
        "parts of the keys": request.partial,
        "determinism": request.deterministic and request.needs_grad,
    }
    return (feature for feature, is_asked in asked.items() if is_asked)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
