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
from typing_extensions import override

from megatron.core.ops.attention.masks import alibi, distances, each_document
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.dropout import draw_kept, dropout, generator_at, generator_state, scale_kept

# Queries of a block of causal attention, whose later blocks see more keys. Other attention takes more if keys are few.
_BLOCK = 128


def supports(request: AttentionRequest) -> str | None:
    """Everything but keys ahead of a query, padding or a bias within documents, and a softmax wider than its scores."""
    if request.ahead:
        return "its blocks have no keys ahead of a query"
    if request.document_ids and (request.attention_mask or request.bias):
        return f"it has no {'padding mask' if request.attention_mask else 'bias'} within documents"
    if request.softmax_in_fp32 and request.dtype not in (torch.float32, torch.float64):
        return f"its scores and softmax are in {str(request.dtype).removeprefix('torch.')}"
    return None


def bytes_of_scores(*, heads: int, queries: int, keys: int, itemsize: int, is_banded: bool) -> int:
    """Bytes of the scores of a block in the backward pass with dropout: probabilities, their gradients before and after
    dropout, and its mask. ``heads``: of all samples.
    """
    return heads * min(_queries_of_block(keys, is_banded=is_banded), queries) * keys * (3 * itemsize + 1)


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """The result of ``attention``, with scores of one block of queries at a time."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Chunked.apply(q, k, v, options.bias, options)  # type: ignore[no-untyped-call, no-any-return]

    return call(q, k, v) if options.document_ids is None else each_document(call, q, k, v, options.document_ids)


class _Chunked(torch.autograd.Function):
    """P = softmax(q·kᵀ·scale + bias), out = drop(P)·v. Keeps q, k, v, bias and the state of the generator.

    dv = drop(P)ᵀ·dout;  dP = drop(dout·vᵀ);  dS = P∘(dP - rowsum(dP∘P));  dq = dS·k·scale;  dk = dSᵀ·q·scale;
    dbias = Σ dS over samples.
    """

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.options = dataclasses.replace(options, bias=None)
        ctx.generator_state = generator_state(options.dropout, options.generator)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for block in _blocks(q, k, v, options):
            probabilities = dropout(block.softmax(block.scores()[0]), options.dropout, options.generator)
            block.put(torch.bmm(probabilities, block.v), out, scale=1.0)
        return out.flatten(2)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, bias = ctx.saved_tensors
        options = dataclasses.replace(ctx.options, bias=bias, generator=generator_at(ctx.generator_state, q.device))
        grads = gradients_of_part(grad.view(*q.shape[:3], v.shape[3]), q, k, v, None, options)
        return grads.q, grads.k, grads.v, grads.bias, None


def attend_partly(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
    """The result of ``partial_attention``, with scores of one block of queries at a time."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for block in _blocks(q, k, v, options):
        scores = block.scores()[0].to(lse.dtype)
        sums = scores.logsumexp(dim=-1, keepdim=True)
        probabilities = dropout(_exp_less(scores, sums).to(q.dtype), options.dropout, options.generator)
        block.put(torch.bmm(probabilities, block.v), out, scale=1.0)
        block.put(sums, lse.unsqueeze(-1), scale=1.0)
    return PartialResult(out, lse)


def gradients_of_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult | None, options: AttentionOptions
) -> Gradients:
    """The result of ``partial_attention_gradients``, block by block. ``whole`` is None when these are all keys.

    With it, the sums over all keys are known: the softmax's from ``whole.lse``, and rowsum(dP∘P) is dout·out.
    """
    upstream = _fold_queries(grad, k)
    if whole is not None:
        wide = whole.lse.dtype
        all_lse = _fold_queries(whole.lse.unsqueeze(-1), k)
        all_means = _fold_queries((grad.to(wide) * whole.out.to(wide)).sum(-1, keepdim=True), k)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = grad_v = None
    grad_bias = None if options.bias is None else torch.zeros_like(options.bias)
    for block in _blocks(q, k, v, options):
        grad_out = upstream[:, :, block.rows].flatten(1, 2).contiguous()
        scores, steepness = block.scores(with_steepness=True)
        if whole is None:
            probabilities = block.softmax(scores)
        else:
            probabilities = _exp_less(scores.to(wide), all_lse[:, :, block.rows].flatten(1, 2)).to(q.dtype)
        del scores  # what is as large as they is freed as soon as it can be
        used, kept = probabilities, None
        if options.dropout > 0.0:
            kept = draw_kept(probabilities, options.dropout, options.generator)
            used = scale_kept(probabilities, kept, options.dropout)
        block_grad_v = torch.bmm(used.transpose(1, 2), grad_out)
        del used
        grad_probabilities = torch.bmm(grad_out, block.v.transpose(1, 2))
        if kept is not None:
            grad_probabilities = scale_kept(grad_probabilities, kept, options.dropout)
            del kept
        if whole is None:
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
        else:
            means = all_means[:, :, block.rows].flatten(1, 2)
            grad_scores = (grad_probabilities - means).mul_(probabilities).to(q.dtype)
        del grad_probabilities, probabilities
        if grad_bias is not None:
            by_head = grad_scores.view(q.shape[1], q.shape[2], -1, grad_scores.shape[2])
            grad_bias[:, block.rows, block.visible] = by_head.sum(0)
        if steepness is not None:
            grad_scores.mul_(steepness)
        block.put(torch.bmm(grad_scores, block.k), grad_q, scale=options.scale)
        block_grad_k = torch.bmm(grad_scores.transpose(1, 2), block.q)
        del grad_scores  # else it lives beside the next block's scores
        if block.rows == slice(0, q.shape[0]) and block.k.shape[1] == k.shape[0]:  # the only block
            grad_k, grad_v = block_grad_k, block_grad_v
            break
        if grad_k is None or grad_v is None:
            sums = torch.promote_types(q.dtype, torch.float32)
            grad_k, grad_v = (
                torch.zeros_like(_fold(x), dtype=sums, memory_format=torch.contiguous_format) for x in (k, v)
            )
        grad_k[:, block.visible] += block_grad_k
        grad_v[:, block.visible] += block_grad_v
    assert grad_k is not None and grad_v is not None, "there are queries"
    return Gradients(grad_q, _unfold(grad_k.mul_(options.scale), k), _unfold(grad_v, v), grad_bias)


