"""Torch's own flash kernel with documents and windows: what ``torch.nn.attention.varlen_attn`` calls.

The signature of that function differs between torch 2.10 and 2.13, and it has no parts; those of the operators below
it are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.flash import FlashBackend, FlashCall

CAPABILITIES = Capabilities(
    subject="torch's flash kernel",
    features=frozenset(("windows", "sinks", "documents", "cached keys", "parts of the keys", "determinism")),
)


class _Kernel:
    """Causal by its window. Deterministic where ``torch.use_deterministic_algorithms`` asks for it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """Result and log-sum-exp by torch's flash kernel; it draws no dropout."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_ends_and_lengths(q, k, call), 0.0, False, False, **_named(call)
        )
        return out, lse, None

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        state: Tensor | None,
        call: FlashCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v by torch's flash kernel."""
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout's generator
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, lse), *_ends_and_lengths(q, k, call), 0.0, False, unused, unused, **_named(call)
        )
        return found


def _ends_and_lengths(q: Tensor, k: Tensor, call: FlashCall) -> tuple[Any, ...]:
    if call.ends is None:
        return None, None, q.shape[1], k.shape[1]
    return call.ends, call.ends, call.longest, call.longest


def _named(call: FlashCall) -> dict[str, Any]:
    return {"scale": call.scale, "window_size_left": call.left, "window_size_right": call.right}


BACKEND = FlashBackend(CAPABILITIES, _Kernel(), module="torch", package="torch")
