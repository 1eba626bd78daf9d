"""A sequence in slices: what one does to the state that enters it, and what that state adds to the slice's result.

A slice that is scanned from a zero state gives y and T. With ``total_decay`` d, the state after it is d·S + T for the
state S before it, so slices combine in any grouping: (d₁, T₁) then (d₂, T₂) is (d₁·d₂, d₂·T₁ + T₂).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.documents import numbered
from megatron.core.ops.state_space.request import ScanInputs


def total_decay(inputs: ScanInputs, *, previous: Tensor | None = None) -> Tensor:
    """What is left at a slice's end of the state before it, [b, h], in fp32 or wider; 0 if a document begins in it.

    ``previous`` [b]: the document of the token before the slice; without it the first token continues that token's.
    """
    wide, ids = torch.promote_types(inputs.dt.dtype, torch.float32), inputs.document_ids
    decay = (inputs.dt.to(wide).sum(dim=1) * inputs.a).exp()
    if ids is None:
        return decay
    continues = numbered(ids, previous=previous)[:, -1:] == 0
    return decay * continues


def output_of_initial_state(inputs: ScanInputs, state: Tensor, *, previous: Tensor | None = None) -> Tensor:
    """What the ``state`` [b, h, p, n] before a slice adds to its y, [b, l, h, p] in the type of ``C``.

    ``previous``: as in ``total_decay``.
    """
    dt, C, ids = inputs.dt, inputs.C, inputs.document_ids
    wide = torch.promote_types(C.dtype, torch.float32)
    left = (dt.to(wide).cumsum(dim=1) * inputs.a).exp()  # [b, l, h]
    if ids is not None:
        left = left * (numbered(ids, previous=previous) == 0).unsqueeze(-1)
    by_group = state.to(C.dtype).reshape(C.shape[0], C.shape[2], -1, C.shape[3])  # [b, g, r·p, n]
    read = torch.matmul(C.transpose(1, 2), by_group.mT).transpose(1, 2)  # [b, l, g, r·p]
    return (read.reshape(*dt.shape, state.shape[2]) * left.unsqueeze(-1)).to(C.dtype)