def _exp_less(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(``scores`` - ``lse``), overwriting ``scores``; 0 for a query that sees no key, whose ``lse`` is -inf."""
    return scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min)).exp_()


@dataclass(frozen=True)
class _Block:
    """Some queries and the keys they see, as matrices: ``B`` samples times key heads, each serving ``r`` query heads.

    ``rows``, ``visible``: which queries and keys they are. ``q`` [B, r·rows, d]; ``k`` and ``v`` [B, keys, d];
    contiguous. ``edges``: what is added to the scores of the first or last keys, which not all of the queries see,
    [rows, some keys]. ``padding`` [B, 1, keys]: added so that none sees padding; None without padding. ``blind``
    [B, 1 or r·rows, 1]: True for queries that see no key; None without such. ``bias`` [g, r·rows, keys]: added to the
    scores of every sample.
    """

    rows: slice
    visible: slice
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    soft_cap: float | None
    edges: tuple[tuple[slice, Tensor], ...]
    padding: Tensor | None
    blind: Tensor | None
    bias: Tensor | None

    def scores(self, *, with_steepness: bool = False) -> tuple[Tensor, Tensor | None]:
        """q·kᵀ·scale, capped, + bias, [B, r·rows, keys], minus infinity where a query may not see a key; and, asked
        for it, the derivative of the soft cap, None without one.
        """
        keys, steepness = self.k.transpose(1, 2), None
        if self.soft_cap is not None:
            nothing = self.q.new_empty(1, 1, 1)
            scores = torch.baddbmm(nothing, self.q, keys, beta=0.0, alpha=self.scale / self.soft_cap).tanh_()
            steepness = 1.0 - scores.square() if with_steepness else None
            scores.mul_(self.soft_cap)
            if self.bias is not None:
                scores.view(-1, *self.bias.shape).add_(self.bias)
            if self.padding is not None:
                scores.add_(self.padding)
        elif self.bias is not None:  # the product is added to bias and padding in place, which saves two passes
            samples = self.q.shape[0] // self.bias.shape[0]
            if self.padding is None:
                masked_bias = self.bias.repeat(samples, 1, 1)
            else:
                masked_bias = (self.bias + self.padding.view(samples, -1, 1, self.bias.shape[2])).flatten(0, 1)
            scores = masked_bias.baddbmm_(self.q, keys, alpha=self.scale)
        elif self.padding is not None:  # added, not filled in: that takes a third of the time
            scores = torch.baddbmm(self.padding, self.q, keys, alpha=self.scale)
        else:
            scores = torch.baddbmm(self.q.new_empty(1, 1, 1), self.q, keys, beta=0.0, alpha=self.scale)
        for columns, edge in self.edges:
            scores.view(scores.shape[0], -1, edge.shape[0], scores.shape[2])[..., columns].add_(edge)
        return scores, steepness

    def softmax(self, scores: Tensor) -> Tensor:
        """Probabilities of these keys, [B, r·rows, keys]; zeros for a query that sees none of them."""
        probabilities = scores.softmax(dim=-1)
        return probabilities if self.blind is None else probabilities.masked_fill_(self.blind, 0.0)

    def put(self, result: Tensor, out: Tensor, *, scale: float) -> None:
        """Write ``result`` [B, r·rows, d] times ``scale`` to its place in ``out`` [sq, b, n, d]."""
        length = self.rows.stop - self.rows.start
        by_head = result.view(result.shape[0], -1, length, result.shape[2])  # [B, r, rows, d]
        target = out[self.rows].view(length, *by_head.shape[:2], -1)
        torch.mul(by_head.permute(2, 0, 1, 3), scale, out=target)


def _blocks(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Iterator[_Block]:
    queries, keys, values = _fold_queries(q, k), _fold(k).contiguous(), _fold(v).contiguous()
    sq, sk = q.shape[0], k.shape[0]
    is_banded = options.causal or options.window is not None
    padding = blind = None
    if options.attention_mask is not None:
        real = options.attention_mask.repeat_interleave(k.shape[2], dim=0).unsqueeze(1)  # [B, 1, keys]
        padding = q.new_zeros(real.shape).masked_fill_(~real, -torch.inf)
        blind = _blind(real, sq, options)
        if q.device.type == "cpu" and not bool(blind.any()):  # elsewhere the question would wait for the device
            blind = None
    size = _queries_of_block(sk, is_banded=is_banded)
    for start in range(0, sq, size):
        rows = slice(start, min(start + size, sq))
        visible = options.visible(rows, queries=sq, keys=sk)
        if visible.start >= visible.stop:  # a part without a visible key
            visible = slice(0, 1)
        yield _Block(
            rows=rows,
            visible=visible,
            q=queries[:, :, rows].flatten(1, 2).contiguous(),
            k=keys[:, visible].contiguous(),
            v=values[:, visible].contiguous(),
            scale=options.scale,
            soft_cap=options.soft_cap,
            edges=tuple(_edges(q, rows, visible, keys=sk, options=options)),
            padding=None if padding is None else padding[:, :, visible],
            blind=blind[:, rows].repeat(1, queries.shape[1], 1) if blind is not None and is_banded else blind,
            bias=_bias(q, k, rows, visible, options),
        )


def _queries_of_block(keys: int, *, is_banded: bool) -> int:
    return _BLOCK if is_banded else max(_BLOCK, 16 * _BLOCK**2 // keys)


def _edges(
    q: Tensor, rows: slice, visible: slice, *, keys: int, options: AttentionOptions
) -> Iterator[tuple[slice, Tensor]]:
    """Columns among the ``visible`` keys that not all queries ``rows`` see, and what hides them, [rows, columns]."""
    count, width = rows.stop - rows.start, visible.stop - visible.start
    first = rows.start + (keys - q.shape[0] if options.offset is None else options.offset) - visible.start
    before, after = options.sides
    if after is not None and first + after + 1 < width:
        start = max(first + after + 1, 0)
        hidden = q.new_full((count, width - start), -torch.inf)
        yield slice(start, width), hidden.triu_(first + after - start + 1)
    if before is not None and first + count - 1 - before > 0:
        stop = min(first + count - 1 - before, width)
        yield slice(0, stop), q.new_full((count, stop), -torch.inf).tril_(first - before - 1)


def _blind(real: Tensor, queries: int, options: AttentionOptions) -> Tensor:
    """Which queries see no key, of those that are ``real`` [B, 1, keys]: [B, queries or 1, 1]."""
    keys = real.shape[2]
    counts = torch.nn.functional.pad(real.cumsum(dim=-1), (1, 0))[:, 0]  # of real keys before each
    if not options.causal and options.window is None:
        return (counts[:, -1:] == 0).unsqueeze(-1)
    first = keys - queries if options.offset is None else options.offset
    own = torch.arange(first, first + queries, device=real.device)
    before, after = options.sides
    start = torch.zeros_like(own) if before is None else (own - before).clamp(0, keys)
    stop = torch.full_like(own, keys) if after is None else (own + 1 + after).clamp(0, keys)
    return (counts[:, torch.maximum(start, stop)] == counts[:, start]).unsqueeze(-1)


def _bias(q: Tensor, k: Tensor, rows: slice, visible: slice, options: AttentionOptions) -> Tensor | None:
    """The bias of these queries and keys, that of ALiBi included, [g, r·rows, keys]."""
    bias = None if options.bias is None else options.bias[:, rows, visible]  # [n, rows, keys]
    if options.slopes is not None:
        first = k.shape[0] - q.shape[0] if options.offset is None else options.offset
        offset = first + rows.start - visible.start
        ahead = distances(rows.stop - rows.start, visible.stop - visible.start, offset, device=q.device)
        lost = alibi(options.slopes, ahead, q.dtype)
        bias = lost if bias is None else bias + lost
    return None if bias is None else bias.reshape(k.shape[2], -1, visible.stop - visible.start)


def _fold(x: Tensor) -> Tensor:
    """[s, b, g, d] -> [b·g, s, d], a view."""
    return x.flatten(1, 2).transpose(0, 1)


def _fold_queries(x: Tensor, k: Tensor) -> Tensor:
    """[sq, b, n, d] -> [B, r, sq, d], for the key heads of ``k``."""
    groups = x.shape[1] * k.shape[2]
    return x.reshape(x.shape[0], groups, -1, x.shape[3]).permute(1, 2, 0, 3).contiguous()


def _unfold(grad: Tensor, x: Tensor) -> Tensor:
    """[B, sk, d] -> [sk, b, g, d], in the type of ``x``."""
    return grad.to(x.dtype).transpose(0, 1).view(x.shape)
