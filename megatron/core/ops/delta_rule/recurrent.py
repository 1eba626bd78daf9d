"""The gated delta rule token by token: its definition (Yang et al. 2024, arXiv:2412.06464), and a step of generation.

For each value head, with a state S [dk, dv]:  S ← e^g·S;  δ = β·(v − Sᵀk);  S ← S + k·δᵀ;  o = Sᵀq.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.delta_rule.request import (
    DeltaInputs,
    DeltaOptions,
    document_runs,
    first_state,
    unit_rows,
    wide_type,
)


def apply(inputs: DeltaInputs, options: DeltaOptions, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Results ``[b, l, h, dv]`` in the type of ``v``, and the state ``[b, h, dk, dv]`` after the last token."""
    state, outputs = first_state(inputs, initial_state), []
    runs = None if inputs.document_ids is None else document_runs(inputs.document_ids)
    for t in range(inputs.v.shape[1]):
        if runs is not None and t > 0:
            state = state.masked_fill((runs[:, t] != runs[:, t - 1])[:, None, None, None], 0.0)
        token = (x[:, t] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta))
        out, state = step(*token, state, options)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """One token of each of ``b`` texts: the result ``[b, h, dv]`` in the type of ``v``, and the new state.

    ``q``, ``k`` [b, g, dk]; ``v`` [b, h, dv]; ``log_decay``, ``beta`` [b, h]; ``state`` [b, h, dk, dv].
    """
    (queries, keys), groups, wide = unit_rows(q, k, options), k.shape[1], wide_type(v)
    grouped = state.to(wide).unflatten(1, (groups, -1))  # [b, g, h/g, dk, dv]
    values, decay, rate = (x.to(wide).unflatten(1, (groups, -1)) for x in (v, log_decay, beta))
    decayed = grouped * decay.exp()[..., None, None]
    known = torch.matmul(keys[:, :, None, None, :], decayed)  # [b, g, h/g, 1, dv]
    change = rate[..., None, None] * (values[..., None, :] - known)
    updated = decayed + keys[:, :, None, :, None] * change
    out = torch.matmul(queries[:, :, None, None, :], updated).squeeze(-2)
    return out.flatten(1, 2).to(v.dtype), updated.flatten(1, 2)
