"""Which implementation computes a scan: the first that supports it, or the one the user named."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops.backend_choice import Choice
from megatron.core.ops.state_space import chunked, mamba_ssm, recurrent
from megatron.core.ops.state_space.request import ScanInputs
from megatron.errors import ConfigError


class Backend(Protocol):
    """A module in this package."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None, or why this backend cannot compute a scan of ``dtype`` on ``device``."""
        ...

    def scan(self, inputs: ScanInputs, initial_state: Tensor | None, *, chunk_size: int) -> tuple[Tensor, Tensor]:
        """The result of ``state_space.scan``."""
        ...


BACKENDS: dict[str, Backend] = {"mamba-ssm": mamba_ssm, "chunked": chunked, "recurrent": recurrent}
# What ``auto`` tries, in this order; the second supports everything.
_PREFERRED = ("mamba-ssm", "chunked")


def choose(device: torch.device, dtype: torch.dtype, backend: str = "auto") -> Choice[Backend]:
    """The backend of scans of ``dtype`` on ``device``.

    Raises ConfigError when the backend named explicitly doesn't exist or can't be used here.
    """
    if backend == "auto":
        refused: dict[str, str] = {}
        for name in _PREFERRED:
            reason = BACKENDS[name].supports(device, dtype)
            if reason is None:
                return Choice(name, BACKENDS[name], refused)
            refused[name] = reason
    if backend not in BACKENDS:
        raise ConfigError(f"--mamba-scan-backend {backend} is unknown; available: auto, {', '.join(BACKENDS)}")
    if (reason := BACKENDS[backend].supports(device, dtype)) is not None:
        raise ConfigError(f"--mamba-scan-backend {backend} cannot be used: {reason}; use --mamba-scan-backend auto")
    return Choice(backend, BACKENDS[backend])
