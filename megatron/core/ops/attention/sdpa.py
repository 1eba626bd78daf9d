"""Attention through torch's scaled_dot_product_attention: no score matrix is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention.masks import allowed_keys, each_document
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult


def supports(request: AttentionRequest) -> str | None:
    """Everything but a bias, whose gradient the fast kernels don't compute, and dropout, which torch draws from its
    global generator, so that no layer could be replayed.
    """
    if request.bias:
        return "its flash kernel has no bias"
    if request.dropout > 0.0:
        return f"it draws dropout ({request.dropout}) from torch's global generator, which cannot be replayed"
    if request.partial and request.attention_mask:
        return "its flash kernel has no padding mask"
    on_gpu = request.device.type != "cpu"
    if request.partial and on_gpu and request.dtype not in (torch.float16, torch.bfloat16):
        return f"its flash kernel does not support {str(request.dtype).removeprefix('torch.')}"
    if request.partial and on_gpu and (request.head_width % 8 or request.head_width > 256):
        return f"its flash kernel has no heads of {request.head_width}, only multiples of 8 up to 256"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """See ``attention``. Without masks no tensor is copied: batch and heads are folded into one dim of heads."""
    causal, scale, grouped = options.causal and q.shape[0] > 1, options.scale, q.shape[2] != k.shape[2]

    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (_fold(x) for x in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return _unfold(out, q).flatten(2)

    if options.attention_mask is None and (q.shape[0] == k.shape[0] or not causal):
        return folded(q, k, v) if options.document_ids is None else each_document(folded, q, k, v, options.document_ids)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
    allowed = allowed_keys(q, k, options)
    out = F.scaled_dot_product_attention(query, key, value, allowed, scale=scale, enable_gqa=grouped)
    if options.attention_mask is not None and allowed is not None:
        out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)  # a query that sees no key gets zeros
    return out.permute(2, 0, 1, 3).flatten(2)


def attend_partly(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
    """See ``partial_attention``. Torch's flash kernels return the log-sum-exp that its public function hides."""
    query, key, value = (_fold(x) for x in (q, k, v))
    causal, scale = options.causal, options.scale
    kernels = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = kernels._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = kernels._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return PartialResult(_unfold(out, q), _unfold(lse.unsqueeze(-1), q).squeeze(-1))


def gradients_of_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
) -> Gradients:
    """See ``partial_attention_gradients``: the kernels take result and log-sum-exp as given, so they may be merged."""
    upstream, query, key, value, out = (_fold(x) for x in (grad, q, k, v, whole.out))
    lse = _fold(whole.lse.unsqueeze(-1)).squeeze(-1).contiguous()
    causal, scale = options.causal, options.scale
    kernels = torch.ops.aten
    if q.device.type == "cpu":
        found = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, query, key, value, out, lse, 0.0, causal, scale=scale
        )
    else:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout's generator
        found = kernels._scaled_dot_product_flash_attention_backward(
            upstream, query, key, value, out, lse, None, None, q.shape[0], k.shape[0], 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
    return Gradients(*(_unfold(each, x) for each, x in zip(found, (q, k, v))))


def _fold(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [1, b·n, s, d], a view: samples don't interact, so their heads count as heads of one sample."""
    return x.flatten(1, 2).transpose(0, 1).unsqueeze(0)


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    """[1, b·n, s, d] -> [s, b, n, d] for the b and n of ``like``."""
    return x.squeeze(0).transpose(0, 1).reshape(-1, *like.shape[1:3], x.shape[3])
