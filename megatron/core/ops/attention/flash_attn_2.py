"""flash-attn 2 (Dao 2023, arXiv:2307.08691), releases 2.6 to 2.8."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.flash import FlashBackend, FlashCall, by_keyword, imported

_MODULE = "flash_attn.flash_attn_interface"

CAPABILITIES = Capabilities(
    subject="flash-attn 2",
    features=frozenset(
        (
            "dropout",
            "windows",
            "soft caps",
            "ALiBi",
            "sinks",
            "documents",
            "cached keys",
            "parts of the keys",
            "determinism",
        )
    ),
    # Parts of the keys would draw the same dropout, and their distances are not those of their places. The log-sum-exp
    # of causal calls with ALiBi is of other scores: slope times the key's place is added, not its distance subtracted.
    apart=(
        ("soft caps", "dropout"),
        ("dropout", "parts of the keys"),
        ("ALiBi", "parts of the keys"),
        ("ALiBi", "sinks"),
    ),
)


class _Kernel:
    """Release 2.6 returns also padded copies of its inputs, and takes the window as one argument."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``FlashKernel``."""
        interface = imported(_MODULE)
        assert interface is not None, "the registry asks first"
        documents = call.documents
        returned = by_keyword(
            interface._flash_attn_varlen_forward if documents else interface._flash_attn_forward,
            q=q,
            k=k,
            v=v,
            **documents,
            left=call.left,
            right=call.right,
            dropout_p=call.dropout,
            softmax_scale=call.scale,
            softcap=call.soft_cap,
            alibi_slopes=call.slopes,
            return_softmax=False,
        )
        out, (lse, _, state) = returned[0], returned[-3:]
        return out, lse, state

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
        documents = call.documents
        found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        by_keyword(
            interface._flash_attn_varlen_backward if documents else interface._flash_attn_backward,
            dout=grad,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=found[0],
            dk=found[1],
            dv=found[2],
            **documents,
            left=call.left,
            right=call.right,
            dropout_p=call.dropout,
            softmax_scale=call.scale,
            softcap=call.soft_cap,
            alibi_slopes=call.slopes,
            deterministic=call.deterministic,
            rng_state=state,
        )
        return found


BACKEND = FlashBackend(CAPABILITIES, _Kernel(), module=_MODULE, package="flash-attn")
