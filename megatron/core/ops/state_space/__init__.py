"""The math of state-space layers (Mamba-2).

One function with interchangeable backends, a step of generation, and what slices of a sequence hand on to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.state_space.backends import choose
from megatron.core.ops.state_space.chunked import working_bytes
from megatron.core.ops.state_space.recurrent import step
from megatron.core.ops.state_space.request import ScanInputs
from megatron.core.ops.state_space.slices import output_of_initial_state, total_decay

__all__ = [
    "ScanInputs",
    "choose",
    "default_chunk_size",
    "output_of_initial_state",
    "scan",
    "step",
    "total_decay",
    "working_bytes",
]


def scan(
    inputs: ScanInputs, initial_state: Tensor | None = None, *, chunk_size: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """``S_t = exp(dt_t·a)·S_{t-1} + (dt_t·x_t) ⊗ B_t`` and ``y_t = S_t·C_t`` for each head; returns y and the last
    state.

    Shapes: ``initial_state`` [b, h, p, n], zeros if None -> y [b, l, h, p] in the type of ``x``, the state after the
    last token [b, h, p, n] in fp32 or wider. Sums and states are in fp32 or wider. ``chunk_size`` changes speed and
    memory only; None is the device's best. Raises ConfigError when the ``backend`` asked for can't be used.
    """
    x = inputs.x
    chosen = choose(x.device, x.dtype, backend)
    return chosen.backend.scan(inputs, initial_state, chunk_size=chunk_size or default_chunk_size(x.device))


def default_chunk_size(device: torch.device) -> int:
    """Tokens of a chunk: what is fastest on the device."""
    return 64 if device.type == "cpu" else 128
