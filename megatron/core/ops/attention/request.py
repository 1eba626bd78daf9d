"""An attention call: the facts by which a backend accepts it, and the options with which it is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.device import capability


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Everything about a call but its three tensors.

    ``causal``: a query sees keys up to its own position.  ``offset``: position of the first query, counted from the
    first key; None: the last query is at the last key, so cached keys may precede.
    ``window``: how many keys before and after its own position a query sees (sliding window, arXiv:2004.05150).
    ``scale``: of the scores; usually 1 / sqrt(d).  ``dropout``: on the probabilities, drawn from ``generator``.
    ``soft_cap``: scaled scores s become cap·tanh(s / cap), before anything is added (Gemma 2, arXiv:2408.00118).
    ``slopes`` [n]: each score loses slope times the distance between query and key (ALiBi, arXiv:2108.12409).
    ``sinks`` [n]: scores of one more key, whose value is zero (attention sinks, arXiv:2309.17453); may need a gradient.
    ``document_ids`` [b, s] int: document of each position; a query sees keys of its own document only. A document is
    one run of positions; queries and keys are the same positions.
    ``ahead`` [b, s] int, with ``causal``: how many keys after its own position a query sees. Queries and keys are the
    same positions.
    ``attention_mask`` [b, sk] bool: True for real keys; a query that sees no key gets zeros.
    ``bias`` [n, sq, sk]: added to the scores of every sample, in the type of the queries; it may need a gradient.
    ``softmax_in_fp32``: for backends that would otherwise compute it in the type of the queries.
    """

    causal: bool
    scale: float
    offset: int | None = None
    window: tuple[int, int] | None = None
    dropout: float = 0.0
    generator: torch.Generator | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    document_ids: Tensor | None = None
    ahead: Tensor | None = None
    attention_mask: Tensor | None = None
    bias: Tensor | None = None
    softmax_in_fp32: bool = False

    def visible(self, rows: slice, *, queries: int, keys: int) -> slice:
        """The keys, of ``keys``, that any of the queries ``rows``, of ``queries``, sees; padding apart."""
        first = rows.start + (keys - queries if self.offset is None else self.offset)
        last = first + rows.stop - rows.start - 1
        before, after = self.sides
        start = 0 if before is None else max(0, first - before)
        stop = keys if after is None else min(keys, last + 1 + after)
        return slice(min(start, keys), max(stop, 0))

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own position a query sees; None for all."""
        before, after = self.window or (None, None)
        return before, 0 if self.causal else after


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What a backend needs to accept or refuse a call. Needs no tensors, so that start-up can report the choice.

    ``partial``: the call is for some of the keys, and its result will be merged with others (``partial.py``).
    ``deterministic``: its gradients must be the same in each run. ``capability``: of the GPU; None where it isn't
    known, as on the machine of a dry run.
    """

    device: torch.device
    dtype: torch.dtype
    query_length: int
    key_length: int
    head_width: int
    causal: bool
    dropout: float = 0.0
    document_ids: bool = False
    ahead: bool = False
    attention_mask: bool = False
    bias: bool = False
    window: tuple[int, int] | None = None
    soft_cap: bool = False
    slopes: bool = False
    sinks: bool = False
    softmax_in_fp32: bool = False
    needs_grad: bool = True
    partial: bool = False
    deterministic: bool = False
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, options: AttentionOptions, *, partial: bool = False) -> AttentionRequest:
        """The facts of a call. Parts are computed without autograd, but their gradients are computed later."""
        assert not (partial and options.document_ids is not None), "the caller of a partial call splits documents"
        return cls(
            device=q.device,
            dtype=q.dtype,
            query_length=q.shape[0],
            key_length=k.shape[0],
            head_width=q.shape[-1],
            causal=options.causal,
            dropout=options.dropout,
            document_ids=options.document_ids is not None,
            ahead=options.ahead is not None,
            attention_mask=options.attention_mask is not None,
            bias=options.bias is not None,
            window=options.window,
            soft_cap=options.soft_cap is not None,
            slopes=options.slopes is not None,
            sinks=options.sinks is not None,
            softmax_in_fp32=options.softmax_in_fp32,
            needs_grad=partial or q.requires_grad,
            partial=partial,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            capability=capability(q.device),
        )


@dataclass(frozen=True)
class PartialResult:
    """Attention over some of the keys, with what is needed to merge it with attention over others.

    ``out`` [sq, b, n, d]. ``lse`` [sq, b, n]: logarithm of the sum of the exponentials of a query's scores, in fp32 or
    fp64; minus infinity for a query that saw no key, whose ``out`` is zero.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Gradients of the three inputs of attention and of its bias, each shaped like its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
