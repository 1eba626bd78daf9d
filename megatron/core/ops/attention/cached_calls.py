"""Attention of a few queries of one text to cached keys, heads first: the calls of a generation step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention.masks import alibi
from megatron.core.ops.attention.request import AttentionOptions
from megatron.core.ops.matmul import lacks_bf16

_SINK_COLUMNS = 16  # as many as a vector has: keys stay in their lanes, so sums are in the same order


@dataclass(frozen=True)
class CachedCall:
    """Queries at positions ``start`` … of a text, to its keys at ``first_key`` … ``stop_key - 1``, of which a query
    sees those up to its own position, or all with ``is_together``, and with a window those in it.
    """

    start: int
    queries: int
    first_key: int
    stop_key: int
    is_together: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether queries and keys are the same positions."""
        return self.start == self.first_key and self.start + self.queries == self.stop_key

    def bias(
        self, options: AttentionOptions, more: Callable[[Tensor, Tensor], Tensor] | None, like: Tensor
    ) -> Tensor | None:
        """What is added to scores ``[1 or n, queries, keys]``; None for nothing. ``more``: see ``with_bias``."""
        before, _ = options.sides
        is_masked = not self.is_together and (self.queries > 1 or self.stop_key > self.start + 1)
        is_masked |= before is not None and self.first_key < self.start + self.queries - 1 - before
        if not is_masked and options.slopes is None and more is None:
            return None
        asking = torch.arange(self.start, self.start + self.queries, device=like.device)
        keys = torch.arange(self.first_key, self.stop_key, device=like.device)
        ahead = keys - asking[:, None]
        hidden = (ahead > 0) & (not self.is_together)
        hidden = hidden if before is None else hidden | (ahead < -before)
        found = like.new_zeros(1, *ahead.shape)
        if options.slopes is not None:
            found = alibi(options.slopes, ahead, like.dtype)
        if more is not None:
            found = found + more(asking, keys).to(like.dtype)
        return found.masked_fill(hidden, -math.inf)


class CachedBackend(Protocol):
    """How calls are computed. ``takes_texts``: whether one call serves several texts; it has one, else."""

    takes_texts: bool

    def supports(self, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
        """None, or why this backend cannot compute the call."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """``q`` [g, rows, d], where rows are the query heads of a group times the queries, ``k`` [g, keys, d], ``v``
        [g, keys, e] -> [g, rows, e]. ``bias`` [1 or g, rows, keys] is added to the scores. ``causal``: instead of a
        bias, row r sees keys 0 … r. Or of texts [texts, g, …] with a bias [texts, 1, 1, keys].
        """
        ...


@functools.cache
def is_fast_in_bf16() -> bool:
    """Whether torch's kernel computes bf16 faster than matrix products do: where there is AMX or a dot product of bf16,
    and with AVX2 alone, where it takes as long as in fp32.

    There it takes half the time for a few queries of a text, and less for several texts in one call. A single query
    takes longer on AMD's processors, but where bits may not depend on the batch, as by default, none is alone.
    """
    has_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return has_bf16 or torch.backends.cpu.get_cpu_capability() == "AVX2"


class Kernel:
    """Calls by torch's attention kernel."""

    takes_texts = True

    def supports(self, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
        """None, or why torch's kernel cannot compute the call."""
        if options.soft_cap is not None or options.sinks is not None:
            return "it has neither soft caps nor sinks"
        if k.shape[-1] != v.shape[-1]:
            return "its keys and values have one width"
        if k.device.type == "cpu" and k.dtype == torch.bfloat16 and not is_fast_in_bf16():
            return "in bf16 it is slow on this CPU"
        if k.device.type == "cpu" and k.dtype == torch.float16 and lacks_bf16():
            return "in fp16 it is slow on this CPU"
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Attention of a call by torch's kernel."""
        if q.dim() == 4:
            return F.scaled_dot_product_attention(q, k, v, bias, scale=options.scale)
        mask = None if bias is None else bias[None]
        given = (q[None], k[None], v[None])
        return F.scaled_dot_product_attention(*given, mask, is_causal=causal, scale=options.scale)[0]


class Grouped:
    """Calls by matrix products, which serve every call. Keys are not repeated for the query heads that share them.
    16-bit numbers are multiplied in fp32 on processors without instructions for them.
    """

    takes_texts = False

    def supports(self, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
        """None: every call is taken."""
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Attention of a call by matrix products over groups of query heads."""
        if q.dim() == 4:
            bias = None if bias is None else bias[0].expand(-1, q.shape[2], -1)
            return self.attend(q[0], k[0], v[0], options, bias, causal=causal)[None]
        if q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu" and lacks_bf16():
            wide = None if bias is None else bias.float()
            return self.attend(q.float(), k.float(), v.float(), options, wide, causal=causal).to(q.dtype)
        keys = k.transpose(1, 2)
        if causal:
            rows = torch.arange(q.shape[1], device=q.device)
            bias = q.new_zeros(1, len(rows), len(rows)).masked_fill(rows > rows[:, None], -math.inf)
        if options.soft_cap is None and bias is not None:
            scores = torch.baddbmm(bias, q, keys, alpha=options.scale)
        else:
            scores = torch.bmm(q, keys).mul_(options.scale)
            if options.soft_cap is not None:
                scores = scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
                scores = scores if bias is None else scores + bias
        columns = 0
        if options.sinks is not None:
            columns = _SINK_COLUMNS
            sinks = options.sinks.to(scores.dtype).view(len(q), -1, 1, 1)
            front = scores.new_full((*sinks.shape[:2], q.shape[1] // sinks.shape[1], columns), -math.inf)
            front[..., :1] = sinks
            scores = torch.cat((front.flatten(1, 2), scores), dim=-1)
        return torch.bmm(scores.softmax(dim=-1)[..., columns:], v)


# In order of preference; the last supports everything.
CACHED_BACKENDS: dict[str, CachedBackend] = {"sdpa": Kernel(), "grouped": Grouped()}


def cached_backend(k: Tensor, v: Tensor, options: AttentionOptions) -> CachedBackend:
    """The first of ``CACHED_BACKENDS`` that supports calls with such keys and values."""
    return next(each for each in CACHED_BACKENDS.values() if each.supports(k, v, options) is None)
