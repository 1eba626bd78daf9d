"""Attention by plain matrix products over blocks of queries; probabilities are computed again in the backward pass.

Memory grows with the length, not its square, and dropout is drawn from an explicit generator. In bf16 on a CPU this is
more than twice as fast as torch's kernel, because all its matrix products go through oneDNN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.documents import each_document
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.dropout import draw_kept, scale_kept

_BLOCK = 128  # queries at once, of causal attention, where blocks leave out keys; others take more of short sequences


def supports(request: AttentionRequest) -> str | None:
    """Everything but padding or a bias within documents, and a softmax wider than its scores."""
    if request.document_ids and (request.attention_mask or request.bias):
        return f"it has no {'padding mask' if request.attention_mask else 'bias'} within documents"
    if request.softmax_in_fp32 and request.dtype not in (torch.float32, torch.float64):
        return f"its scores and softmax are in {str(request.dtype).removeprefix('torch.')}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """See ``attention``."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Blocked.apply(q, k, v, options.bias, options)  # type: ignore[no-untyped-call]
        return out

    return call(q, k, v) if options.document_ids is None else each_document(call, q, k, v, options.document_ids)


class _Blocked(torch.autograd.Function):
    """P = softmax(q·kᵀ·scale + bias), out = drop(P)·v. Keeps q, k, v, bias and the state of the generator.

    dv = drop(P)ᵀ·dout;  dP = drop(dout·vᵀ);  dS = P∘(dP - rowsum(dP∘P));  dq = dS·k·scale;  dk = dSᵀ·q·scale;
    dbias = Σ dS over samples.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.options = dataclasses.replace(options, bias=None)
        ctx.generator_state = _state(options)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for block in _blocks(q, k, v, options):
            probabilities = block.probabilities()
            if options.generator is not None and options.dropout > 0.0:
                kept = draw_kept(probabilities, options.dropout, options.generator)
                probabilities = scale_kept(probabilities, kept, options.dropout)
            block.put(torch.bmm(probabilities, block.v), out, scale=1.0)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, bias = ctx.saved_tensors
        options = dataclasses.replace(ctx.options, bias=bias)
        generator = _restored(ctx.generator_state, q.device)
        grads = _gradients(grad.view(*q.shape[:3], v.shape[3]), q, k, v, options, generator, whole=None)
        return grads.q, grads.k, grads.v, grads.bias, None


def attend_partly(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
    """See ``partial_attention``."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for block in _blocks(q, k, v, options):
        scores = block.scores().to(lse.dtype)
        sums = scores.logsumexp(dim=-1, keepdim=True)
        probabilities = scores.sub_(_finite(sums)).exp_().to(q.dtype)
        if options.generator is not None and options.dropout > 0.0:
            kept = draw_kept(probabilities, options.dropout, options.generator)
            probabilities = scale_kept(probabilities, kept, options.dropout)
        block.put(torch.bmm(probabilities, block.v), out, scale=1.0)
        block.put(sums, lse.unsqueeze(-1), scale=1.0)
    return PartialResult(out, lse)


def gradients_of_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
) -> Gradients:
    """See ``partial_attention_gradients``."""
    return _gradients(grad, q, k, v, options, options.generator if options.dropout > 0.0 else None, whole=whole)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    generator: torch.Generator | None,
    *,
    whole: PartialResult | None,
) -> Gradients:
    """``whole``: the result over all keys, of which these are a part; None when these are all."""
    upstream = _fold_queries(grad, k)
    softmax = _Softmax() if whole is None else _PartOfSoftmax(grad, whole, k)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums: tuple[Tensor, Tensor] | None = None
    grad_bias = None if options.bias is None else torch.zeros_like(options.bias)
    for block in _blocks(q, k, v, options):
        grad_out = upstream[:, :, block.rows].flatten(1, 2).contiguous()
        used = probabilities = softmax.forward(block)
        grad_probabilities = torch.bmm(grad_out, block.v.transpose(1, 2))
        if generator is not None:
            kept = draw_kept(probabilities, options.dropout, generator)
            used = scale_kept(probabilities, kept, options.dropout)
            grad_probabilities = scale_kept(grad_probabilities, kept, options.dropout)
        visible = slice(0, block.k.shape[1])
        grad_v = torch.bmm(used.transpose(1, 2), grad_out)
        grad_scores = softmax.backward(grad_probabilities, probabilities, block)
        if grad_bias is not None:
            by_head = grad_scores.view(q.shape[1], q.shape[2], -1, grad_scores.shape[2])
            grad_bias[:, block.rows, visible] = by_head.sum(0)
        block.put(torch.bmm(grad_scores, block.k), grad_q, scale=options.scale)
        parts = torch.bmm(grad_scores.transpose(1, 2), block.q), grad_v
        if block.rows == slice(0, q.shape[0]):  # the only one
            sums = parts
        else:
            sums = sums or (_zeros(k), _zeros(v))
            for total, part in zip(sums, parts):
                total[:, visible] += part
    assert sums is not None, "there are queries"
    grad_k, grad_v = sums
    return Gradients(grad_q, _unfold(grad_k.mul_(options.scale), k), _unfold(grad_v, v), grad_bias)


