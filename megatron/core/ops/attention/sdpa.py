"""Attention through torch's scaled_dot_product_attention: no score matrix is kept.

Its flash kernels have no window. On a CPU, queries are taken a few at a time, with the keys that they see and a mask.
In bf16 the kernel computes in fp32 where that is faster.
Elsewhere, where the kernel has no mask, and for wide windows of long sequences a window is made of causal calls without
one: positions are cut into blocks of the window's length. A block sees itself causally, and of the block before it the
keys after the query's own place, which is a causal call on both read backwards. All blocks are two calls, and no score
is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from megatron.core.ops.attention.masks import allowed_keys, each_document
from megatron.core.ops.attention.online_softmax import OnlineSoftmax
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.matmul import in_fastest_type, is_faster_in_fp32

# With fewer keys in a window, blocks with masks (``chunked``) are faster on a GPU than the kernel's short calls.
_SHORTEST_WINDOW = 64
# On a CPU, a window of more keys in a longer sequence is faster in blocks than with masks.
_LONGEST_MASKED_WINDOW, _LONGEST_MASKED = 1024, 2048
# Keys that the CPU kernel computes at once, also where a causal call shows fewer: calls to fewer keys cost less.
_KERNEL_BLOCK = 512
# Queries of a call with a mask: a quarter of a window, between these.
_FEWEST_QUERIES, _MOST_QUERIES = 64, 256


def supports(request: AttentionRequest) -> str | None:
    """None, or why torch's fast kernels can't compute the call. They compute no gradient of a bias. Torch draws dropout
    from its global generator, so that no layer could be replayed. Sinks need the log-sum-exp, as partial calls do.
    """
    for feature, is_asked in {
        "bias": request.bias,
        "soft cap of scores": request.soft_cap,
        "ALiBi": request.slopes,
    }.items():
        if is_asked:
            return f"its flash kernel has no {feature}"
    if request.dropout > 0.0:
        return f"it draws dropout ({request.dropout}) from torch's global generator, which cannot be replayed"
    if request.ahead:
        return "its flash kernel has no keys ahead of a query" if request.partial or request.sinks else None
    if request.window is not None and (reason := _refuses_window(request, request.window)):
        return reason
    in_parts = request.partial or request.sinks or request.window is not None
    if in_parts and request.attention_mask:
        return "its flash kernel has no padding mask"
    if in_parts and request.causal and request.query_length != request.key_length:
        return "its flash kernel has no cached keys"
    on_gpu = request.device.type != "cpu"
    if in_parts and on_gpu and request.dtype not in (torch.float16, torch.bfloat16):
        return f"its flash kernel does not support {str(request.dtype).removeprefix('torch.')}"
    if in_parts and on_gpu and (request.head_width % 8 or request.head_width > 256):
        return f"its flash kernel has no heads of {request.head_width}, only multiples of 8 up to 256"
    return None


def _refuses_window(request: AttentionRequest, window: tuple[int, int]) -> str | None:
    if request.partial or request.sinks:
        return "its flash kernel has no window"
    if not request.causal:
        return "its windows are for causal attention"
    if request.device.type == "cpu" or window[0] + 1 >= _SHORTEST_WINDOW:
        return None
    return f"windows of {window[0] + 1} make its calls too short"


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """The result of ``attention`` by torch's ``scaled_dot_product_attention``. On a GPU, never torch's kernel that
    keeps all scores, except in fp64, which has no other.
    """
    if q.device.type == "cpu" or q.dtype == torch.float64:
        return attend_with(q, k, v, options, ())
    efficient = SDPBackend.EFFICIENT_ATTENTION  # with masks, and for fp32
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return attend_with(q, k, v, options, (SDPBackend.FLASH_ATTENTION, efficient) if is_half else (efficient,))


def attend_with(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, kernels: tuple[SDPBackend, ...]) -> Tensor:
    """``attend`` by the first of torch's ``kernels`` that supports the call; without names torch chooses.

    Without masks no tensor is copied: batch and heads are folded into one dim of heads.
    """
    if v.shape[3] != q.shape[3]:  # else torch takes a kernel that keeps all scores
        query, key, value = widened(q, k, v)
        out = attend_with(query, key, value, options, kernels)
        return out.unflatten(2, (q.shape[2], -1))[..., : v.shape[3]].flatten(2)  # type: ignore[no-untyped-call, no-any-return]
    is_masked = options.attention_mask is not None or options.ahead is not None
    is_masked |= options.causal and q.shape[0] != k.shape[0]
    if kernels and q.shape[2] != k.shape[2] and (is_masked or kernels[0] == SDPBackend.EFFICIENT_ATTENTION):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))  # it has no groups
    with sdpa_kernel(list(kernels), set_priority=True) if kernels else nullcontext():
        return _attend(q, k, v, options)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    causal, scale, grouped = options.causal and q.shape[0] > 1, options.scale, q.shape[2] != k.shape[2]

    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_faster_in_fp32(q.dtype, q.device):
            return _Whole.apply(q, k, v, options, causal).flatten(2)  # type: ignore[no-untyped-call, no-any-return]
        query, key, value = (_fold(x) for x in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return _unfold(out, q).flatten(2)

    if options.window is not None and options.ahead is None:

        def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if options.window is None or q.shape[0] <= options.window[0] + 1:
                return folded(q, k, v)
            has_short_calls = options.window[0] < _LONGEST_MASKED_WINDOW or q.shape[0] <= _LONGEST_MASKED
            call = _Masked if q.device.type == "cpu" and has_short_calls else _Windowed
            return call.apply(q, k, v, options).flatten(2)  # type: ignore[no-untyped-call, no-any-return]

        return (
            windowed(q, k, v)
            if options.document_ids is None
            else each_document(windowed, q, k, v, options.document_ids)
        )
    if options.attention_mask is None and options.ahead is None and (q.shape[0] == k.shape[0] or not causal):
        return folded(q, k, v) if options.document_ids is None else each_document(folded, q, k, v, options.document_ids)
    query, key, value = (in_fastest_type(x).permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
    allowed = allowed_keys(q, k, options)
    out = F.scaled_dot_product_attention(query, key, value, allowed, scale=scale, enable_gqa=grouped)
    if options.attention_mask is not None and allowed is not None:
        out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)  # a query that sees no key gets zeros
    return out.permute(2, 0, 1, 3).flatten(2).to(q.dtype)


def attend_partly(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
    """The result of ``partial_attention`` by torch's flash kernels, which return the log-sum-exp."""
    query, key, value = (_fold(x) for x in widened(q, k, v))
    out, lse = _kernel(query, key, value, options, causal=options.causal)
    return PartialResult(_unfold(out, q)[..., : v.shape[3]], _unfold(lse.unsqueeze(-1), q).squeeze(-1))


