"""The backends flash-attn 2 and 3.

Version 2 (Dao 2023, arXiv:2307.08691) is releases 2.6 to 2.8; version 3 (Shah et al. 2024, arXiv:2407.08608) is for
Hopper GPUs, and its module is ``flash_attn_interface``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.capabilities import Capabilities, Feature
from megatron.core.ops.attention.flash import FlashBackend, FlashCall, by_keyword, imported


@dataclass(frozen=True)
class _Kernel:
    """The lowest calls. Those of flash-attn 3 take documents or none, and have neither dropout nor ALiBi."""

    module: str
    is_2: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """Result, log-sum-exp, and with flash-attn 2 the state of dropout's generator."""
        if not self.is_2:
            out, lse, *_ = self._run("forward", call, q=q, k=k, v=v)
            return out, lse, None
        returned = self._run("forward", call, q=q, k=k, v=v, return_softmax=False)
        out, (lse, _, state) = returned[0], returned[-3:]  # release 2.6 returns also padded copies of its inputs
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
        """Gradients of q, k and v."""
        found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        gradients = dict(zip(("dq", "dk", "dv"), found))
        drawn = {"rng_state": state} if self.is_2 else {}
        given: dict[str, Any] = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
        self._run("backward", call, **given, **gradients, **drawn, deterministic=call.deterministic)
        return found

    def _run(self, direction: str, call: FlashCall, **given: Any) -> Any:
        interface = imported(self.module)
        assert interface is not None, "the registry asks first"
        if self.is_2:
            given |= {"dropout_p": call.dropout, "alibi_slopes": call.slopes}
        return by_keyword(
            getattr(interface, f"_flash_attn_{'varlen_' if self.is_2 and call.documents else ''}{direction}"),
            **given,
            **call.documents,
            left=call.left,
            right=call.right,
            softmax_scale=call.scale,
            softcap=call.soft_cap,
        )


_OF_BOTH: tuple[Feature, ...] = ("windows", "soft caps", "sinks", "documents", "cached keys", "parts of the keys")
_2, _3 = "flash_attn.flash_attn_interface", "flash_attn_interface"

VERSION_2 = FlashBackend(
    Capabilities(
        subject="flash-attn 2",
        features=frozenset((*_OF_BOTH, "dropout", "ALiBi", "determinism")),
        # Parts of the keys would draw the same dropout, and their distances are not those of their places. The log-sum-
        # exp of causal calls with ALiBi is of other scores: slope times the key's place is added, not its distance
        # subtracted.
        apart=(
            ("soft caps", "dropout"),
            ("dropout", "parts of the keys"),
            ("ALiBi", "parts of the keys"),
            ("ALiBi", "sinks"),
        ),
    ),
    _Kernel(_2, is_2=True),
    module=_2,
    package="flash-attn",
)
VERSION_3 = FlashBackend(
    # Its releases until autumn 2025 take ``deterministic`` and ignore it (flash-attention #1766).
    Capabilities(subject="flash-attn 3", lowest=(9, 0), highest=(9, 0), features=frozenset(_OF_BOTH)),
    _Kernel(_3, is_2=False),
    module=_3,
    package="flash-attn 3",
)