def _zeros(x: Tensor) -> Tensor:
    """For keys or values, [B, sk, d], wide enough to add up blocks."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros_like(_fold(x), dtype=wide, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Block:
    """Some queries and the keys they see, as matrices: ``B`` samples times key heads, each serving ``r`` query heads.

    ``q`` [B, r·rows, d]; ``k`` and ``v`` [B, keys, d]; contiguous. ``later`` [rows, rows]: what to add to the scores of
    the last keys so that no query sees beyond itself; None when all see all. ``padding`` [B, 1, keys]: what to add so
    that none sees padding; None where there is none. ``blind`` [B, 1 or r·rows, 1]: True for queries that see no key;
    None where there are none. ``bias`` [g, r·rows, keys]: added to the scores of every sample.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    later: Tensor | None
    padding: Tensor | None
    blind: Tensor | None
    bias: Tensor | None

    def scores(self) -> Tensor:
        """q·kᵀ·scale + bias, [B, r·rows, keys], minus infinity where a key is later than the query, or padding."""
        keys = self.k.transpose(1, 2)
        if self.bias is not None:  # the product is added where bias and padding lie already, which saves two passes
            scores = self._masked_bias(self.bias).baddbmm_(self.q, keys, alpha=self.scale)
        elif self.padding is not None:  # added, not filled in: that takes a third of the time
            scores = torch.baddbmm(self.padding, self.q, keys, alpha=self.scale)
        else:
            scores = torch.baddbmm(self.q.new_empty(1, 1, 1), self.q, keys, beta=0.0, alpha=self.scale)
        if self.later is not None:
            length = self.later.shape[0]
            scores.view(scores.shape[0], -1, length, scores.shape[2])[..., -length:].add_(self.later)
        return scores

    def _masked_bias(self, bias: Tensor) -> Tensor:
        samples = self.q.shape[0] // bias.shape[0]
        if self.padding is None:
            return bias.repeat(samples, 1, 1)
        return (bias + self.padding.view(samples, -1, 1, bias.shape[2])).flatten(0, 1)

    def probabilities(self) -> Tensor:
        """Softmax of the scores over these keys, [B, r·rows, keys]; zeros for a query that sees none of them."""
        probabilities = self.scores().softmax(dim=-1)
        return probabilities if self.blind is None else probabilities.masked_fill_(self.blind, 0.0)

    def put(self, result: Tensor, out: Tensor, *, scale: float) -> None:
        """Write ``result`` [B, r·rows, d] times ``scale`` to its place in ``out`` [sq, b, n, d]."""
        length = self.rows.stop - self.rows.start
        by_head = result.view(result.shape[0], -1, length, result.shape[2])  # [B, r, rows, d]
        target = out[self.rows].view(length, *by_head.shape[:2], -1)
        torch.mul(by_head.permute(2, 0, 1, 3), scale, out=target)


class _Softmax:
    """Of scores over all keys."""

    def forward(self, block: _Block) -> Tensor:
        """Probabilities, [B, r·rows, keys]."""
        return block.probabilities()

    def backward(self, grad: Tensor, probabilities: Tensor, block: _Block) -> Tensor:
        """Gradient of the scores."""
        return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


