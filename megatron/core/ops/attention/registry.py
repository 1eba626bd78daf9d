"""Which implementation computes an attention call: the first that supports it, or the one the user named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops.attention import chunked, eager, sdpa
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.errors import ConfigError


class Backend(Protocol):
    """A module in this package."""

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or why this backend cannot compute the call."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The result of ``attention``."""
        ...

    def attend_partly(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
        """The result of ``partial_attention``."""
        ...

    def gradients_of_part(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
    ) -> Gradients:
        """The result of ``partial_attention_gradients``."""
        ...


# In order of preference; the last supports everything.
BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "chunked": chunked, "eager": eager}


@dataclass(frozen=True)
class Choice:
    """The backend that serves a request, and why the preferred ones refused it."""

    name: str
    backend: Backend
    refused: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """For the start-up report, e.g. ``chunked (sdpa refused: …)``."""
        reasons = "; ".join(f"{name} refused: {reason}" for name, reason in self.refused.items())
        return f"{self.name} ({reasons})" if reasons else self.name


def choose(request: AttentionRequest, backend: str = "auto") -> Choice:
    """The backend for ``request``.

    Raises ConfigError when the backend named explicitly doesn't exist or refuses the request.
    """
    if backend == "auto":
        # In bf16 on a CPU torch's kernel takes twice the time of blocks of matrix products.
        first = ["chunked"] if request.device.type == "cpu" and request.dtype == torch.bfloat16 else []
        refused: dict[str, str] = {}
        for name in dict.fromkeys([*first, *BACKENDS]):
            reason = BACKENDS[name].supports(request)
            if reason is None:
                return Choice(name, BACKENDS[name], refused)
            refused[name] = reason
    if backend not in BACKENDS:
        raise ConfigError(f"--attention-backend {backend} is unknown; available: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].supports(request)
    if reason is not None:
        raise ConfigError(f"--attention-backend {backend} cannot be used: {reason}; use --attention-backend auto")
    return Choice(backend, BACKENDS[backend])
