"""The gated delta rule token by token: its definition (Yang et al. 2024, arXiv:2412.06464), and a step of generation.

For each value head, with a state S [dk, dv]:  S ← e^g·S;  δ = β·(v − Sᵀk);  S ← S + k·δᵀ;  o = Sᵀq.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.delta_rule.request import (
    DeltaInputs,
    DeltaOptions,
    first_state,
    unit_rows,
    wide_type,
)
from megatron.core.ops.documents import numbered


def apply(inputs: DeltaInputs, options: DeltaOptions, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Results ``[b, l, h, dv]`` in the type of ``v``, and the state ``[b, h, dk, dv]`` after the last token."""
    state, outputs = first_state(inputs, initial_state), []
    runs = None if inputs.document_ids is None else numbered(inputs.document_ids)
    for t in range(inputs.v.shape[1]):
        if runs is not None and t > 0:
            state = state.masked_fill((runs[:, t] != runs[:, t - 1])[:, None, None, None], 0.0)
        out, state = step(inputs.token(t), state, options)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def step(token: DeltaInputs, state: Tensor, options: DeltaOptions) -> tuple[Tensor, Tensor]:
    """One token of each of ``b`` texts: the result ``[b, h, dv]`` in the type of ``v``, and the new state.

    ``token``: q, k [b, g, dk]; v [b, h, dv]; log_decay, beta [b, h]. ``state`` [b, h, dk, dv].
    """
    queries, keys = unit_rows(token.q, token.k, options)
    batch, groups, key_width = keys.shape
    by_group, wide = (batch, groups, -1), wide_type(token.v)
    values = token.v.to(wide).view(*by_group, token.v.shape[-1])
    decay, rate = (x.to(wide).view(*by_group, 1, 1) for x in (token.log_decay, token.beta))
    decayed = state.to(wide).view(*by_group, key_width, values.shape[-1]) * decay.exp()
    known = torch.matmul(keys[:, :, None, None, :], decayed)  # [b, g, h/g, 1, dv]
    change = rate * (values.unsqueeze(-2) - known)
    updated = decayed + keys[:, :, None, :, None] * change
    out = torch.matmul(queries[:, :, None, None, :], updated)
    return out.to(token.v.dtype).view_as(token.v), updated.view_as(state)
