"""The scan by its definition, token by token: the reference for the other backends, and a step of generation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.documents import restarts
from megatron.core.ops.state_space.request import ScanInputs


def step(token: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of ``b`` texts: ``S' = exp(dt·a)·S + (dt·x) ⊗ B`` and ``y = S'·C``.

    ``token``: x [b, h, p], dt [b, h], a [h], B and C [b, g, n]. ``state`` [b, h, p, n] in fp32 or wider -> y [b, h, p]
    in the type of ``x``, the new state.
    """
    x, dt, a, B, C = token.tensors
    wide, grouped = state.dtype, (*B.shape[:2], -1)  # [b, g, heads of a group, ...]
    dt = dt.to(wide)
    written = (dt.unsqueeze(-1) * x.to(wide)).view(*grouped, x.shape[2])
    added = written.unsqueeze(-1) * B.to(wide)[:, :, None, None]
    state = torch.exp(dt * a)[..., None, None] * state + added.flatten(1, 2)
    read = torch.matmul(state.view(*grouped, *state.shape[2:]), C.to(wide)[:, :, None, :, None])
    return read.squeeze(-1).flatten(1, 2).to(x.dtype), state


def supports(device: torch.device, dtype: torch.dtype) -> str | None:
    """Always None: it computes any scan."""
    return None


def scan(inputs: ScanInputs, initial_state: Tensor | None, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The result of ``state_space.scan``, one token at a time; ``chunk_size`` has no meaning here."""
    x, ids = inputs.x, inputs.document_ids
    wide = torch.promote_types(x.dtype, torch.float32)
    batch, length, heads, width = x.shape
    state = x.new_zeros(batch, heads, width, inputs.B.shape[3], dtype=wide) if initial_state is None else initial_state
    continues = None if ids is None else (~restarts(ids)).to(wide)
    state, outputs = state.to(wide), list[Tensor]()
    for t in range(length):
        if continues is not None:
            state = state * continues[:, t, None, None, None]
        y, state = step(inputs.token(t), state)
        outputs.append(y)
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x), state