class _PartOfSoftmax(_Softmax):
    """Of scores over some of the keys: what the sums over all keys are is known, for rowsum(dP∘P) it is dout·out."""

    def __init__(self, grad: Tensor, whole: PartialResult, k: Tensor) -> None:
        wide = whole.lse.dtype
        self._lse = _fold_queries(whole.lse.unsqueeze(-1), k)
        self._means = _fold_queries((grad.to(wide) * whole.out.to(wide)).sum(-1, keepdim=True), k)

    def forward(self, block: _Block) -> Tensor:
        """Probabilities, [B, r·rows, keys]."""
        lse = self._lse[:, :, block.rows].flatten(1, 2)
        return block.scores().to(lse.dtype).sub_(_finite(lse)).exp_().to(block.q.dtype)

    def backward(self, grad: Tensor, probabilities: Tensor, block: _Block) -> Tensor:
        """Gradient of the scores."""
        means = self._means[:, :, block.rows].flatten(1, 2)
        return (grad - means).mul_(probabilities).to(block.q.dtype)


def _blocks(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Iterator[_Block]:
    queries, keys, values = _fold_queries(q, k), _fold(k).contiguous(), _fold(v).contiguous()
    sq, sk = q.shape[0], k.shape[0]
    padding = blind = None
    if options.attention_mask is not None:
        hidden = ~options.attention_mask.repeat_interleave(k.shape[2], dim=0).unsqueeze(1)
        padding = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        blind = _blind(hidden, sq if options.causal else 1)
    size = _BLOCK if options.causal else max(_BLOCK, 16 * _BLOCK**2 // sk)
    for start in range(0, sq, size):
        rows = slice(start, min(start + size, sq))
        visible, later = sk, None
        if options.causal:
            visible = rows.stop + sk - sq
            later = q.new_full((rows.stop - start, rows.stop - start), -torch.inf).triu_(1)
        yield _Block(
            rows=rows,
            q=queries[:, :, rows].flatten(1, 2).contiguous(),
            k=keys[:, :visible].contiguous(),
            v=values[:, :visible].contiguous(),
            scale=options.scale,
            later=later,
            padding=None if padding is None else padding[:, :, :visible],
            blind=blind[:, rows].repeat(1, queries.shape[1], 1) if blind is not None and options.causal else blind,
            bias=None if options.bias is None else _bias_of(options.bias[:, rows, :visible], k),
        )


def _blind(hidden: Tensor, queries: int) -> Tensor | None:
    """Which of the last ``queries`` positions have padding alone up to themselves, [B, queries, 1]; of one query, which
    sees all keys, whether they all are padding. None where there are none, as far as a look costs no waiting.
    """
    blind = ((~hidden).cumsum(dim=-1) == 0)[:, :, -queries:].transpose(1, 2)
    return None if hidden.device.type == "cpu" and not bool(blind.any()) else blind


def _fold(x: Tensor) -> Tensor:
    """[s, b, g, d] -> [b·g, s, d], a view."""
    return x.flatten(1, 2).transpose(0, 1)


def _fold_queries(x: Tensor, k: Tensor) -> Tensor:
    """[sq, b, n, d] -> [B, r, sq, d], for the key heads of ``k``."""
    groups = x.shape[1] * k.shape[2]
    return x.reshape(x.shape[0], groups, -1, x.shape[3]).permute(1, 2, 0, 3).contiguous()


def _bias_of(bias: Tensor, k: Tensor) -> Tensor:
    """[n, rows, keys] -> [g, r·rows, keys], for the g key heads of ``k``."""
    return bias.reshape(k.shape[2], -1, bias.shape[2])


def _unfold(grad: Tensor, x: Tensor) -> Tensor:
    """[B, sk, d] -> [sk, b, g, d], in the type of ``x``."""
    return grad.to(x.dtype).transpose(0, 1).view(x.shape)


def _finite(lse: Tensor) -> Tensor:
    """Minus infinity, of a query that sees no key, as a number: scores of minus infinity less it are themselves."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _state(options: AttentionOptions) -> Tensor | None:
    return options.generator.get_state() if options.generator is not None and options.dropout > 0.0 else None


def _restored(state: Tensor | None, device: torch.device) -> torch.Generator | None:
    """A generator that draws what the forward pass drew."""
    if state is None:
        return None
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator
