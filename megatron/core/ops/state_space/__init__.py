"""The math of state-space layers (Mamba-2).

One function with interchangeable backends, a step of generation, and what slices of a sequence hand on to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.state_space.backends import choose
from megatron.core.ops.state_space.recurrent import step
from megatron.core.ops.state_space.slices import from_earlier, total_decay

__all__ = ["choose", "default_chunk_size", "from_earlier", "scan", "step", "total_decay"]


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``S_t = exp(dt_t·a)·S_{t-1} + (dt_t·x_t) ⊗ B_t`` and ``y_t = S_t·C_t`` for ``h`` heads; returns y and the last
    state. Head i reads B and C of group i // (h / g).

    Shapes: ``x`` [b, l, h, p]; ``dt`` [b, l, h], not negative; ``a`` [h], negative; ``B`` and ``C`` [b, l, g, n];
    ``initial_state`` [b, h, p, n], zeros if None -> y [b, l, h, p] in the type of ``x``, the state after the last token
    [b, h, p, n] in fp32 or wider. The state restarts from zero where a run of equal numbers in ``document_ids`` [b, l]
    begins; the first run continues ``initial_state``. Sums and states are in fp32 or wider. ``chunk_size`` changes
    speed and memory only; None is the device's best. Raises ConfigError when the ``backend`` asked for can't be used.
    """
    size = chunk_size or default_chunk_size(x.device)
    chosen = choose(x.device, x.dtype, backend)
    return chosen.backend.scan(x, dt, a, B, C, initial_state=initial_state, document_ids=document_ids, chunk_size=size)


def default_chunk_size(device: torch.device) -> int:
    """Tokens of a chunk: what is fastest on the device."""
    return 64 if device.type == "cpu" else 128
