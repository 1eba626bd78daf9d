"""One kernel of torch's scaled_dot_product_attention, chosen explicitly: cuDNN's, or the memory-efficient one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.ops.attention import sdpa
from megatron.core.ops.attention.capabilities import HALF, Capabilities
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult

_CUDNN = SDPBackend.CUDNN_ATTENTION

CUDNN = Capabilities(
    subject="cuDNN's kernel",
    widest=128,
    lowest=(9, 0),
    features=frozenset(("sinks", "documents", "parts of the keys")),
)
EFFICIENT = Capabilities(
    subject="the memory-efficient kernel",
    dtypes=(*HALF, torch.float32),
    lowest=(5, 0),
    features=frozenset(("documents", "padding masks")),
)


@dataclass(frozen=True)
class FusedBackend:
    """A ``Backend``; documents are calls of their own."""

    capabilities: Capabilities
    kernel: SDPBackend

    takes_sinks = False

    def missing(self) -> str | None:
        """None: both are part of torch."""
        return None

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or why this backend cannot compute the call."""
        if request.head_width % 8:
            return f"{self.capabilities.subject} has no heads of {request.head_width}, only multiples of 8"
        return self.capabilities.refusal(request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The result of ``attention`` by this kernel of torch's."""
        # cuDNN's kernel takes no call to one key, which a document may be.
        kernels = (self.kernel, SDPBackend.FLASH_ATTENTION) if self.kernel == _CUDNN else (self.kernel,)
        return sdpa.attend_with(q, k, v, options, kernels)

    def attend_partly(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
        """The result of ``partial_attention`` by cuDNN's kernel."""
        if k.shape[0] == 1:
            return sdpa.attend_partly(q, k, v, options)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_heads_first(x) for x in sdpa.widened(q, k, v)),
            None,
            True,
            0.0,
            options.causal,
            False,
            scale=options.scale,
        )
        sums = lse.squeeze(-1) if lse.dim() == 4 else lse
        return PartialResult(_positions_first(out)[..., : v.shape[3]], sums.permute(2, 0, 1))

    def gradients_of_part(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
    ) -> Gradients:
        """The result of ``partial_attention_gradients`` by cuDNN's kernel."""
        if k.shape[0] == 1:
            return sdpa.gradients_of_part(grad, q, k, v, whole, options)
        upstream, query, key, value, out = (_heads_first(x) for x in sdpa.widened(grad, q, k, v, whole.out))
        lse = whole.lse.permute(1, 2, 0).contiguous().unsqueeze(-1)
        unused = torch.empty(1, dtype=torch.int64, device=q.device)  # the seed of dropout, and its offset
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            upstream,
            query,
            key,
            value,
            out,
            lse,
            unused,
            unused,
            None,
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            options.causal,
            scale=options.scale,
        )
        return Gradients(*(_positions_first(each)[..., : x.shape[3]] for each, x in zip(found, (q, k, v))))


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)


def _positions_first(x: Tensor) -> Tensor:
    """[b, n, s, d] -> [s, b, n, d], a view."""
    return x.permute(2, 0, 1, 3)


cudnn = FusedBackend(CUDNN, _CUDNN)
efficient = FusedBackend(EFFICIENT, SDPBackend.EFFICIENT_ATTENTION)
