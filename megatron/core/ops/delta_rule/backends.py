"""Which implementation computes a layer's gated delta rule: the first that serves it, or the one the user named."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops.backend_choice import Choice
from megatron.core.ops.delta_rule import chunked, fla, recurrent
from megatron.core.ops.delta_rule.request import DeltaInputs, DeltaOptions
from megatron.errors import ConfigError


class Backend(Protocol):
    """A module in this package."""

    def apply(
        self, inputs: DeltaInputs, options: DeltaOptions, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Results ``[b, l, h, dv]`` in the type of ``v``, and the final state ``[b, h, dk, dv]`` in fp32 or wider."""
        ...


class GpuBackend(Backend, Protocol):
    """A module with kernels of another package."""

    def missing(self) -> str | None:
        """None, or what isn't installed."""
        ...

    def refusal(self, device: torch.device, dtype: torch.dtype, key_width: int) -> str | None:
        """None, or why it cannot serve such a layer."""
        ...


KERNELS: dict[str, GpuBackend] = {"fla": fla}
EVERYWHERE: dict[str, Backend] = {"chunked": chunked, "recurrent": recurrent}


def choose(name: str, *, device: torch.device, dtype: torch.dtype, key_width: int) -> Choice[Backend]:
    """The backend of a layer with keys of ``key_width`` channels. ``name``: of ``--linear-attention-backend``.

    Raises ConfigError where the one that is named cannot serve the layer.
    """
    refused: dict[str, str] = {}
    for each, kernel in KERNELS.items():
        if name not in ("auto", each):
            continue
        reason = kernel.refusal(device, dtype, key_width)
        if reason is None and device.type != "meta":  # a dry run may be on another machine
            reason = kernel.missing()
        if reason is None:
            return Choice(each, kernel, refused)
        if name == each:
            raise ConfigError(
                f"--linear-attention-backend {name} cannot be used: {reason}; use --linear-attention-backend auto"
            )
        refused[each] = reason
    found = "chunked" if name == "auto" else name
    return Choice(found, EVERYWHERE[found], refused)