def gradients_of_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
) -> Gradients:
    """The result of ``partial_attention_gradients``: the kernels take result and log-sum-exp as given, so they may be
    merged.
    """
    lse = _fold(whole.lse.unsqueeze(-1)).squeeze(-1)
    upstream, query, key, value, out = (_fold(x) for x in widened(grad, q, k, v, whole.out))
    found = _kernel_gradients(upstream, query, key, value, out, lse, options, causal=options.causal)
    return Gradients(*(_unfold(each, x)[..., : x.shape[3]] for each, x in zip(found, (q, k, v))))


class _Whole(torch.autograd.Function):
    """Attention on a CPU by the kernel's own two passes. Keeps q, k, v, the result and its log-sum-exp."""

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, causal: bool) -> Tensor:
        query, key, value = (_fold(x) for x in (q, k, v))
        folded, lse = _kernel(query, key, value, options, causal=causal)
        out = _unfold(folded, q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.causal = options, causal
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        upstream, query, key, value, result = (_fold(x) for x in (grad, q, k, v, out))
        found = _kernel_gradients(upstream, query, key, value, result, lse, ctx.options, causal=ctx.causal)
        return *(_unfold(each, x) for each, x in zip(found, (q, k, v))), None, None


@dataclass(frozen=True)
class _Part:
    """Calls of some queries to some keys: in each of ``blocks`` pieces those at ``asking`` see those at ``seen``.

    ``first``: these queries see keys for the first time. ``backwards``: both are read from the end.
    """

    rows: slice
    keys: slice
    blocks: int = 1
    asking: slice | None = None
    seen: slice | None = None
    causal: bool = True
    first: bool = False
    backwards: bool = False

    def queries(self, x: Tensor) -> Tensor:
        """The queries of this part among ``x`` [s, b, n, d], as a view [blocks, length, b, n, d]."""
        return x[self.rows].unflatten(0, (self.blocks, -1))[:, self.asking or slice(None)]  # type: ignore[no-untyped-call, no-any-return]

    def visible(self, x: Tensor) -> Tensor:
        """The keys, or what belongs to them, in the same form."""
        return x[self.keys].unflatten(0, (self.blocks, -1))[:, self.seen or slice(None)]  # type: ignore[no-untyped-call, no-any-return]

    def fold(self, x: Tensor) -> Tensor:
        """[blocks, length, b, n, d] -> [blocks, b·n, length, d]."""
        folded = x.flatten(2, 3).transpose(1, 2)
        return folded.flip(2) if self.backwards else folded

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse, for the shape of ``like``."""
        return (x.flip(2) if self.backwards else x).transpose(1, 2).reshape(like.shape)


def _parts(length: int, window: int) -> Iterator[_Part]:
    """The calls that make up a window of ``window`` keys, the query's own included, in as many positions or more."""
    blocks, rest = divmod(length, window)
    stop = blocks * window
    own, last = slice(0, stop), slice(stop, length)
    yield _Part(own, own, blocks, first=True)
    if blocks > 1 and window > 1:
        before, after = slice(0, window - 1), slice(1, window)
        yield _Part(slice(window, stop), slice(0, stop - window), blocks - 1, asking=before, seen=after, backwards=True)
    start = stop - window + 1
    if rest:
        yield _Part(last, last, first=True)
        yield _Part(last, slice(start, start + rest), backwards=True)
        if start + rest < stop:
            yield _Part(last, slice(start + rest, stop), causal=False)


class _Windowed(torch.autograd.Function):
    """Keeps q, k, v, the result and its log-sum-exp."""

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        merged = OnlineSoftmax.uninitialized(q, v)
        for part in _parts(q.shape[0], _length(options)):
            asking, result, sums = part.queries(q), part.queries(merged.out), part.queries(merged.lse)
            key, value = part.fold(part.visible(k)), part.fold(part.visible(v))
            out, lse = _kernel(part.fold(asking), key, value, options, causal=part.causal)
            found = PartialResult(part.unfold(out, result), part.unfold(lse.unsqueeze(-1), sums.unsqueeze(-1))[..., 0])
            if part.first:
                result.copy_(found.out)
                sums.copy_(found.lse)
            else:
                OnlineSoftmax(result, sums).add(found)
        whole = merged.result(q.dtype)
        ctx.save_for_backward(q, k, v, whole.out, whole.lse)
        ctx.options = options
        return whole.out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        options: AttentionOptions = ctx.options
        grads = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for part in _parts(q.shape[0], _length(options)):
            upstream, query, result = (part.fold(part.queries(x)) for x in (grad, q, out))
            key, value = (part.fold(part.visible(x)) for x in (k, v))
            sums = part.fold(part.queries(lse.unsqueeze(-1))).squeeze(-1)
            given = (upstream, query, key, value, result, sums)
            found = _kernel_gradients(*given, options, causal=part.causal)
            targets = (part.queries(grads[0]), part.visible(grads[1]), part.visible(grads[2]))
            for target, each in zip(targets, found):
                target.add_(part.unfold(each, target))
        grad_q, grad_k, grad_v = (total.to(x.dtype) for total, x in zip(grads, (q, k, v)))
        return grad_q, grad_k, grad_v, None


def _slices(length: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys they see, in turns. In a wide window those that see all keys before them come first, as one
    causal call.
    """
    start = 0
    if window > _KERNEL_BLOCK:
        start = min(window, length)
        yield slice(0, start), slice(0, start)
    size = min(max(window // 4, _FEWEST_QUERIES), _MOST_QUERIES)
    while start < length:
        rows = slice(start, min(start + size, length))
        yield rows, slice(max(start - window + 1, 0), rows.stop)
        start = rows.stop


def _band(rows: slice, keys: slice, window: int, q: Tensor) -> Tensor | None:
    """What hides from each of some queries the keys outside its window, [rows, keys], minus infinity there; None for
    a call that is causal.
    """
    if rows.start == 0 and window > _KERNEL_BLOCK:
        return None
    hidden = q.new_full((rows.stop - rows.start, keys.stop - keys.start), -torch.inf)
    own = rows.start - keys.start  # where the first query's own key is, the last that it sees
    return hidden.triu(own + 1) + hidden.tril_(own - window)


class _Masked(torch.autograd.Function):
    """Masked attention on a CPU. Keeps q, k, v, the result and its log-sum-exp."""

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        query, key, value = (_fold(x) for x in (q, k, v))
        found = []
        window = _length(options)
        for rows, keys in _slices(q.shape[0], window):
            mask = _band(rows, keys, window, q)
            given = (query[:, :, rows], key[:, :, keys], value[:, :, keys])
            found.append(_kernel(*given, options, causal=mask is None, mask=mask))
        out, lse = (torch.cat(parts, dim=2) for parts in zip(*found))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return _unfold(out, q)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        upstream, query, key, value = (_fold(x) for x in (grad, q, k, v))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
        window = _length(ctx.options)
        for rows, keys in _slices(q.shape[0], window):
            mask = _band(rows, keys, window, q)
            given = (upstream[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys])
            answer = (out[:, :, rows], lse[:, :, rows])
            found = _kernel_gradients(*given, *answer, ctx.options, causal=mask is None, mask=mask)
            grad_query[:, :, rows] = found[0]
            grad_key[:, :, keys] += found[1]
            grad_value[:, :, keys] += found[2]
        grad_q, grad_k, grad_v = (_unfold(x, like) for x, like in zip((grad_query, grad_key, grad_value), (q, k, v)))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _length(options: AttentionOptions) -> int:
    """Keys in a window, the query's own included."""
    assert options.window is not None
    return options.window[0] + 1


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Result [b, n, s, d] and log-sum-exp [b, n, s] of torch's flash kernel. ``mask``: added to scores, on a CPU."""
    kernels, scale = torch.ops.aten, options.scale
    if query.device.type == "cpu":
        q, k, v = (in_fastest_type(x) for x in (query, key, value))
        mask = None if mask is None else mask.to(q.dtype)
        wide, lse = kernels._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        out = wide.to(query.dtype)
    else:
        out, lse, *_ = kernels._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _kernel_gradients(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, for the result ``out`` and log-sum-exp ``lse`` over these and other keys."""
    kernels, scale = torch.ops.aten, options.scale
    given = (upstream, query, key, value, out, lse.contiguous())
    if query.device.type == "cpu":
        wide = tuple(in_fastest_type(x) for x in given)
        mask = None if mask is None else mask.to(wide[0].dtype)
        grads = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, 0.0, causal, attn_mask=mask, scale=scale
        )
        found = tuple(each.to(query.dtype) for each in grads)
    else:
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout's generator
        found = kernels._scaled_dot_product_flash_attention_backward(
            *given, None, None, query.shape[2], key.shape[2], 0.0, causal, unused, unused, scale=scale
        )
    grad_query, grad_key, grad_value = found[:3]
    return grad_query, grad_key, grad_value


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All with zeros up to the width of the widest: torch's kernels have one for queries, keys and values."""
    width = max(x.shape[3] for x in tensors)
    return tuple(x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in tensors)


def _fold(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [1, b·n, s, d], a view: samples don't interact, so their heads count as heads of one sample."""
    return x.flatten(1, 2).transpose(0, 1).unsqueeze(0)


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    """[1, b·n, s, d] -> [s, b, n, d] for the b and n of ``like``."""
    return x.squeeze(0).transpose(0, 1).reshape(-1, *like.shape[1:3], x.shape[3])
