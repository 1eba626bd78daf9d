"""Which keys a query may attend to, as a boolean tensor, for backends that need it spelled out."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.attention.request import AttentionOptions


def allowed_keys(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor | None:
    """True where a query may see a key, broadcastable to [b, n, sq, sk]; None when every query sees every key."""
    allowed: Tensor | None = None
    if options.causal and q.shape[0] > 1:
        allowed = lower_right(q.shape[0], k.shape[0], q.device)
    if options.document_ids is not None:
        same = (options.document_ids.unsqueeze(2) == options.document_ids.unsqueeze(1)).unsqueeze(1)  # [b, 1, s, s]
        allowed = same if allowed is None else allowed & same
    if options.attention_mask is not None:
        real = options.attention_mask.unsqueeze(1).unsqueeze(1)  # [b, 1, 1, sk]
        allowed = real if allowed is None else allowed & real
    return allowed


def lower_right(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Causal mask [sq, sk] whose last query sees every key, as when earlier keys come from a cache."""
    ones = torch.ones(query_length, key_length, dtype=torch.bool, device=device)
    return ones.tril_(key_length - query_length)
