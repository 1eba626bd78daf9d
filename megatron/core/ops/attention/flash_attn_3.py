"""flash-attn 3 for Hopper GPUs (Shah et al. 2024, arXiv:2407.08608): the module ``flash_attn_interface``."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.flash import FlashBackend, FlashCall, by_keyword, imported

_MODULE = "flash_attn_interface"

CAPABILITIES = Capabilities(
    subject="flash-attn 3",
    lowest=(9, 0),
    highest=(9, 0),
    # Its releases until autumn 2025 take ``deterministic`` and ignore it (flash-attention #1766).
    features=frozenset(("windows", "soft caps", "sinks", "documents", "cached keys", "parts of the keys")),
)


class _Kernel:
    """Its lowest calls take documents or none; those of early releases have no defaults."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``FlashKernel``."""
        interface = imported(_MODULE)
        assert interface is not None, "the registry asks first"
        out, lse, *_ = by_keyword(
            interface._flash_attn_forward,
            q=q,
            k=k,
            v=v,
            **call.documents,
            left=call.left,
            right=call.right,
            softmax_scale=call.scale,
            softcap=call.soft_cap,
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
        """See ``FlashKernel``."""
        interface = imported(_MODULE)
        assert interface is not None, "the registry asks first"
        found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        by_keyword(
            interface._flash_attn_backward,
            dout=grad,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=found[0],
            dk=found[1],
            dv=found[2],
            **call.documents,
            left=call.left,
            right=call.right,
            softmax_scale=call.scale,
            softcap=call.soft_cap,
            deterministic=call.deterministic,
        )
        return found


BACKEND = FlashBackend(CAPABILITIES, _Kernel(), module=_MODULE, package="flash-attn 3")
